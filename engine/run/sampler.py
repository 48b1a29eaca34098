"""From logits to tokens. Each row is drawn by its own request's parameters, as if it were alone.

A draw is Gumbel-max: argmax over the kept tokens of logit / temperature + noise(seed, position, token id). That equals
sampling from the softmax, needs no shared generator, and gives the same token in any company. Filters apply in the
order of Hugging Face's logits warpers: temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import torch

from engine.run.philox import gumbel
from engine.schedule.plan import ScheduledSequence, StepOutcome
from engine.types import SamplingParameters, TokenLogprob

GREEDY_TEMPERATURE = 1e-5  # at or below: argmax


def sample(logits: torch.Tensor, entries: list[ScheduledSequence], vocab_size: int) -> StepOutcome:
    """logits [n, padded vocabulary] fp32, one row an entry; ids from `vocab_size` on can never be drawn. A row with a
    value that is not finite becomes a failure of its own request."""
    logits = logits[:, :vocab_size]
    finite = torch.isfinite(logits).all(dim=1).tolist()
    greedy = torch.argmax(logits, dim=1).tolist()
    tokens: list[int] = []
    logprobs: list[TokenLogprob | None] = []
    failures: dict[int, str] = {}
    for index, entry in enumerate(entries):
        parameters = entry.sequence.group.request.sampling
        token = greedy[index]
        if not finite[index]:
            failures[index] = "the model gave non-finite logits"
        elif parameters.temperature > GREEDY_TEMPERATURE:
            token = _draw(logits[index], parameters, entry.sequence.seed, entry.start + entry.count)
        tokens.append(token)
        top = entry.sequence.group.request.top_logprobs
        wanted = top is not None and index not in failures
        logprobs.append(_logprob(logits[index], token, top or 0) if wanted else None)
    return StepOutcome(tokens, logprobs, failures)


def _draw(logits: torch.Tensor, parameters: SamplingParameters, seed: int, position: int) -> int:
    """`position` is the index, in the sequence, of the token to be drawn."""
    scores = _filtered(logits / parameters.temperature, parameters)
    noise = torch.from_numpy(gumbel(seed, position, scores.numel())).to(scores.device)
    return int(torch.argmax(scores + noise))


def _filtered(scores: torch.Tensor, parameters: SamplingParameters) -> torch.Tensor:
    """scores [vocabulary] with -inf for the tokens that top-k, top-p and min-p drop; the likeliest always stays."""
    if 0 < parameters.top_k < scores.numel():
        threshold = torch.topk(scores, parameters.top_k).values[-1]
        scores = scores.masked_fill(scores < threshold, float("-inf"))
    if parameters.top_p < 1.0:
        ordered, order = torch.sort(scores)
        dropped = torch.softmax(ordered, dim=0).cumsum(dim=0) <= 1.0 - parameters.top_p
        dropped[-1] = False
        scores = scores.masked_fill(torch.zeros_like(dropped).scatter(0, order, dropped), float("-inf"))
    if parameters.min_p > 0.0:
        probabilities = torch.softmax(scores, dim=0)
        scores = scores.masked_fill(probabilities < parameters.min_p * probabilities.max(), float("-inf"))
    return scores


def _logprob(logits: torch.Tensor, token: int, top: int) -> TokenLogprob:
    """Of the model's own distribution, before temperature and filters."""
    values = torch.log_softmax(logits.float(), dim=0)
    best = torch.topk(values, min(top, values.numel())) if top else None
    return TokenLogprob(
        token_id=token,
        logprob=float(values[token]),
        rank=int((values > values[token]).sum()) + 1,
        top=[] if best is None else list(zip(best.indices.tolist(), best.values.tolist(), strict=True)),
    )
