"""A plan's tokens, positions, slots and tables as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.kv.block_table import BlockTables
from engine.run.sampler import SamplingArrays, sampling_arrays
from engine.schedule.plan import ScheduledSequence, StepPlan

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
    counts = np.fromiter((entry.count for entry in entries), dtype=np.int32, count=len(entries))
    query_start = np.zeros(len(entries) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start[1:])
    context_lens = np.fromiter((entry.start + entry.count for entry in entries), dtype=np.int32, count=len(entries))
    sampled = np.fromiter((entry.samples for entry in entries), dtype=bool, count=len(entries))
    num_decodes = int((counts == 1).sum())
    width = tables.blocks_for(int(context_lens.max()))
    rows = np.fromiter((entry.slot for entry in entries), dtype=np.int32, count=len(entries))
    positions = np.concatenate([np.arange(entry.start, entry.start + entry.count, dtype=np.int32) for entry in entries])
    token_ids, sources = _tokens(entries, int(query_start[-1]))
    block_tables = tables.rows[rows, :width]
    return StepArrays(
        token_ids=token_ids,
        sources=sources,
        positions=positions,
        slots=_slots(tables, np.repeat(rows, counts), positions),
        block_tables=block_tables,
        query_start=query_start,
        context_lens=context_lens,
        logits_rows=(query_start[1:] - 1)[sampled].astype(np.int64),
        scored=scored_arrays(context_lens[sampled], block_tables[sampled]),
        targets=rows[sampled].astype(np.int64),
        wanted=np.ones(int(sampled.sum()), dtype=np.int32),
        sampling=sampling_arrays(plan.sampling, int(sampled.sum()), plan.edited),
        prefill_start=query_start[num_decodes:] - query_start[num_decodes],
        num_decodes=num_decodes,
        max_query_len=int(counts.max()),
    )


def scored_arrays(context_lens: Int32Array, block_tables: Int32Array) -> ScoredArrays:
    """Of sequences whose last rows are scored."""
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
        if entry.start < len(known):
            token_ids[row : row + entry.count] = known[entry.start : entry.start + entry.count]
        else:
            sources[row] = entry.slot  # sampled by a step that is still running
        row += entry.count
    return token_ids, sources


def _slots(tables: BlockTables, rows: Int32Array, positions: Int32Array) -> Int64Array:
    blocks = tables.rows[rows, positions // tables.block_size].astype(np.int64)
    slots: Int64Array = blocks * tables.block_size + positions % tables.block_size
    return slots
