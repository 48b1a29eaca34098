"""What a request may ask for, whoever asks: the last gate before the scheduler."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from engine.config import MOST_SEED
from engine.errors import InvalidRequestError
from engine.step_arrays import ids_array
from engine.types import GenerationRequest, SamplingParameters


def check_request(request: GenerationRequest, vocab_size: int, eos_token_ids: Collection[int]) -> None:
    """Raises InvalidRequestError for the first field that makes no sense. What depends on the queue, on the pool or on
    the context's length is the scheduler's to refuse."""
    _check_prompt(request.prompt_token_ids, vocab_size)
    _check_sampling(request.sampling, vocab_size)
    if request.stop.min_tokens < 0:
        raise InvalidRequestError("stop.min_tokens", f"is {request.stop.min_tokens}, below 0")
    for name in ("top_logprobs", "prompt_top_logprobs"):
        count = getattr(request, name)
        if count is not None and not 0 <= count <= vocab_size:
            raise InvalidRequestError(f"output.{name}", f"is {count}, not within 0 to {vocab_size}")
    _check_something_may_come(request, eos_token_ids)
    if request.grammar is not None:
        if request.stop.ignore_eos:
            raise InvalidRequestError("stop.ignore_eos", "does not go with structured output, which ends by itself")
        if request.stop.min_tokens:
            raise InvalidRequestError("stop.min_tokens", "does not go with structured output, which ends by itself")


def _check_sampling(sampling: SamplingParameters, vocab_size: int) -> None:
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        value = getattr(sampling, name)
        if not math.isfinite(value):
            raise InvalidRequestError(f"sampling.{name}", f"is {value}, not a finite number")
    if sampling.temperature < 0:
        raise InvalidRequestError("sampling.temperature", f"is {sampling.temperature:g}, below 0")
    for name in ("top_p", "min_p"):
        value = getattr(sampling, name)
        if not 0.0 <= value <= 1.0:
            raise InvalidRequestError(f"sampling.{name}", f"is {value:g}, not within 0 to 1")
    if sampling.top_k < 0:
        raise InvalidRequestError("sampling.top_k", f"is {sampling.top_k}, below 0")
    if sampling.repetition_penalty <= 0:
        raise InvalidRequestError("sampling.repetition_penalty", f"is {sampling.repetition_penalty:g}, not above 0")
    if sampling.seed is not None and not 0 <= sampling.seed <= MOST_SEED:
        raise InvalidRequestError("sampling.seed", f"is {sampling.seed}, not within 0 to {MOST_SEED}")
    _check_ids("sampling.logit_bias", sampling.logit_bias, vocab_size)
    if not all(map(math.isfinite, sampling.logit_bias.values())):
        raise InvalidRequestError("sampling.logit_bias", "has a bias that is not a finite number")
    _check_ids("sampling.allowed_token_ids", sampling.allowed_token_ids, vocab_size)


def _check_prompt(ids: Sequence[int], vocab_size: int) -> None:
    """On the step thread, however long: one native pass, and one over what it made."""
    try:
        within = not ids or int(ids_array(ids, 0, len(ids)).view(np.uint32).max()) < vocab_size
    except OverflowError:
        within = False
    if not within:
        _check_ids("prompt.token_ids", ids, vocab_size)


def _check_ids(field: str, ids: Collection[int], vocab_size: int) -> None:
    for bad in (min(ids), max(ids)) if ids else ():
        if not 0 <= bad < vocab_size:
            raise InvalidRequestError(field, f"token id {bad} is outside the vocabulary of {vocab_size}")


def _check_something_may_come(request: GenerationRequest, eos_token_ids: Collection[int]) -> None:
    """`min_tokens` keeps ends back: then something else must be allowed."""
    allowed, stop = request.sampling.allowed_token_ids, request.stop
    if allowed and stop.min_tokens:
        ends = {*stop.token_ids, *(() if stop.ignore_eos else eos_token_ids)}
        if ends.issuperset(allowed):
            raise InvalidRequestError(
                "sampling.allowed_token_ids", "has only tokens that end the output, which min_tokens keeps back"
            )
