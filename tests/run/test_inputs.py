"""The arrays of a step: where its tokens lie, and what a graph's padded rows may read and write."""

from __future__ import annotations

import numpy as np

from engine.kv.block_table import BlockTables
from engine.kv.oracle import OracleBlockAllocator
from engine.run.inputs import HOST_TOKEN, decode_arrays, prefill_arrays
from engine.schedule.plan import ScheduledSequence, StepPlan
from engine.schedule.sequence import RequestGroup, Sequence
from engine.types import SamplingParameters
from tests.schedule.fake_model import request

SIZE, SLOTS, BUCKET = 4, 6, 8


def test_a_step_of_decodes_and_chunks() -> None:
    """A decode whose token is on the device, the rest of a prompt, and a piece from the middle of another."""
    tables = BlockTables(OracleBlockAllocator(20), SLOTS, 5, SIZE)
    scheduled = []
    for row, (length, start, count, samples) in enumerate([(9, 9, 1, True), (7, 3, 4, True), (12, 4, 6, False)]):
        slot = tables.acquire_slot()
        tables.grow([slot], [start + count])
        known = [100 * row + index for index in range(length)]
        sequence = Sequence(RequestGroup(request(str(row), known), row, 0.0), 0, 0, known, 20)
        scheduled.append(ScheduledSequence(sequence, slot, start, count, samples))
    arrays = prefill_arrays(StepPlan(1, scheduled, scheduled[:2]), tables)
    assert arrays.token_ids.tolist() == [0, 103, 104, 105, 106, *range(204, 210)]
    assert arrays.sources.tolist() == [0] + [HOST_TOKEN] * 10
    assert arrays.positions.tolist() == [9, 3, 4, 5, 6, *range(4, 10)]
    places = list(zip([0] + [1] * 4 + [2] * 6, arrays.positions.tolist(), strict=True))
    assert arrays.slots.tolist() == [tables.rows[row, at // SIZE] * SIZE + at % SIZE for row, at in places]
    assert arrays.query_start.tolist() == [0, 1, 5, 11]
    assert arrays.context_lens.tolist() == [10, 7, 10]
    assert np.array_equal(arrays.block_tables, tables.rows[:3, :3])
    assert (arrays.num_decodes, arrays.max_query_len, arrays.prefill_start.tolist()) == (1, 6, [0, 4, 10])
    assert arrays.logits_rows is not None
    assert arrays.logits_rows.tolist() == [0, 4]
    assert arrays.targets.tolist() == [0, 1]
    assert arrays.scored is not None
    assert arrays.scored.positions.tolist() == [9, 6]
    assert arrays.scored.context_lens.tolist() == [10, 7]
    assert arrays.scored.query_start.tolist() == [0, 1, 2]
    assert np.array_equal(arrays.scored.block_tables, tables.rows[:2, :3])
    inner = prefill_arrays(StepPlan(2, scheduled[2:], []), tables)
    assert inner.logits_rows is not None
    assert inner.scored is not None
    assert [len(array) for array in (inner.logits_rows, inner.targets, *inner.scored.all())] == [0, 0, 0, 0, 0, 1]


def test_padded_rows_read_nothing_and_write_to_the_scratch_block() -> None:
    """Three sequences in a bucket of eight: real rows as they are; the others have no context, no block but the scratch
    one, and their tokens go where nobody reads."""
    tables = BlockTables(OracleBlockAllocator(20), SLOTS, 5, SIZE)
    scheduled = []
    for row, length in enumerate((1, 8, 11)):
        slot = tables.acquire_slot()
        tables.grow([slot], [length])
        sequence = Sequence(RequestGroup(request(str(row), [row]), row, 0.0), 0, 0, [row] * length, 20)
        scheduled.append(ScheduledSequence(sequence, slot, length - 1, 1, True))
    arrays = decode_arrays(StepPlan(1, scheduled, scheduled), tables, BUCKET)
    assert arrays.context_lens.tolist() == [1, 8, 11] + [0] * 5
    assert arrays.positions[:3].tolist() == [0, 7, 10]
    assert [slot // SIZE for slot in arrays.slots[:3]] == [
        tables.rows[row, pos // SIZE] for row, pos in ((0, 0), (1, 7), (2, 10))
    ]
    assert (arrays.slots[3:] // SIZE == 0).all()
    assert (arrays.block_tables[3:] == 0).all()
    assert (arrays.targets[3:] == SLOTS).all()
    assert sorted(arrays.targets[:3]) == [0, 1, 2]
    assert (arrays.sources[3:] == HOST_TOKEN).all()
    assert arrays.block_tables.shape == (BUCKET, 5)
    assert np.array_equal(arrays.query_start, np.arange(BUCKET + 1))
    assert not arrays.sampling.temperature[3:].any()


def test_logits_are_wanted_of_rows_that_somebody_reads() -> None:
    """Drawn at random, with log probabilities (also none beside the token's), and drawn again after an edit."""
    tables = BlockTables(OracleBlockAllocator(20), SLOTS, 5, SIZE)
    greedy, random = SamplingParameters(temperature=0.0), SamplingParameters(temperature=0.7)
    asked = [
        request("0", [1], sampling=greedy),
        request("1", [1], sampling=random),
        request("2", [1], sampling=greedy, top_logprobs=0),
        request("3", [1], sampling=greedy),
        request("4", [1], sampling=greedy),
    ]
    scheduled = []
    for row, one in enumerate(asked):
        slot = tables.acquire_slot()
        tables.grow([slot], [1])
        sequence = Sequence(RequestGroup(one, row, 0.0), 0, 0, [row], 20)
        scheduled.append(ScheduledSequence(sequence, slot, 0, 1, True))
    arrays = decode_arrays(StepPlan(1, scheduled, scheduled, edited=[3]), tables, BUCKET)
    assert arrays.wanted.tolist() == [0, 1, 1, 1, 0, 0, 0, 0]


def test_rows_that_do_not_sample_leave_nothing_behind() -> None:
    """Two that sample, then one that is fed a known token: what its row draws goes where nobody reads."""
    tables = BlockTables(OracleBlockAllocator(20), SLOTS, 5, SIZE)
    scheduled = []
    for row, samples in enumerate((True, True, False)):
        slot = tables.acquire_slot()
        tables.grow([slot], [4])
        one = request(str(row), [1], sampling=SamplingParameters(temperature=0.5), top_logprobs=1)
        sequence = Sequence(RequestGroup(one, row, 0.0), 0, 0, [10 + row] * 4, 20)
        scheduled.append(ScheduledSequence(sequence, slot, 3 if samples else 1, 1, samples))
    arrays = decode_arrays(StepPlan(1, scheduled, scheduled[:2]), tables, BUCKET)
    assert arrays.token_ids[:3].tolist() == [10, 11, 12]
    assert arrays.positions[:3].tolist() == [3, 3, 1]
    assert arrays.context_lens[:3].tolist() == [4, 4, 2]
    assert arrays.targets.tolist() == [0, 1] + [SLOTS] * 6
    assert arrays.wanted.tolist() == [1, 1] + [0] * 6
    assert arrays.sampling.temperature.tolist() == [0.5, 0.5] + [0.0] * 6
