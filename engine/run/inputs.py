"""A plan's tokens, positions, slots and tables as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from engine.kv.block_table import BlockTables
from engine.run.sampler import SamplingArrays, sampling_arrays
from engine.schedule.plan import ScheduledSequence, StepPlan
from engine.step_arrays import copy_ids

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]

HOST_TOKEN = -1  # in `sources`: the token's value is in `token_ids`


@dataclass(frozen=True, slots=True)
class ScoredArrays:
    """As in ScoredRows."""

    positions: Int32Array
    context_lens: Int32Array
    block_tables: Int32Array
    query_start: Int32Array

    def all(self) -> list[Int32Array]:
        return [self.positions, self.context_lens, self.block_tables, self.query_start]


@dataclass(frozen=True, slots=True)
class StepArrays:
    """T tokens of S sequences, as in ForwardBatch. `sources` [T]: the slot whose newest token on the device is this
    one, or HOST_TOKEN. `logits_rows`: None scores every row, and `scored` with it. `targets`: the slot of each scored
    row's sequence; `wanted`: whether anything but the greedy token is read of its logits; `sampling`: its parameters.
    `prefill_start`: query_start of the sequences behind the first `num_decodes`, counted from their first."""

    token_ids: Int32Array
    sources: Int32Array
    positions: Int32Array
    slots: Int64Array
    block_tables: Int32Array
    query_start: Int32Array
    context_lens: Int32Array
    logits_rows: Int64Array | None
    scored: ScoredArrays | None
    targets: Int64Array
    wanted: Int32Array
    sampling: SamplingArrays
    prefill_start: Int32Array
    num_decodes: int
    max_query_len: int


def prefill_arrays(plan: StepPlan, tables: BlockTables) -> StepArrays:
    """Any plan. Tables are as wide as the longest context needs."""
    entries = plan.scheduled
    # As lists, since they are short: before a prompt's first kernel a numpy call costs more than its loop.
    counts = [entry.count for entry in entries]
    starts = [0, *accumulate(counts)]
    sampled = [index for index, entry in enumerate(entries) if entry.samples]
    num_decodes = counts.count(1)
    lengths = [entry.start + entry.count for entry in entries]
    context_lens = np.array(lengths, dtype=np.int32)
    rows = np.array([entry.slot for entry in entries], dtype=np.int32)
    block_tables = tables.rows[rows, : tables.blocks_for(max(lengths))]
    positions = _positions(entries)
    token_ids, sources = _tokens(entries, starts[-1])
    return StepArrays(
        token_ids=token_ids,
        sources=sources,
        positions=positions,
        slots=_prefill_slots(tables, entries, num_decodes, rows, positions),
        block_tables=block_tables,
        query_start=np.array(starts, dtype=np.int32),
        context_lens=context_lens,
        logits_rows=np.array([starts[index + 1] - 1 for index in sampled], dtype=np.int64),
        scored=scored_arrays(context_lens, block_tables, None if len(sampled) == len(entries) else sampled),
        targets=rows[sampled].astype(np.int64),
        wanted=np.ones(len(sampled), dtype=np.int32),
        sampling=sampling_arrays(plan.sampling, len(sampled), plan.edited),
        prefill_start=np.array([start - starts[num_decodes] for start in starts[num_decodes:]], dtype=np.int32),
        num_decodes=num_decodes,
        max_query_len=max(counts),
    )


def scored_arrays(context_lens: Int32Array, block_tables: Int32Array, scored: list[int] | None = None) -> ScoredArrays:
    """Of the sequences whose last rows are scored; None: of all, with the arrays as they are."""
    if scored is not None:
        context_lens, block_tables = context_lens[scored], block_tables[scored]
    query_start = np.arange(len(context_lens) + 1, dtype=np.int32)
    return ScoredArrays(context_lens - 1, context_lens, block_tables, query_start)


def decode_arrays(plan: StepPlan, tables: BlockTables, bucket: int) -> StepArrays:
    """A plan of one token a sequence, those that sample first, padded to `bucket` rows. A padded row reads nothing
    (context 0) and writes its K and V to the scratch block; what is drawn in it, or in one that does not sample, goes
    where nobody reads. Tables have their full width, so that shapes depend on the bucket alone."""
    entries, count = plan.scheduled, len(plan.scheduled)
    drawn = len(plan.sampling)
    positions = np.zeros(bucket, dtype=np.int32)
    context_lens = np.zeros(bucket, dtype=np.int32)
    slots = np.zeros(bucket, dtype=np.int64)
    block_tables = np.zeros((bucket, tables.rows.shape[1]), dtype=np.int32)
    rows = np.fromiter((entry.slot for entry in entries), dtype=np.int32, count=count)
    positions[:count] = np.fromiter((entry.start for entry in entries), dtype=np.int32, count=count)
    context_lens[:count] = positions[:count] + 1
    slots[:count] = _slots(tables, rows, positions[:count])
    block_tables[:count] = tables.rows[rows]
    targets = np.full(bucket, len(tables.rows), dtype=np.int64)
    targets[:drawn] = rows[:drawn]
    token_ids, sources = _tokens(entries, bucket)
    return StepArrays(
        token_ids=token_ids,
        sources=sources,
        positions=positions,
        slots=slots,
        block_tables=block_tables,
        query_start=np.arange(bucket + 1, dtype=np.int32),
        context_lens=context_lens,
        logits_rows=None,
        scored=None,
        targets=targets,
        wanted=_wanted(plan, bucket),
        sampling=sampling_arrays(plan.sampling, bucket, plan.edited),
        prefill_start=np.zeros(1, dtype=np.int32),
        num_decodes=bucket,
        max_query_len=1,
    )


def _wanted(plan: StepPlan, length: int) -> Int32Array:
    """Rows that are drawn at random or drawn again, or whose log probabilities are asked for."""
    wanted = np.zeros(length, dtype=np.int32)
    for row, entry in enumerate(plan.sampling):
        request = entry.sequence.group.request
        wanted[row] = request.sampling.temperature > 0.0 or request.top_logprobs is not None
    wanted[list(plan.edited)] = 1
    return wanted


def _tokens(entries: list[ScheduledSequence], length: int) -> tuple[Int32Array, Int32Array]:
    token_ids = np.zeros(length, dtype=np.int32)
    sources = np.full(length, HOST_TOKEN, dtype=np.int32)
    row = 0
    for entry in entries:
        known = entry.sequence.token_ids
        if entry.count == 1 and entry.start < len(known):
            token_ids[row] = known[entry.start]
        elif entry.start < len(known):
            copy_ids(token_ids[row : row + entry.count], known, entry.start)
        else:
            sources[row] = entry.slot  # sampled by a step that is still running
        row += entry.count
    return token_ids, sources


def _positions(entries: list[ScheduledSequence]) -> Int32Array:
    pieces = [np.arange(entry.start, entry.start + entry.count, dtype=np.int32) for entry in entries]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _slots(tables: BlockTables, rows: Int32Array, positions: Int32Array) -> Int64Array:
    blocks = tables.rows[rows, positions // tables.block_size].astype(np.int64)
    slots: Int64Array = blocks * tables.block_size + positions % tables.block_size
    return slots


def _prefill_slots(
    tables: BlockTables, entries: list[ScheduledSequence], num_decodes: int, rows: Int32Array, positions: Int32Array
) -> Int64Array:
    """Decodes come first. A chunk takes whole blocks, but for the ends: a tenth of the work of token by token."""
    pieces = [_slots(tables, rows[:num_decodes], positions[:num_decodes])] if num_decodes else []
    size = tables.block_size
    for entry in entries[num_decodes:]:
        first, last = entry.start // size, (entry.start + entry.count - 1) // size
        blocks = tables.rows[entry.slot, first : last + 1].astype(np.int64)
        begin = entry.start - first * size
        pieces.append((blocks[:, None] * size + np.arange(size)).reshape(-1)[begin : begin + entry.count])
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
