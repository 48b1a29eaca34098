"""Generation events on their way out."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from engine import CandidateFinish, SamplingParameters, Timing, Tokenizer, TokenLogprob, Usage
from octavo.v1 import generation_pb2
from service.convert.fields import fill_duration
from service.convert.sampling import sampling_message
from service.status import Failure, usage_message

Events = RepeatedCompositeFieldContainer[generation_pb2.GenerationEvent]


def add_admitted(
    events: Events,
    request_id: str,
    sequence: int,
    *,
    engine_id: str,
    prompt_tokens: int,
    queue_position: int,
    sampling: SamplingParameters,
    prompt_token_ids: Sequence[int],
) -> None:
    event = events.add(request_id=request_id, sequence=sequence)
    admitted = event.admitted
    admitted.engine_request_id = engine_id
    admitted.prompt_tokens = prompt_tokens
    admitted.queue_position = queue_position
    admitted.sampling.CopyFrom(sampling_message(sampling))
    if prompt_token_ids:
        admitted.prompt.token_ids.extend(prompt_token_ids)


def add_delta(
    events: Events,
    request_id: str,
    sequence: int,
    candidate: int,
    token_offset: int,
    token_count: int,
    text: str,
    token_ids: Sequence[int],
) -> generation_pb2.CandidateDelta:
    """The new event's delta, to which the functions below add what not every delta has. Paid for every token."""
    event = events.add()
    event.request_id = request_id
    event.sequence = sequence
    delta = event.delta
    if candidate:
        delta.candidate_index = candidate
    if token_offset:
        delta.token_offset = token_offset
    delta.token_count = token_count
    if text:
        delta.text = text
    if token_ids:
        delta.token_ids.extend(token_ids)
    return delta


def fill_logprobs(delta: generation_pb2.CandidateDelta, logprobs: Sequence[TokenLogprob], tokenizer: Tokenizer) -> None:
    for logprob in logprobs:
        fill_logprob(delta.logprobs.add(), logprob, tokenizer)


def fill_usage(delta: generation_pb2.CandidateDelta, usage: Usage) -> None:
    delta.usage.CopyFrom(usage_message(usage))


def add_prompt(
    events: Events,
    request_id: str,
    sequence: int,
    first: int | None,
    scores: Sequence[TokenLogprob],
    tokenizer: Tokenizer,
) -> None:
    event = events.add(request_id=request_id, sequence=sequence)
    fill_prompt_scores(event.prompt, first, scores, tokenizer)


def add_finished(events: Events, request_id: str, sequence: int, usage: Usage, timing: Timing) -> None:
    finished = events.add(request_id=request_id, sequence=sequence).finished
    finished.usage.CopyFrom(usage_message(usage))
    fill_timing(finished.timing, timing)


def add_failed(events: Events, request_id: str, sequence: int, failure: Failure) -> None:
    failed = events.add(request_id=request_id, sequence=sequence).failed
    failed.status.CopyFrom(failure.status)
    failed.usage.CopyFrom(usage_message(failure.usage or Usage()))


def fill_prompt_scores(
    message: generation_pb2.PromptOutput, first: int | None, scores: Sequence[TokenLogprob], tokenizer: Tokenizer
) -> None:
    """first: the prompt's first token, which nothing precedes and which has no log probability."""
    if first is not None:
        message.logprobs.add(token_id=first, token_bytes=tokenizer.token_bytes(first))
    for score in scores:
        fill_logprob(message.logprobs.add(), score, tokenizer)


def fill_logprob(message: generation_pb2.TokenLogprob, logprob: TokenLogprob, tokenizer: Tokenizer) -> None:
    message.token_id = logprob.token_id
    message.logprob = logprob.logprob
    message.rank = logprob.rank
    message.token_bytes = tokenizer.token_bytes(logprob.token_id)
    for token_id, value in logprob.top:
        message.top.add(token_id=token_id, logprob=value, token_bytes=tokenizer.token_bytes(token_id))


def fill_finish(message: generation_pb2.CandidateFinish, finish: CandidateFinish, stop_sequence: str | None) -> None:
    message.reason = generation_pb2.FinishReason.ValueType(finish.reason)
    if stop_sequence is not None:
        message.sequence = stop_sequence
    elif finish.token_id is not None:
        message.token_id = finish.token_id


def fill_timing(message: generation_pb2.Timing, timing: Timing) -> None:
    fill_duration(message.queued, timing.queued)
    fill_duration(message.time_to_first_token, timing.time_to_first_token)
    fill_duration(message.total, timing.total)
    message.preemptions = timing.preemptions
