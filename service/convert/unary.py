"""The one answer of a unary generation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine import CandidateFinish, Timing, Tokenizer, TokenLogprob, Usage
from octavo.v1 import generation_pb2
from service.convert.events import fill_finish, fill_logprob, fill_prompt_scores, fill_timing
from service.status import usage_message


@dataclass(frozen=True, slots=True)
class FinishedCandidate:
    """All output of one candidate."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob]
    finish: CandidateFinish
    stop_sequence: str | None


def unary_response(
    request_id: str,
    candidates: Iterable[FinishedCandidate],
    usage: Usage,
    timing: Timing,
    prompt_token_ids: Sequence[int],
    tokenizer: Tokenizer,
    prompt_scores: tuple[int, Sequence[TokenLogprob]] | None = None,
) -> generation_pb2.GenerateUnaryResponse:
    """prompt_scores: the prompt's first token, and the log probabilities of the others."""
    response = generation_pb2.GenerateUnaryResponse(request_id=request_id, usage=usage_message(usage))
    fill_timing(response.timing, timing)
    if prompt_token_ids:
        response.prompt.token_ids.extend(prompt_token_ids)
    if prompt_scores is not None:
        fill_prompt_scores(response.prompt, *prompt_scores, tokenizer)
    for candidate in candidates:
        message = response.candidates.add(index=candidate.index, text=candidate.text, token_ids=candidate.token_ids)
        for logprob in candidate.logprobs:
            fill_logprob(message.logprobs.add(), logprob, tokenizer)
        fill_finish(message.finish, candidate.finish, candidate.stop_sequence)
    return response
