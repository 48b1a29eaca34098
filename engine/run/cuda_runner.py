"""Runs plans on a CUDA device. Decode steps replay a captured graph; steps with a prefill chunk run eagerly.

Sampled tokens stay on the device: a step reads the newest token of each sequence from `newest`, by slot, so the
next step can be launched before the host knows what this one sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engine import ops
from engine.kv.block_table import BlockTables
from engine.kv.oracle import OracleBlockAllocator
from engine.model.decoder import Decoder
from engine.run.block_moves import BlockMover
from engine.run.buckets import InvariantBuckets, MixedBuckets, decode_buckets
from engine.run.inputs import HOST_TOKEN, Int32Array, StepArrays, decode_arrays, prefill_arrays, scored_arrays
from engine.run.kv_pool import allocate_pool
from engine.run.logits import redraw
from engine.run.milestones import Milestones
from engine.run.prompt_scores import score_prompts
from engine.run.runner import DeviceBatch, FinishedStep, batch_of, packed
from engine.run.sampler import LogprobTensors, logprobs_of, outcome_of, sample_into, sampling_arrays
from engine.run.staging import DeviceStaging
from engine.schedule.plan import StepOutcome, StepPlan
from engine.types import TokenLogprob

Tensor = torch.Tensor

GRAPH_BYTES = 256 << 20  # set aside for the graphs' memory pool: library workspaces; activations are the decoder's own
_RESULTS = 3  # pinned results: of the step launched, the one in flight, and the one being read


@dataclass(frozen=True, slots=True)
class CapturedDecode:
    """One bucket's graph, and the logits it writes."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor  # [bucket, vocabulary] fp32


class DeviceStep:
    """A launched step: its tokens arrive in pinned memory when `done` has passed."""

    def __init__(
        self,
        tokens: Int32Array,
        done: torch.cuda.Event,
        logprobs: LogprobTensors | None,
        prompt_logprobs: dict[int, list[TokenLogprob]],
        milestones: Milestones,
    ) -> None:
        self._milestones = milestones
        self._passed = milestones.take()
        self._tokens = tokens
        self._done = done
        self._logprobs = logprobs
        self._prompt_logprobs = prompt_logprobs

    def wait(self) -> StepOutcome:
        self._milestones.wait(self._passed)
        self._done.synchronize()
        return outcome_of(self._tokens.tolist(), self._logprobs, self._prompt_logprobs)


class CudaRunner:
    lookahead = True

    def __init__(
        self,
        decoder: Decoder,
        kv_pool: Tensor,
        tables: BlockTables,
        vocab_size: int,
        mover: BlockMover,
        pulse: Callable[[], None] | None = None,
        *,
        use_graphs: bool = True,
        batch_invariant: bool = False,
    ) -> None:
        """pulse: called several times while a step with a prefill chunk is waited for. batch_invariant: for plans of
        SeparateSteps, with a decoder that was made so too."""
        self._milestones = Milestones(torch.cuda.Event, pulse or (lambda: None))
        decoder.pulse = self._milestones.piece
        self._decoder = decoder
        self._kv_pool = kv_pool
        self._tables = tables
        self._vocab_size = vocab_size
        self._mover = mover
        slots, width = tables.rows.shape
        device = kv_pool.device
        spec = decoder.spec
        self._staging = DeviceStaging[DeviceBatch](_staging_bytes(slots, width, decoder.max_tokens), device)
        # One entry a slot, and one that nothing reads, for rows that sample nothing.
        self._newest = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        self._best = torch.zeros(slots, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(slots, dtype=torch.int32, device=device)
        self._results = [torch.zeros(slots, dtype=torch.int32, pin_memory=True) for _ in range(_RESULTS)]
        self._turn = 0
        self._workspace = torch.zeros(
            ops.paged_attention_workspace_bytes(
                slots, spec.q_heads, spec.kv_heads, spec.head_dim, fixed=batch_invariant
            ),
            dtype=torch.uint8,
            device=device,
        )
        self._sample_workspace = torch.zeros(ops.sample_workspace_bytes(slots), dtype=torch.uint8, device=device)
        self._batch_invariant = batch_invariant
        self._use_graphs = use_graphs
        self._buckets: MixedBuckets | InvariantBuckets = (
            InvariantBuckets(slots, decoder.same_bits)
            if batch_invariant
            else MixedBuckets(decode_buckets(slots) if use_graphs else [])
        )
        self._graphs: dict[int, CapturedDecode] = {}

    # -- start -------------------------------------------------------------------------------------------------------

    @property
    def num_graphs(self) -> int:
        return len(self._buckets.sizes) if self._use_graphs else 0

    def graph_for(self, batch: int) -> torch.cuda.CUDAGraph:
        """The graph that a decode step of `batch` sequences replays. Raises StopIteration if it has none."""
        return self._graphs[next(size for size in self._buckets.sizes if size >= batch)].graph

    @torch.inference_mode()
    def run_arrays(self, arrays: StepArrays) -> None:
        """Runs one step eagerly and drops its result."""
        self._run(self._upload(arrays))
        torch.cuda.synchronize()

    @torch.inference_mode()
    def capture(self) -> None:
        """One graph a bucket, largest first, in one memory pool."""
        pool = torch.cuda.graph_pool_handle()
        for bucket in reversed(self._buckets.sizes[: self.num_graphs]):
            step = self._upload(decode_arrays(StepPlan(0, [], []), self._tables, bucket))
            self._run(step)  # loads modules and picks algorithms outside the capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = self._run(step)
            self._graphs[bucket] = CapturedDecode(graph, logits)
        torch.cuda.synchronize()

    # -- steps -------------------------------------------------------------------------------------------------------

    @property
    def moved(self) -> int:
        return self._mover.moved

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> FinishedStep | DeviceStep:
        self._mover.apply(plan, self._tables)
        if not plan.scheduled:
            return FinishedStep(StepOutcome([], []))
        logits = self._forward(plan)
        sampling = plan.sampling
        if not sampling:
            return FinishedStep(StepOutcome([], [], prompt_logprobs=self._scores(plan)))
        logits = logits[: len(sampling)]
        redraw(self._tokens, logits, plan, newest=self._newest, workspace=self._sample_workspace)
        return self._send_back(logits, plan)

    def _forward(self, plan: StepPlan) -> Tensor:
        """fp32 logits [n, vocabulary] whose first rows are those of the plan's `sampling`."""
        bucket = self._buckets.serving(plan)
        if bucket is None:
            self._milestones.marking = True
            try:
                return self._run(self._upload(prefill_arrays(plan, self._tables), keeps_hidden=bool(plan.scored)))
            finally:
                self._milestones.marking = False
        step = self._upload(decode_arrays(plan, self._tables, bucket))
        if not self._use_graphs:
            return self._run(step)
        captured = self._graphs[bucket]
        captured.graph.replay()
        return captured.logits

    def _scores(self, plan: StepPlan) -> dict[int, list[TokenLogprob]]:
        return score_prompts(self._decoder, plan, self._vocab_size) if plan.scored else {}

    def _upload(self, arrays: StepArrays, *, keeps_hidden: bool = False) -> DeviceBatch:
        """Steps that are shaped alike get the same batch, whose tensors hold this step's arrays."""
        return self._staging.upload(
            packed(arrays),
            lambda views: batch_of(
                *(views, arrays, self._kv_pool, self._workspace, self._newest, self._best, self._vocab_size),
                keeps_hidden=keeps_hidden,
            ),
            *(arrays.max_query_len, arrays.num_decodes, keeps_hidden),
        )

    def _run(self, step: DeviceBatch) -> Tensor:
        """Forward and sampling; gives the logits [n, vocabulary] fp32. All of it can be captured."""
        logits = self._decoder.scores(step.batch)[:, : self._vocab_size]
        count = len(step.targets)
        if count:
            sample_into(
                self._tokens[:count],
                logits,
                step.sampling,
                newest=self._newest,
                targets=step.targets,
                best=self._best[:count] if self._decoder.finds_best(step.batch) else None,
                workspace=self._sample_workspace,
                pdl=step.batch.pdl,
            )
        return logits

    def _send_back(self, logits: Tensor, plan: StepPlan) -> DeviceStep:
        count = len(plan.sampling)
        result = self._results[self._turn][:count]
        self._turn = (self._turn + 1) % _RESULTS
        logprobs = logprobs_of(logits, self._tokens[:count], plan.sampling, row_by_row=self._batch_invariant)
        result.copy_(self._tokens[:count], non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return DeviceStep(result.numpy(), done, logprobs, self._scores(plan), self._milestones)


def profile_largest_step(decoder: Decoder, block_size: int, *, batch_invariant: bool = False) -> None:
    """Runs the longest prefill that a step may hold on a pool of its own, so that torch has claimed every activation
    and library workspace before the KV pool takes the rest."""
    spec = decoder.spec
    width = -(-decoder.max_positions // block_size)
    tables = BlockTables(OracleBlockAllocator(1), decoder.max_logits, width, block_size)
    pool = allocate_pool(spec, 1, block_size, decoder.dtype, decoder.device)
    runner = CudaRunner(
        *(decoder, pool, tables, spec.vocab_size, BlockMover(pool, 0)),
        use_graphs=False,
        batch_invariant=batch_invariant,
    )
    runner.run_arrays(_scratch_prefill(decoder.max_tokens, tables))


def _staging_bytes(max_seqs: int, table_width: int, max_tokens: int) -> int:
    """Room for the largest step: six words a token, two table rows and 18 words a sequence, and alignment."""
    return 4 * (6 * max_tokens + max_seqs * (2 * table_width + 18)) + 1024


def _scratch_prefill(count: int, tables: BlockTables) -> StepArrays:
    """One sequence of up to `count` tokens whose blocks are all the scratch block."""
    slots, width = tables.rows.shape
    count = min(count, tables.block_size * width)
    context_lens, block_tables = np.asarray([count], dtype=np.int32), np.zeros((1, width), dtype=np.int32)
    return StepArrays(
        token_ids=np.zeros(count, dtype=np.int32),
        sources=np.full(count, HOST_TOKEN, dtype=np.int32),
        positions=np.arange(count, dtype=np.int32),
        slots=np.zeros(count, dtype=np.int64),
        block_tables=block_tables,
        query_start=np.asarray([0, count], dtype=np.int32),
        context_lens=context_lens,
        logits_rows=np.asarray([count - 1], dtype=np.int64),
        scored=scored_arrays(context_lens, block_tables),
        targets=np.asarray([slots], dtype=np.int64),
        wanted=np.ones(1, dtype=np.int32),
        sampling=sampling_arrays([], 1),
        prefill_start=np.asarray([0, count], dtype=np.int32),
        num_decodes=0,
        max_query_len=count,
    )
