"""Between protobuf messages and the service's own values: what comes in is validated here, field by field."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf import duration_pb2
from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from engine import (
    CandidateFinish,
    EngineInfo,
    EngineStats,
    Grammar,
    GrammarKind,
    SamplingParameters,
    StopCriteria,
    Timing,
    Tokenizer,
    TokenLogprob,
    Usage,
)
from octavo.v1 import admin_pb2, capacity_pb2, generation_pb2, tokenization_pb2
from service.request import ChatPrompt, Generation, OutputOptions, Prompt, TextPrompt, TokenPrompt
from service.status import (
    Failure,
    RequestRefusedError,
    grammar_invalid,
    invalid,
    prompt_too_long,
    status_message,
    unknown_model,
    usage_message,
)

Events = RepeatedCompositeFieldContainer[generation_pb2.GenerationEvent]

MAX_REQUEST_ID_BYTES = 256
MAX_CANDIDATES = 16
MAX_TOP_LOGPROBS = 20
MAX_PROMPT_SCORES = 1 << 17  # some 3 MB: a unary response stays below what gRPC clients accept
MAX_STOP_SEQUENCES = 16
MAX_STOP_SEQUENCE_BYTES = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_COALESCE_SECONDS = 10.0
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 100.0
MAX_GRAMMAR_BYTES = 256 << 10
MAX_TIMEOUT_SECONDS = 7 * 24 * 3600.0


def refuse(failure: Failure) -> RequestRefusedError:
    return RequestRefusedError(failure)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What validation needs to know of the model behind this replica. `aliases`: further names it answers to."""

    name: str
    info: EngineInfo
    aliases: frozenset[str] = frozenset()

    def check_name(self, asked: str) -> None:
        if asked and asked != self.name and asked not in self.aliases:
            raise refuse(unknown_model(asked, self.name))


# --- generation requests -------------------------------------------------------------------------------------------


def parse_start(
    start: generation_pb2.StartGeneration, model: ServedModel, arrival: float, *, windowed: bool
) -> Generation:
    """Validates a request against the served model. Raises RequestRefusedError naming the first bad field.

    arrival: `time.monotonic()` seconds. windowed: whether the RPC can carry acknowledgements.
    """
    if len(start.request_id.encode()) > MAX_REQUEST_ID_BYTES:
        raise refuse(invalid("start.request_id", f"is longer than {MAX_REQUEST_ID_BYTES} bytes"))
    model.check_name(start.model)
    sampling = _parse_sampling(start.sampling, model.info)
    return Generation(
        request_id=start.request_id,
        prompt=_parse_prompt(start, model.info),
        arrival=arrival,
        sampling=sampling,
        stop=_parse_stop(start.stop, model.info),
        stop_sequences=_parse_stop_sequences(start.stop.sequences),
        include_stop=start.stop.include_in_output,
        output=_parse_output(start.output, model.info, windowed=windowed),
        grammar=_parse_grammar(start),
        priority=start.scheduling.priority,
        timeout=_parse_timeout(start.scheduling, "timeout"),
        queue_timeout=_parse_timeout(start.scheduling, "queue_timeout"),
        cache_salt=start.cache.salt,
        cache_bypass=start.cache.bypass,
    )


def _parse_prompt(start: generation_pb2.StartGeneration, info: EngineInfo) -> Prompt:
    match start.WhichOneof("prompt"):
        case "text":
            if not start.text:
                raise refuse(invalid("start.text", "is empty"))
            return TextPrompt(start.text)
        case "token_ids":
            ids = list(start.token_ids.ids)
            if not ids:
                raise refuse(invalid("start.token_ids", "is empty"))
            _check_ids("start.token_ids.ids", ids, info)
            check_prompt_length(len(ids), info)
            return TokenPrompt(ids)
        case "chat":
            return parse_chat(start.chat, "start.chat")
        case _:
            raise refuse(invalid("start.prompt", "is missing: set text, token_ids or chat"))


def parse_chat(chat: generation_pb2.Chat, path: str) -> ChatPrompt:
    if not chat.messages:
        raise refuse(invalid(f"{path}.messages", "is empty"))
    for index, message in enumerate(chat.messages):
        if not message.role:
            raise refuse(invalid(f"{path}.messages[{index}].role", "is empty"))
    return ChatPrompt(
        messages=[{"role": m.role, "content": m.content} for m in chat.messages],
        add_generation_prompt=_or(chat, "add_generation_prompt", True),
        template_arguments=_parse_template_arguments(chat.template_arguments_json, path),
    )


def _parse_template_arguments(text: str, path: str) -> dict[str, Any] | None:
    if not text:
        return None
    field_path = f"{path}.template_arguments_json"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refuse(invalid(field_path, f"is not JSON: {error}")) from None
    if not isinstance(value, dict):
        raise refuse(invalid(field_path, "is not a JSON object"))
    return value


def _parse_sampling(message: generation_pb2.SamplingParameters, info: EngineInfo) -> SamplingParameters:
    path = "start.sampling"
    top_k = message.top_k
    if top_k > info.vocab_size:
        problem = f"is {top_k}, above the vocabulary size {info.vocab_size}"
        raise refuse(invalid(f"{path}.top_k", problem))
    allowed = list(message.allowed_token_ids)
    _check_ids(f"{path}.allowed_token_ids", allowed, info)
    return SamplingParameters(
        temperature=_number(message, "temperature", 1.0, path, least=0.0),
        top_p=_number(message, "top_p", 1.0, path, above=0.0, most=1.0),
        top_k=top_k,
        min_p=_number(message, "min_p", 0.0, path, least=0.0, most=1.0),
        repetition_penalty=_number(message, "repetition_penalty", 1.0, path, above=0.0, most=MAX_PENALTY),
        presence_penalty=_number(message, "presence_penalty", 0.0, path, least=-2.0, most=2.0),
        frequency_penalty=_number(message, "frequency_penalty", 0.0, path, least=-2.0, most=2.0),
        seed=message.seed if message.HasField("seed") else secrets.randbits(63),
        n=_count(message, "n", 1, path, least=1, most=min(MAX_CANDIDATES, info.max_num_seqs)),
        logit_bias=_parse_logit_bias(message.logit_bias, f"{path}.logit_bias", info),
        allowed_token_ids=allowed,
    )


def _parse_logit_bias(biases: Mapping[int, float], path: str, info: EngineInfo) -> dict[int, float]:
    for token_id, bias in biases.items():
        _check_id(f"{path}[{token_id}]", token_id, info)
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:  # NaN is not, either
            problem = f"is {bias:g}, not within -{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
            raise refuse(invalid(f"{path}[{token_id}]", problem))
    return dict(biases)


def _parse_stop(message: generation_pb2.StopCriteria, info: EngineInfo) -> StopCriteria:
    path = "start.stop"
    max_tokens = None
    if message.HasField("max_tokens"):
        max_tokens = _count(message, "max_tokens", 1, path, least=1, most=2**31 - 1)
    min_tokens = message.min_tokens
    longest = max_tokens if max_tokens is not None else info.max_context_tokens
    if min_tokens > longest:
        raise refuse(invalid(f"{path}.min_tokens", f"is {min_tokens}, above the most tokens, {longest}"))
    ids = list(message.token_ids)
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise refuse(invalid(f"{path}.token_ids", f"has more than {MAX_STOP_TOKEN_IDS} ids"))
    _check_ids(f"{path}.token_ids", ids, info)
    return StopCriteria(max_tokens=max_tokens, min_tokens=min_tokens, token_ids=ids, ignore_eos=message.ignore_eos)


def _parse_stop_sequences(sequences: Sequence[str]) -> list[str]:
    path = "start.stop.sequences"
    if len(sequences) > MAX_STOP_SEQUENCES:
        raise refuse(invalid(path, f"has more than {MAX_STOP_SEQUENCES} sequences"))
    for index, sequence in enumerate(sequences):
        if not sequence:
            raise refuse(invalid(f"{path}[{index}]", "is empty"))
        if len(sequence.encode()) > MAX_STOP_SEQUENCE_BYTES:
            raise refuse(invalid(f"{path}[{index}]", f"is longer than {MAX_STOP_SEQUENCE_BYTES} bytes"))
    return list(sequences)


def _parse_grammar(start: generation_pb2.StartGeneration) -> Grammar | None:
    """Whether it compiles is for the engine to say, which does it outside its step loop."""
    if not start.HasField("structured_output"):
        return None
    path, message = "start.structured_output", start.structured_output
    name = message.WhichOneof("constraint")
    if name is None:
        raise refuse(invalid(path, "is missing a constraint"))
    if start.stop.ignore_eos or start.stop.min_tokens:
        field_path = "start.stop.ignore_eos" if start.stop.ignore_eos else "start.stop.min_tokens"
        raise refuse(invalid(field_path, "does not go with structured_output, which says where the output ends"))
    text = _grammar_text(message, name)
    if name != "json_object" and not text:
        raise refuse(invalid(f"{path}.{name}", "is empty"))
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise refuse(invalid(f"{path}.{name}", f"is longer than {MAX_GRAMMAR_BYTES} bytes"))
    if name == "json_schema":
        _check_json(text, f"{path}.{name}")
    return Grammar(GrammarKind(name), text)


def _check_json(text: str, path: str) -> None:
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refuse(grammar_invalid(path, f"is not JSON: {error}")) from None


def _grammar_text(message: generation_pb2.StructuredOutput, name: str) -> str:
    match name:
        case "json_object":
            return ""
        case "choices":
            return json.dumps(list(message.choices.choices)) if message.choices.choices else ""
        case _:
            return str(getattr(message, name))


def _parse_output(message: generation_pb2.OutputOptions, info: EngineInfo, *, windowed: bool) -> OutputOptions:
    path = "start.output"
    window = message.unacknowledged_token_window
    if window and not windowed:
        problem = "needs acknowledgements: use Generate"
        raise refuse(invalid(f"{path}.unacknowledged_token_window", problem))
    return OutputOptions(
        text=_or(message, "text", True),
        token_ids=message.token_ids,
        top_logprobs=_parse_top_logprobs(message, "top_logprobs", info),
        prompt_top_logprobs=_parse_top_logprobs(message, "prompt_top_logprobs", info),
        echo_prompt_token_ids=message.echo_prompt_token_ids,
        skip_special_tokens=_or(message, "skip_special_tokens", True),
        coalesce=_parse_coalesce(message, path),
        usage_in_deltas=message.usage_in_deltas,
        window=window,
    )


def _parse_top_logprobs(message: generation_pb2.OutputOptions, name: str, info: EngineInfo) -> int | None:
    if not message.HasField(name):  # type: ignore[arg-type]
        return None
    return _count(message, name, 0, "start.output", least=0, most=min(MAX_TOP_LOGPROBS, info.vocab_size))


def check_prompt_scores(tokens: int, top: int | None) -> None:
    """Raises RequestRefusedError where a prompt's log probabilities are more than its client could be sent."""
    if top is not None and tokens * (1 + top) > MAX_PROMPT_SCORES:
        problem = f"is {top}: {tokens} prompt tokens then have more than {MAX_PROMPT_SCORES} log probabilities"
        raise refuse(invalid("start.output.prompt_top_logprobs", problem))


def _parse_coalesce(message: generation_pb2.OutputOptions, path: str) -> float:
    seconds = _seconds(message.coalesce, f"{path}.coalesce") if message.HasField("coalesce") else 0.0
    if not 0.0 <= seconds <= MAX_COALESCE_SECONDS:
        raise refuse(invalid(f"{path}.coalesce", f"is not within 0 to {MAX_COALESCE_SECONDS:g} s"))
    return seconds


def _parse_timeout(message: generation_pb2.Scheduling, name: str) -> float | None:
    if not message.HasField(name):  # type: ignore[arg-type]
        return None
    path = f"start.scheduling.{name}"
    seconds = _seconds(getattr(message, name), path)
    if not 0.0 < seconds <= MAX_TIMEOUT_SECONDS:
        raise refuse(invalid(path, f"is not above 0 and at most {MAX_TIMEOUT_SECONDS:g} s"))
    return seconds


def check_prompt_length(tokens: int, info: EngineInfo) -> None:
    """Raises RequestRefusedError, with the numbers, for prompts of no token or of more than the model takes."""
    if tokens == 0:
        raise refuse(invalid("start.prompt", "is empty once tokenized"))
    if tokens > info.max_prompt_tokens:
        raise refuse(
            prompt_too_long(
                f"the prompt has {tokens} tokens; at most {info.max_prompt_tokens} fit "
                f"(context {info.max_context_tokens})",
                {"prompt_tokens": tokens, **_length_limits(info)},
            )
        )


def check_prompt_bytes(size: int, most: int, info: EngineInfo) -> None:
    """Refuses text that cannot fit even if every token were the vocabulary's longest, before it is tokenized."""
    if size > most:
        raise refuse(
            prompt_too_long(
                f"the prompt has {size} bytes; {info.max_prompt_tokens} tokens hold at most {most}",
                {"prompt_bytes": size, "max_prompt_bytes": most, **_length_limits(info)},
            )
        )


def _length_limits(info: EngineInfo) -> dict[str, int]:
    return {"max_prompt_tokens": info.max_prompt_tokens, "max_context_tokens": info.max_context_tokens}


def _check_ids(path: str, ids: Iterable[int], info: EngineInfo) -> None:
    for index, token_id in enumerate(ids):
        _check_id(f"{path}[{index}]", token_id, info)


def _check_id(path: str, token_id: int, info: EngineInfo) -> None:
    if token_id >= info.vocab_size:
        raise refuse(invalid(path, f"is {token_id}, outside the vocabulary of {info.vocab_size}"))


def _number(
    message: Any,
    name: str,
    default: float,
    path: str,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
) -> float:
    if not message.HasField(name):
        return default
    value = float(getattr(message, name))
    if not math.isfinite(value):
        raise refuse(invalid(f"{path}.{name}", f"is {value}, not a finite number"))
    if value < least:
        raise refuse(invalid(f"{path}.{name}", f"is {value:g}, below {least:g}"))
    if value <= above:
        raise refuse(invalid(f"{path}.{name}", f"is {value:g}, not above {above:g}"))
    if value > most:
        raise refuse(invalid(f"{path}.{name}", f"is {value:g}, above {most:g}"))
    return value


def _count(message: Any, name: str, default: int, path: str, *, least: int, most: int) -> int:
    if not message.HasField(name):
        return default
    value = int(getattr(message, name))
    if not least <= value <= most:
        raise refuse(invalid(f"{path}.{name}", f"is {value}, not within {least} to {most}"))
    return value


def _or(message: Any, name: str, default: bool) -> bool:
    return bool(getattr(message, name)) if message.HasField(name) else default


def _seconds(duration: duration_pb2.Duration, path: str) -> float:
    if abs(duration.nanos) > 999_999_999:
        raise refuse(invalid(path, f"has {duration.nanos} nanos, more than a second"))
    return duration.seconds + duration.nanos / 1e9


# --- generation events ---------------------------------------------------------------------------------------------


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


def sampling_message(sampling: SamplingParameters) -> generation_pb2.SamplingParameters:
    return generation_pb2.SamplingParameters(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        n=sampling.n,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=sampling.allowed_token_ids,
    )


def add_delta(
    events: Events,
    request_id: str,
    sequence: int,
    *,
    candidate: int,
    token_offset: int,
    token_count: int,
    text: str,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprob],
    tokenizer: Tokenizer,
    usage: Usage | None,
    finish: CandidateFinish | None,
    stop_sequence: str | None,
) -> None:
    event = events.add(request_id=request_id, sequence=sequence)
    delta = event.delta
    delta.token_count = token_count
    delta.token_offset = token_offset
    if candidate:
        delta.candidate_index = candidate
    if text:
        delta.text = text
    if token_ids:
        delta.token_ids.extend(token_ids)
    for logprob in logprobs:
        fill_logprob(delta.logprobs.add(), logprob, tokenizer)
    if usage is not None:
        delta.usage.CopyFrom(usage_message(usage))
    if finish is not None:
        fill_finish(delta.finish, finish, stop_sequence)


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


def add_finished(events: Events, request_id: str, sequence: int, usage: Usage, timing: Timing) -> None:
    finished = events.add(request_id=request_id, sequence=sequence).finished
    finished.usage.CopyFrom(usage_message(usage))
    fill_timing(finished.timing, timing)


def fill_timing(message: generation_pb2.Timing, timing: Timing) -> None:
    _fill_duration(message.queued, timing.queued)
    _fill_duration(message.time_to_first_token, timing.time_to_first_token)
    _fill_duration(message.total, timing.total)
    message.preemptions = timing.preemptions


def add_failed(events: Events, request_id: str, sequence: int, failure: Failure) -> None:
    failed = events.add(request_id=request_id, sequence=sequence).failed
    failed.status.CopyFrom(status_message(failure))
    failed.usage.CopyFrom(usage_message(failure.usage or Usage()))


def _fill_duration(message: duration_pb2.Duration, seconds: float) -> None:
    message.FromNanoseconds(max(0, round(seconds * 1e9)))


# --- tokenization --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tokenization:
    """Text or chat to tokenize. add_special_tokens None: the default of the input's kind."""

    prompt: TextPrompt | ChatPrompt
    add_special_tokens: bool
    offsets: bool


def parse_tokenize(request: tokenization_pb2.TokenizeRequest, model: ServedModel) -> Tokenization:
    model.check_name(request.model)
    match request.WhichOneof("input"):
        case "text":
            return Tokenization(
                TextPrompt(request.text), _or(request, "add_special_tokens", True), request.return_offsets
            )
        case "chat":
            if request.add_special_tokens:
                problem = "has no meaning for chat: the template has them"
                raise refuse(invalid("add_special_tokens", problem))
            if request.return_offsets:
                raise refuse(invalid("return_offsets", "needs text: a chat is rendered before it is tokenized"))
            return Tokenization(parse_chat(request.chat, "chat"), False, False)
        case _:
            raise refuse(invalid("input", "is missing: set text or chat"))


def tokenize_response(
    token_ids: Sequence[int], offsets: Sequence[tuple[int, int]], rendered: str, info: EngineInfo
) -> tokenization_pb2.TokenizeResponse:
    """offsets: (start, end) of each token in the input's UTF-8 bytes, or none."""
    return tokenization_pb2.TokenizeResponse(
        token_ids=token_ids,
        start_offsets=[start for start, _ in offsets],
        end_offsets=[end for _, end in offsets],
        token_count=len(token_ids),
        max_context_tokens=info.max_context_tokens,
        rendered_prompt=rendered,
    )


def parse_detokenize(request: tokenization_pb2.DetokenizeRequest, model: ServedModel) -> tuple[list[int], bool]:
    """Token ids, and whether to skip special ones."""
    model.check_name(request.model)
    ids = list(request.token_ids)
    _check_ids("token_ids", ids, model.info)
    return ids, _or(request, "skip_special_tokens", True)


def detokenize_response(text: str, raw: bytes) -> tokenization_pb2.DetokenizeResponse:
    return tokenization_pb2.DetokenizeResponse(text=text, raw=raw)


def tokenizer_chunk(data: bytes, sha256: str = "") -> tokenization_pb2.DownloadTokenizerResponse:
    return tokenization_pb2.DownloadTokenizerResponse(data=data, sha256=sha256)


# --- admin ---------------------------------------------------------------------------------------------------------


def parse_drain(request: admin_pb2.DrainRequest) -> float | None:
    """Seconds for running requests; None for the configured time."""
    if not request.HasField("timeout"):
        return None
    seconds = _seconds(request.timeout, "timeout")
    if not 0.0 <= seconds <= MAX_TIMEOUT_SECONDS:
        raise refuse(invalid("timeout", f"is not within 0 to {MAX_TIMEOUT_SECONDS:g} s"))
    return seconds


def drain_response(live_requests: int) -> admin_pb2.DrainResponse:
    return admin_pb2.DrainResponse(live_requests=live_requests)


# --- capacity ------------------------------------------------------------------------------------------------------

LEAST_WATCH_SECONDS = 0.01
MOST_WATCH_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class WatchPace:
    """Seconds between two snapshots: never fewer than `least`, never more than `most`."""

    least: float = 0.1
    most: float = 5.0


def parse_watch(request: capacity_pb2.WatchCapacityRequest, model: ServedModel) -> WatchPace:
    model.check_name(request.model)
    pace = WatchPace()
    least, most = pace.least, pace.most
    if request.HasField("min_interval"):
        least = _seconds(request.min_interval, "min_interval")
    if request.HasField("max_interval"):
        most = _seconds(request.max_interval, "max_interval")
    elif least > most:
        most = least
    for path, value in (("min_interval", least), ("max_interval", most)):
        if not LEAST_WATCH_SECONDS <= value <= MOST_WATCH_SECONDS:
            problem = f"is not within {LEAST_WATCH_SECONDS:g} to {MOST_WATCH_SECONDS:g} s"
            raise refuse(invalid(path, problem))
    if most < least:
        raise refuse(invalid("max_interval", "is below min_interval"))
    return WatchPace(least, most)


def capacity_message(
    info: EngineInfo,
    stats: EngineStats,
    *,
    state: int,
    accepting: bool,
    revision: int,
    queue_delay: float,
    heartbeat_age: float,
) -> capacity_pb2.Capacity:
    """state: a ReplicaState. queue_delay, heartbeat_age: seconds."""
    capacity = capacity_pb2.Capacity(
        instance_id=info.instance_id,
        revision=revision,
        state=capacity_pb2.ReplicaState.ValueType(state),
        accepting=accepting,
        model=info.model,
    )
    capacity.observe_time.GetCurrentTime()
    _fill_limits(capacity.limits, info)
    _fill_load(capacity.load, info, stats)
    _fill_duration(capacity.load.estimated_queue_delay, queue_delay)
    _fill_duration(capacity.load.engine_heartbeat_age, heartbeat_age)
    return capacity


def _fill_limits(limits: capacity_pb2.Limits, info: EngineInfo) -> None:
    limits.max_context_tokens = info.max_context_tokens
    limits.max_prompt_tokens = info.max_prompt_tokens
    limits.max_running_requests = info.max_num_seqs
    limits.max_queued_requests = info.max_queued_requests
    limits.max_queued_prompt_tokens = info.max_queued_tokens
    limits.kv_block_tokens = info.block_size
    limits.kv_total_blocks = info.num_blocks


def _fill_load(load: capacity_pb2.Load, info: EngineInfo, stats: EngineStats) -> None:
    load.running_requests = stats.running_requests
    load.queued_requests = stats.queued_requests
    load.queued_uncached_tokens = stats.queued_prompt_tokens
    load.kv_free_blocks = stats.free_blocks
    load.kv_evictable_blocks = stats.cached_blocks
    load.kv_swapped_blocks = stats.swapped_blocks
    load.kv_utilization = kv_utilization(info, stats)
    load.utilization = utilization(info, stats)
    load.prefill_tokens_per_second = stats.prefill_tokens_per_second
    load.decode_tokens_per_second = stats.decode_tokens_per_second
    load.prompt_tokens_total = stats.prompt_tokens
    load.cached_prompt_tokens_total = stats.cached_prompt_tokens
    load.preemptions_total = stats.preemptions
    load.generated_tokens_total = stats.generated_tokens
    load.finished_requests_total = stats.finished_requests


def kv_utilization(info: EngineInfo, stats: EngineStats) -> float:
    held = info.num_blocks - stats.free_blocks - stats.cached_blocks
    return held / max(1, info.num_blocks)


def utilization(info: EngineInfo, stats: EngineStats) -> float:
    """The fuller of KV pool and batch, plus what waits beside it: above 1 a balancer should look elsewhere."""
    batch = stats.running_requests / max(1, info.max_num_seqs)
    waiting = stats.queued_requests / max(1, info.max_num_seqs)
    return max(kv_utilization(info, stats), batch) + waiting


def capacity_response(capacity: capacity_pb2.Capacity) -> capacity_pb2.GetCapacityResponse:
    return capacity_pb2.GetCapacityResponse(capacity=capacity)


def watch_response(capacity: capacity_pb2.Capacity) -> capacity_pb2.WatchCapacityResponse:
    return capacity_pb2.WatchCapacityResponse(capacity=capacity)
