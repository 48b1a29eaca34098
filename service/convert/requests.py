"""Generation requests on their way in: validated field by field against the served model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from engine import EngineInfo, Grammar, GrammarKind, StopCriteria
from octavo.v1 import generation_pb2
from service.convert.fields import MAX_TIMEOUT_SECONDS, check_ids, count, or_default, refuse, seconds_of
from service.convert.model import ServedModel
from service.convert.prompts import parse_prompt
from service.convert.sampling import parse_sampling
from service.request import Generation, OutputOptions
from service.status import grammar_invalid, invalid

MAX_REQUEST_ID_BYTES = 256
MAX_TOP_LOGPROBS = 20
MAX_STOP_SEQUENCES = 16
MAX_STOP_SEQUENCE_BYTES = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_COALESCE_SECONDS = 10.0
MAX_GRAMMAR_BYTES = 256 << 10


def parse_start(
    start: generation_pb2.StartGeneration, model: ServedModel, arrival: float, *, windowed: bool, in_one: bool = False
) -> Generation:
    """Validates a request against the served model. Raises RequestRefusedError naming the first bad field.

    arrival: `time.monotonic()` seconds. windowed: whether the RPC can carry acknowledgements. in_one:
    whether its answer is one message.
    """
    if len(start.request_id.encode()) > MAX_REQUEST_ID_BYTES:
        raise refuse(invalid("start.request_id", f"is longer than {MAX_REQUEST_ID_BYTES} bytes"))
    model.check_name(start.model)
    sampling = parse_sampling(start.sampling, model.info)
    return Generation(
        request_id=start.request_id,
        prompt=parse_prompt(start, model.info),
        arrival=arrival,
        sampling=sampling,
        stop=_parse_stop(start.stop, model.info),
        stop_sequences=_parse_stop_sequences(start.stop.sequences),
        include_stop=start.stop.include_in_output,
        output=replace(_parse_output(start.output, model.info, windowed=windowed), in_one=in_one),
        grammar=_parse_grammar(start),
        priority=start.scheduling.priority,
        timeout=_parse_timeout(start.scheduling, "timeout"),
        queue_timeout=_parse_timeout(start.scheduling, "queue_timeout"),
        cache_salt=start.cache.salt,
        cache_bypass=start.cache.bypass,
    )


def _parse_stop(message: generation_pb2.StopCriteria, info: EngineInfo) -> StopCriteria:
    path = "start.stop"
    max_tokens = None
    if message.HasField("max_tokens"):
        max_tokens = count(message, "max_tokens", 1, path, least=1, most=2**31 - 1)
    min_tokens = message.min_tokens
    longest = max_tokens if max_tokens is not None else info.max_context_tokens
    if min_tokens > longest:
        raise refuse(invalid(f"{path}.min_tokens", f"is {min_tokens}, above the most tokens, {longest}"))
    ids = list(message.token_ids)
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise refuse(invalid(f"{path}.token_ids", f"has more than {MAX_STOP_TOKEN_IDS} ids"))
    check_ids(f"{path}.token_ids", ids, info)
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
    except RecursionError:
        raise refuse(grammar_invalid(path, "is nested too deeply")) from None
    except ValueError as error:
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
        text=or_default(message, "text", True),
        token_ids=message.token_ids,
        top_logprobs=_parse_top_logprobs(message, "top_logprobs", info),
        prompt_top_logprobs=_parse_top_logprobs(message, "prompt_top_logprobs", info),
        echo_prompt_token_ids=message.echo_prompt_token_ids,
        skip_special_tokens=or_default(message, "skip_special_tokens", True),
        coalesce=_parse_coalesce(message, path),
        usage_in_deltas=message.usage_in_deltas,
        window=window,
    )


def _parse_top_logprobs(message: generation_pb2.OutputOptions, name: str, info: EngineInfo) -> int | None:
    if not message.HasField(name):  # type: ignore[arg-type]
        return None
    return count(message, name, 0, "start.output", least=0, most=min(MAX_TOP_LOGPROBS, info.vocab_size))


def _parse_coalesce(message: generation_pb2.OutputOptions, path: str) -> float:
    seconds = seconds_of(message.coalesce, f"{path}.coalesce") if message.HasField("coalesce") else 0.0
    if not 0.0 <= seconds <= MAX_COALESCE_SECONDS:
        raise refuse(invalid(f"{path}.coalesce", f"is not within 0 to {MAX_COALESCE_SECONDS:g} s"))
    return seconds


def _parse_timeout(message: generation_pb2.Scheduling, name: str) -> float | None:
    if not message.HasField(name):  # type: ignore[arg-type]
        return None
    path = f"start.scheduling.{name}"
    seconds = seconds_of(getattr(message, name), path)
    if not 0.0 < seconds <= MAX_TIMEOUT_SECONDS:
        raise refuse(invalid(path, f"is not above 0 and at most {MAX_TIMEOUT_SECONDS:g} s"))
    return seconds
