"""From logits to tokens and log probabilities. Each row is drawn by its own request's parameters, as if it were alone.

A draw is Gumbel-max: argmax over the kept tokens of logit / temperature + noise(seed, position, token id). That equals
sampling from the softmax, needs no shared generator, and gives the same token in any company and on any device;
cuda/include/octavo/sample.h defines it to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine import ops
from engine.schedule.plan import ScheduledSequence, StepOutcome
from engine.types import TokenLogprob

Tensor = torch.Tensor

NOT_FINITE = -1  # in place of a token: its logits were not finite
NO_TOKEN = -2  # in place of a token: what the request allows is nothing

_NO_TOKEN_MEANS = {
    NOT_FINITE: "the model gave non-finite logits",
    NO_TOKEN: "what the request asks for leaves no token to draw",
}
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SamplingArrays:
    """Parameters of n rows: temperature, top_p, min_p fp32; top_k, positions int32; seeds int64 (the unsigned seed's
    bits). `positions`: the index, in its sequence, of the token to draw."""

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seeds: NDArray[np.int64]
    positions: NDArray[np.int32]

    def all(self) -> list[NDArray[np.generic]]:
        return [self.temperature, self.top_k, self.top_p, self.min_p, self.seeds, self.positions]


def sampling_arrays(entries: Sequence[ScheduledSequence], rows: int, greedy: Sequence[int] = ()) -> SamplingArrays:
    """`rows` >= len(entries); the rest is greedy, and so are the rows of `greedy`, which are drawn again."""
    arrays = SamplingArrays(
        temperature=np.zeros(rows, dtype=np.float32),
        top_k=np.zeros(rows, dtype=np.int32),
        top_p=np.ones(rows, dtype=np.float32),
        min_p=np.zeros(rows, dtype=np.float32),
        seeds=np.zeros(rows, dtype=np.int64),
        positions=np.zeros(rows, dtype=np.int32),
    )
    for row, entry in enumerate(entries):
        parameters = entry.sequence.group.request.sampling
        arrays.positions[row] = entry.start + entry.count
        if parameters.temperature == 0.0:
            continue
        arrays.temperature[row] = parameters.temperature
        arrays.top_k[row] = min(parameters.top_k, _INT32_MAX)
        arrays.top_p[row] = parameters.top_p
        arrays.min_p[row] = parameters.min_p
        arrays.seeds[row] = np.uint64(entry.sequence.seed).astype(np.int64)
    if greedy:
        arrays.temperature[list(greedy)] = 0.0
    return arrays


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """SamplingArrays on a device."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor


def sample_into(
    tokens: Tensor,
    logits: Tensor,
    sampling: SamplingTensors,
    *,
    newest: Tensor | None = None,
    targets: Tensor | None = None,
    best: Tensor | None = None,
    workspace: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """tokens [n] int32 of logits [n, vocabulary] fp32; -1 where a row is not finite. newest[targets] gets them too.
    best: of greedy rows, what the LM head's kernel has found."""
    ops.sample(
        tokens,
        logits,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seeds=sampling.seeds,
        positions=sampling.positions,
        newest=newest,
        targets=targets,
        best=best,
        workspace=workspace,
        pdl=pdl,
    )


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Of n rows: the sampled token's log probability and rank, and the likeliest tokens, as many as any row asks
    for."""

    chosen: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_values: Tensor
    wanted: list[int | None]  # how many alternatives a row asks for; None: nothing at all

    def read(self, tokens: Sequence[int]) -> list[TokenLogprob | None]:
        """Waits for the device."""
        chosen, ranks = self.chosen.tolist(), self.ranks.tolist()
        ids, values = self.top_ids.tolist(), self.top_values.tolist()
        return [
            None
            if count is None
            else TokenLogprob(
                tokens[row], chosen[row], ranks[row], list(zip(ids[row][:count], values[row][:count], strict=True))
            )
            for row, count in enumerate(self.wanted)
        ]


def logprobs_of(
    logits: Tensor, tokens: Tensor, entries: Sequence[ScheduledSequence], *, row_by_row: bool = False
) -> LogprobTensors | None:
    """Of the model's own distribution, before temperature and filters; None if no entry asks for any.

    row_by_row: no row's sum may depend on how many there are or where it lies in memory, as torch's do on a GPU."""
    wanted = [entry.sequence.group.request.top_logprobs for entry in entries]
    if all(count is None for count in wanted):
        return None
    most = min(max(count or 0 for count in wanted), logits.shape[1])
    if not row_by_row:
        return LogprobTensors(*_scores_of(logits, tokens, most), wanted)
    rows = len(wanted)
    chosen = torch.zeros(rows, dtype=torch.float32, device=logits.device)
    ranks = torch.zeros(rows, dtype=torch.int64, device=logits.device)
    ids = torch.zeros(rows, most, dtype=torch.int64, device=logits.device)
    values = torch.zeros(rows, most, dtype=torch.float32, device=logits.device)
    for row, count in enumerate(wanted):
        if count is not None:
            own = min(count, most)
            # A copy lies at an address of its own, which is always aligned alike.
            found = _scores_of(logits[row : row + 1].clone(), tokens[row : row + 1], own)
            chosen[row : row + 1], ranks[row : row + 1], ids[row : row + 1, :own], values[row : row + 1, :own] = found
    return LogprobTensors(chosen, ranks, ids, values, wanted)


def _scores_of(logits: Tensor, tokens: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Each token's log probability and rank [n], and the `most` likeliest ids and their log probabilities [n, most]."""
    values = torch.log_softmax(logits.float(), dim=1)
    chosen = values.gather(1, tokens.long().clamp_min(0)[:, None])
    top = torch.topk(values, most, dim=1)
    return chosen[:, 0], (values > chosen).sum(dim=1) + 1, top.indices, top.values


def outcome_of(
    tokens: list[int],
    logprobs: LogprobTensors | None,
    prompt_logprobs: dict[int, list[TokenLogprob]] | None = None,
) -> StepOutcome:
    """What the tokens of a step mean: NOT_FINITE and NO_TOKEN fail their requests."""
    failures = {row: _NO_TOKEN_MEANS[token] for row, token in enumerate(tokens) if token < 0}
    refused = frozenset(row for row in failures if tokens[row] == NO_TOKEN)
    found = [] if logprobs is None else logprobs.read(tokens)
    return StepOutcome(tokens, found, failures, refused, prompt_logprobs or {})
