"""Log probabilities of prompts. They need every token's logits, which a step does not compute otherwise."""

from __future__ import annotations

from itertools import accumulate

import torch

from engine.model.decoder import Decoder
from engine.schedule.plan import ScheduledSequence, StepPlan
from engine.types import TokenLogprob

_ROWS_AT_ONCE = 64  # logits of so many tokens are held at a time


def score_prompts(decoder: Decoder, plan: StepPlan, vocab_size: int) -> dict[int, list[TokenLogprob]]:
    """Of the plan's `scored` entries: each prompt token that one of the entry's tokens is followed by, in order.

    Comes right after the plan's forward pass, whose hidden states it reads and whose logits it overwrites; waits for
    the device.
    """
    offsets = [0, *accumulate(entry.count for entry in plan.scheduled)]
    return {index: _scores(decoder, plan.scheduled[index], offsets[index], vocab_size) for index in plan.scored}


def _scores(decoder: Decoder, entry: ScheduledSequence, offset: int, vocab_size: int) -> list[TokenLogprob]:
    request = entry.sequence.group.request
    first = entry.start + 1
    targets = request.prompt_token_ids[first : first + entry.count]
    top = min(request.prompt_top_logprobs or 0, vocab_size)
    scores: list[TokenLogprob] = []
    step = min(_ROWS_AT_ONCE, decoder.max_logits)
    for begin in range(0, len(targets), step):
        piece = targets[begin : begin + step]
        hidden = decoder.hidden(offset + begin, offset + begin + len(piece))
        scores += _piece(decoder.logits(hidden)[:, :vocab_size], piece, top)
    return scores


def _piece(logits: torch.Tensor, targets: list[int], top: int) -> list[TokenLogprob]:
    values = torch.log_softmax(logits.float(), dim=1)
    chosen = values.gather(1, torch.tensor(targets, device=values.device)[:, None])
    ranks = ((values > chosen).sum(dim=1) + 1).tolist()
    likeliest = torch.topk(values, top, dim=1)
    ids, best = likeliest.indices.tolist(), likeliest.values.tolist()
    return [
        TokenLogprob(token, logprob, rank, list(zip(ids[row], best[row], strict=True)))
        for row, (token, logprob, rank) in enumerate(zip(targets, chosen[:, 0].tolist(), ranks, strict=True))
    ]
