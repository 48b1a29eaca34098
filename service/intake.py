"""A request's way in: admission, tokenization, hand-over to the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from engine import EngineDiedError, GenerationRequest, InvalidRequestError, Usage
from service.admission import Admission
from service.convert.prompts import (
    check_output_scores,
    check_prompt_bytes,
    check_prompt_length,
    check_prompt_scores,
    text_bytes,
)
from service.live import LiveRequest
from service.output import RequestOutput
from service.pending import PendingBytes
from service.replica import Replica
from service.request import ChatPrompt, Generation, TextPrompt, TokenPrompt
from service.request_log import log_end
from service.status import Failure, RequestRefusedError, engine_died, internal, invalid
from service.tokens import CALLER

LOGGER = logging.getLogger(__name__)

# Shorter text is tokenized at once: a hop to another thread and back costs more.
INLINE_BYTES = 4096
NOTHING = Usage()


class Intake:
    """Starts requests. Whatever stands against one becomes its output's failure, never an exception."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._admission = Admission(replica)

    def refusal(self, priority: int) -> Failure | None:
        """Why this caller's requests of this priority are not taken now, whatever else they are. Asked before a request
        is looked at: under overload most are refused, and the others wait meanwhile."""
        return self._replica.quotas.refusal(CALLER.get()) or self._admission.refusal(priority)

    def note_refused(self, request_id: str, failure: Failure, arrival: float) -> str:
        """Tells metrics, log and traces of a request that was refused as it came, and needs no output. Returns the id
        that its events have."""
        replica = self._replica
        seconds = replica.metrics.refused(failure, arrival)
        replica.spans.refused(request_id, failure, arrival, replica.info.instance_id)
        engine_id = replica.new_engine_id()
        client_id = request_id or engine_id
        log_end(LOGGER, engine_id, request_id, failure, NOTHING, seconds)
        return client_id

    def begin(
        self,
        generation: Generation,
        pending: PendingBytes,
        on_ready: Callable[[RequestOutput], None],
        rpc_deadline: float | None,
    ) -> RequestOutput:
        """Starts a request that `refusal` has nothing against; long prompts are tokenized in a thread meanwhile.
        rpc_deadline: `time.monotonic()`."""
        request, output = self._new_output(generation, pending, on_ready)
        self._replica.live.add(request)
        deadline = _earlier(rpc_deadline, _after(generation.arrival, generation.timeout))
        request.deadline = deadline
        request.queue_deadline = _after(generation.arrival, generation.queue_timeout)
        try:
            self._check_bytes(generation)
            if text_bytes(generation.prompt) <= INLINE_BYTES:
                self._submit(request, output, deadline, self._tokenize(generation))
            else:
                request.tokenization = asyncio.create_task(self._tokenize_apart(request, output, deadline))
        except Exception as error:
            output.fail(_failure_of(error, self._replica))
        return output

    def _new_output(
        self,
        generation: Generation,
        pending: PendingBytes,
        on_ready: Callable[[RequestOutput], None],
    ) -> tuple[LiveRequest, RequestOutput]:
        replica = self._replica
        engine_id = replica.new_engine_id()
        client_id = generation.request_id or engine_id
        request = LiveRequest(replica.engine, engine_id, client_id, CALLER.get(), replica.live)
        timer = replica.metrics.timer(generation.arrival)
        span = replica.spans.begin(generation, replica.info.instance_id)
        output = RequestOutput(generation, request, replica.tokenizer, timer, span, pending, on_ready)
        request.output = output
        return request, output

    def _check_bytes(self, generation: Generation) -> None:
        if not isinstance(generation.prompt, TokenPrompt):
            check_prompt_bytes(text_bytes(generation.prompt), self._replica.max_prompt_bytes, self._replica.info)

    def _tokenize(self, generation: Generation) -> list[int]:
        """Called on any thread."""
        tokenizer = self._replica.tokenizer
        match generation.prompt:
            case TokenPrompt(token_ids):
                return token_ids
            case TextPrompt(text):
                return tokenizer.encode(text)
            case ChatPrompt(messages, add_generation_prompt, template_arguments):
                ids, _ = tokenizer.encode_chat(messages, add_generation_prompt, template_arguments)
                return ids

    def _most_tokens(self, generation: Generation, prompt_tokens: int) -> int:
        room = self._replica.info.max_context_tokens - prompt_tokens
        asked = generation.stop.max_tokens
        return room if asked is None else min(asked, room)

    async def _tokenize_apart(self, request: LiveRequest, output: RequestOutput, deadline: float | None) -> None:
        loop = asyncio.get_running_loop()
        try:
            token_ids = await loop.run_in_executor(self._replica.tokenizer_threads, self._tokenize, output.generation)
            if not output.closed:
                self._submit(request, output, deadline, token_ids)
        except Exception as error:
            output.fail(_failure_of(error, self._replica))

    def _submit(
        self, request: LiveRequest, output: RequestOutput, deadline: float | None, token_ids: list[int]
    ) -> None:
        generation = output.generation
        check_prompt_length(len(token_ids), self._replica.info)
        check_prompt_scores(len(token_ids), generation.output.prompt_top_logprobs)
        check_output_scores(self._most_tokens(generation, len(token_ids)), generation.output, generation.sampling.n)
        queue_deadline = request.queue_deadline
        self._admission.check_prompt(generation, len(token_ids), _earlier(deadline, queue_deadline))
        output.begin(token_ids)
        self._replica.engine.submit(
            GenerationRequest(
                request_id=request.engine_id,
                prompt_token_ids=token_ids,
                sampling=generation.sampling,
                stop=generation.stop,
                top_logprobs=generation.output.top_logprobs,
                prompt_top_logprobs=generation.output.prompt_top_logprobs,
                grammar=generation.grammar,
                priority=generation.priority,
                deadline=deadline,
                queue_deadline=queue_deadline,
                cache_salt=generation.cache_salt,
                cache_bypass=generation.cache_bypass,
            ),
            output.on_engine_events,
        )
        request.submitted = True


def _failure_of(error: Exception, replica: Replica) -> Failure:
    match error:
        case RequestRefusedError():
            return error.failure
        case InvalidRequestError():
            return invalid(f"start.{error.field}", error.message)
        case EngineDiedError():
            return engine_died(replica.info.instance_id, replica.problem or str(error))
        case _:
            LOGGER.exception("request could not be started", exc_info=error)
            return internal(f"{type(error).__name__} while starting the request")


def _after(start: float, seconds: float | None) -> float | None:
    return None if seconds is None else start + seconds


def _earlier(first: float | None, second: float | None) -> float | None:
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)
