"""One request's way out: engine events in, gapless output events out, in the pace that its client asked for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import msgspec

from engine import (
    Admitted,
    Event,
    FinishReason,
    OutputText,
    PromptScored,
    RequestFailed,
    RequestFinished,
    Scheduled,
    Timing,
    Tokenizer,
    TokenLogprob,
    TokensGenerated,
    Usage,
)
from octavo.v1 import generation_pb2
from service.candidate_output import CandidateOutput
from service.convert.events import (
    Events,
    add_admitted,
    add_delta,
    add_failed,
    add_finished,
    add_prompt,
    fill_finish,
    fill_logprobs,
    fill_usage,
)
from service.convert.unary import FinishedCandidate, unary_response
from service.metrics import RequestTimer
from service.pending import PendingBytes, refusal_bytes
from service.prompt_output import PromptOutput
from service.request import Generation, TokenPrompt
from service.request_log import log_end
from service.spans import RequestSpan
from service.status import Failure, from_engine, internal

LOGGER = logging.getLogger(__name__)

EVENT_BYTES_AT_ONCE = 1 << 20  # of one candidate in one event; gRPC clients refuse messages of more than 4 MiB
GATHERED_BYTES = 1 << 18  # a candidate that coalesces sends when it has so much, whatever the time


class Control(Protocol):
    """What a request's output may do to the request."""

    @property
    def engine_id(self) -> str: ...

    @property
    def instance_id(self) -> str: ...

    def stop_candidate(self, index: int) -> None:
        """A stop sequence ended this candidate."""
        ...

    def cancel(self) -> bool:
        """Ends the request; the engine's answer comes as its last event."""
        ...

    def release(self) -> None:
        """Lets the engine forget the request, whose output nobody reads any more."""
        ...

    def ended(self) -> None:
        """The last word on the request was said."""
        ...


class RequestOutput:
    """Receives a request's engine events and gives them out as messages. `on_ready` is called when there is something
    to give."""

    def __init__(
        self,
        generation: Generation,
        control: Control,
        tokenizer: Tokenizer,
        timer: RequestTimer,
        span: RequestSpan,
        pending: PendingBytes,
        on_ready: Callable[[RequestOutput], None],
    ) -> None:
        self.generation = generation
        self.options = generation.output
        self.control = control
        self.request_id = generation.request_id or control.engine_id
        self.candidates: list[CandidateOutput] = []
        self.failure: Failure | None = None
        self.usage = Usage()
        self.timing = Timing()
        self.cancelled = False
        self.closed = False  # the engine, or who spoke for it, said its last word
        self.done = False  # the last event was given out
        self.prompt_token_ids: list[int] = []
        self.shut_since: float | None = None  # since when a window has held output back
        self._prompt = PromptOutput(self.options.prompt_top_logprobs or 0, tokenizer, pending)
        self._prompt_begun = False
        self._tokenizer = tokenizer
        self._pending = pending
        self._timer = timer
        self._span = span
        self._finishes: list[FinishReason] = []
        self._on_ready = on_ready
        self._sequence = 0
        self._admitted: Admitted | None = None
        self._admitted_sent = False
        self._scheduled = False
        self._begun = False  # a token was given out
        self._override: Failure | None = None
        self._refusal_bytes = 0  # of a failure without output, while it waits
        self._flush_timer: asyncio.TimerHandle | None = None
        self._generated = 0  # output tokens, none of them behind a stop sequence
        self._met_stop = False

    @property
    def admitted(self) -> bool:
        """Whether the engine has taken it in."""
        return self._admitted is not None

    @property
    def scheduled(self) -> bool:
        """Whether it surely had a turn. Of requests with a time in the queue the engine says so, of others tokens."""
        return self._scheduled or self._generated > 0

    # --- in ---------------------------------------------------------------------------------------------------------

    def begin(self, prompt_token_ids: list[int]) -> None:
        """The prompt is tokenized: the candidates' text continues it."""
        generation = self.generation
        self.prompt_token_ids = prompt_token_ids
        texts = [
            OutputText(
                self._tokenizer,
                stop_strings=generation.stop_sequences,
                include_stop=generation.include_stop,
                skip_special_tokens=generation.output.skip_special_tokens,
                min_tokens=generation.stop.min_tokens,
                prompt_token_ids=prompt_token_ids,
            )
            for _ in range(generation.sampling.n)
        ]
        self.candidates = [
            CandidateOutput(index, text, self._tokenizer, self._pending, include_stop=generation.include_stop)
            for index, text in enumerate(texts)
        ]

    def on_engine_events(self, events: Sequence[Event]) -> None:
        """The request's sink. A fault here is this request's own: it fails, and the engine is told to drop it."""
        try:
            for event in events:
                if type(event) is TokensGenerated:  # by far the most frequent
                    self._on_tokens(event)
                else:
                    self._on_event(event)
        except Exception as error:
            LOGGER.exception("request failed", extra={"request_id": self.control.engine_id})
            self.fail(internal(f"{type(error).__name__} while converting the output"))
            self.control.release()
        self._on_ready(self)

    def _on_event(self, event: Event) -> None:
        if self.closed:
            return
        match event:
            case PromptScored():
                self._prompt.add(event.logprobs)
            case Admitted():
                self._admitted = event
                self._span.admitted(self.control.engine_id, event.queue_position)
            case Scheduled():
                self._scheduled = True
            case RequestFinished():
                self._on_finished(event)
            case RequestFailed():
                failure = self._override or from_engine(event, self.control.instance_id, self.generation.grammar)
                # A dead engine cannot say what it had used; what came from it is known here.
                self._close(failure, self._counted(event.usage) if event.usage != Usage() else self.usage_so_far)

    def _on_tokens(self, event: TokensGenerated) -> None:
        if self.closed:
            return
        candidate = self.candidates[event.candidate]
        if candidate.finish is not None:
            return
        count = len(event.token_ids)
        if count:
            if not self._generated:
                self._span.first_token()
            self._generated += count
            candidate.last_token_at = self._timer.tokens(count, candidate.last_token_at)
        self._generated -= candidate.push(event)
        if candidate.finish is not None:
            self._finishes.append(candidate.finish.reason)
            if candidate.met_stop:
                self._met_stop = True
                if event.finish is None:
                    self.control.stop_candidate(candidate.index)

    def _counted(self, usage: Usage) -> Usage:
        """The engine's usage. Behind a stop sequence it has sampled more tokens or fewer, as it went: none count."""
        return msgspec.structs.replace(usage, completion_tokens=self._generated) if self._met_stop else usage

    def _on_finished(self, event: RequestFinished) -> None:
        self.timing = event.timing
        if self._override is not None:
            self._close(self._override, self._counted(event.usage))
            return
        self.cancelled = event.cancelled
        for candidate in self.candidates:
            # Who cancels acknowledges no more: what a window holds back would never get out.
            end_dropped = self.cancelled and self.options.window > 0 and candidate.drop()
            if end_dropped or candidate.finish is None:
                candidate.cancel(with_rest=not self.options.window)
                self._finishes.append(FinishReason.CANCELLED)
        self._close(None, self._counted(event.usage))

    def fail(self, failure: Failure) -> None:
        """Ends the request for its client without the engine's word."""
        if not self.closed:
            self._close(failure, self.usage_so_far)
            self._on_ready(self)

    def abandon(self, failure: Failure) -> None:
        """Ends the request with a failure and drops what was not sent, also if the engine is done with it."""
        for candidate in self.candidates:
            candidate.drop()
        self._prompt.drop()
        self.shut_since = None
        if self.closed:
            self.failure = failure.with_usage(self.usage)
        else:
            self._close(failure, self.usage_so_far)
            self.control.release()
        self._on_ready(self)

    def cancel_unsubmitted(self) -> None:
        """Ends a request that the engine never saw, as cancelled."""
        self.begin([])
        self.on_engine_events(
            [RequestFinished(self.control.engine_id, Usage(), Timing(total=self._timer.elapsed()), cancelled=True)]
        )

    def fail_when_cancelled(self, failure: Failure) -> None:
        """Makes the engine's answer to a cancel this failure, so that it carries the final usage."""
        self._override = self._override or failure

    def _close(self, failure: Failure | None, usage: Usage) -> None:
        self.closed = True
        self.usage = usage
        if failure is not None:
            self.failure = failure.with_usage(usage)
            self._prompt.drop()
            self._drop_if_windowed()
            if not self.admitted:
                self._hold_refusal(self.failure)
        self._timer.ended(failure, usage, self.timing, cancelled=self.cancelled)
        self._span.ended(failure, usage, self.timing, self._finishes, cancelled=self.cancelled)
        outcome = "cancelled" if self.cancelled else "finished"
        ids = (self.control.engine_id, self.generation.request_id)
        log_end(LOGGER, *ids, self.failure or outcome, usage, self._timer.elapsed())
        self.control.ended()

    def _hold_refusal(self, failure: Failure) -> None:
        """Of a request that got no further only the failure waits for its client."""
        self.generation = replace(self.generation, prompt=TokenPrompt([]))
        self._refusal_bytes = refusal_bytes(self.request_id, failure)
        self._pending.total += self._refusal_bytes

    def _drop_if_windowed(self) -> None:
        """A failure does not wait for acknowledgements."""
        if self.options.window:
            for candidate in self.candidates:
                candidate.drop()

    @property
    def urgent(self) -> bool:
        """Whether what is ready should not wait for more: a first token, an end."""
        return not self._begun or self.closed

    # --- out --------------------------------------------------------------------------------------------------------

    def acknowledge(self, candidate_index: int, token_count: int) -> None:
        """Tokens [0, token_count) were consumed. Counts beyond what was sent count as all that was sent."""
        if candidate_index < len(self.candidates):
            candidate = self.candidates[candidate_index]
            candidate.acknowledged = max(candidate.acknowledged, min(token_count, candidate.sent))
            self.shut_since = None
            self._on_ready(self)

    def take(self, events: Events) -> None:
        """Appends everything that may be sent now."""
        if self.done:
            return
        if not self._admitted_sent and (self._admitted is not None or (self.closed and not self.failure)):
            self._take_admitted(events)
        if self.options.prompt_top_logprobs is not None and self.failure is None and self._take_prompt(events):
            self._on_ready(self)  # a message has room for one event of these
            return
        for candidate in self.candidates:
            if candidate.pieces:
                self._take_candidate(candidate, events)
        if self.closed and not any(candidate.pieces for candidate in self.candidates):
            self._take_terminal(events)

    def take_all(self) -> generation_pb2.GenerateUnaryResponse:
        """The whole output of a request that ended well."""
        self.done = True
        return unary_response(
            self.request_id,
            [self._finished(candidate) for candidate in self.candidates],
            self.usage,
            self.timing,
            self.prompt_token_ids if self.options.echo_prompt_token_ids else (),
            self._tokenizer,
            self._all_prompt_scores(),
        )

    def _all_prompt_scores(self) -> tuple[int, Sequence[TokenLogprob]] | None:
        if self.options.prompt_top_logprobs is None or self._admitted is None:
            return None
        return self.prompt_token_ids[0], self._prompt.take_all()

    def _finished(self, candidate: CandidateOutput) -> FinishedCandidate:
        piece, options = candidate.take(0), self.options
        assert piece is not None
        assert piece.finish is not None
        return FinishedCandidate(
            index=candidate.index,
            text=piece.text if options.text else "",
            token_ids=piece.token_ids if options.token_ids else (),
            logprobs=piece.logprobs,
            finish=piece.finish,
            stop_sequence=piece.stop_sequence,
        )

    def _take_admitted(self, events: Events) -> None:
        self._admitted_sent = True
        admitted = self._admitted or Admitted(self.control.engine_id, self.usage.prompt_tokens, 0)
        add_admitted(
            events,
            self.request_id,
            self._next_sequence(),
            engine_id=self.control.engine_id,
            prompt_tokens=admitted.prompt_tokens,
            queue_position=admitted.queue_position,
            sampling=self.generation.sampling,
            prompt_token_ids=self.prompt_token_ids if self.options.echo_prompt_token_ids else (),
        )

    def _take_prompt(self, events: Events) -> bool:
        """Gives out some of the prompt's log probabilities; True if more are there."""
        first = self.prompt_token_ids[0] if self._admitted is not None and not self._prompt_begun else None
        piece = self._prompt.take()
        if first is not None or piece:
            self._prompt_begun = True
            add_prompt(events, self.request_id, self._next_sequence(), first, piece, self._tokenizer)
        return len(self._prompt) > 0

    def _take_candidate(self, candidate: CandidateOutput, events: Events) -> None:
        options = self.options
        if options.coalesce and self._is_gathering(candidate):
            return
        piece = candidate.take(options.window, EVENT_BYTES_AT_ONCE)
        if piece is None:
            self._note_held(candidate)
            return
        count = len(piece.token_ids)
        text, token_ids = piece.text if options.text else "", piece.token_ids if options.token_ids else ()
        sequence, offset = self._sequence, candidate.sent
        self._sequence = sequence + 1
        delta = add_delta(events, self.request_id, sequence, candidate.index, offset, count, text, token_ids)
        candidate.sent = offset + count
        self._begun = True
        if candidate.pieces:
            self._note_held(candidate)
        if piece.logprobs:
            fill_logprobs(delta, piece.logprobs, self._tokenizer)
        if options.usage_in_deltas:
            fill_usage(delta, self.usage_so_far)
        if piece.finish is not None:
            fill_finish(delta.finish, piece.finish, piece.stop_sequence)
        if options.coalesce:
            candidate.send_after = time.monotonic() + options.coalesce

    def _note_held(self, candidate: CandidateOutput) -> None:
        """What is left is too much for one message, or waits for acknowledgements."""
        if candidate.passes(self.options.window):
            self._on_ready(self)
        elif self.shut_since is None:
            self.shut_since = time.monotonic()

    def _is_gathering(self, candidate: CandidateOutput) -> bool:
        """Whether a coalescing candidate waits for more; then a timer will ask again."""
        if not candidate.send_after or candidate.finish is not None or self.closed or candidate.held > GATHERED_BYTES:
            return False
        wait = candidate.send_after - time.monotonic()
        if wait <= 0:
            return False
        if self._flush_timer is None:
            self._flush_timer = asyncio.get_running_loop().call_later(wait, self._flush)
        return True

    def _flush(self) -> None:
        self._flush_timer = None
        self._on_ready(self)

    def _take_terminal(self, events: Events) -> None:
        self.done = True
        self._pending.total -= self._refusal_bytes
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        if self.failure is not None:
            add_failed(events, self.request_id, self._next_sequence(), self.failure)
        else:
            add_finished(events, self.request_id, self._next_sequence(), self.usage, self.timing)

    @property
    def usage_so_far(self) -> Usage:
        if self.closed:
            return self.usage
        prompt_tokens = self._admitted.prompt_tokens if self._admitted is not None else 0
        return Usage(prompt_tokens=prompt_tokens, completion_tokens=self._generated)

    def _next_sequence(self) -> int:
        sequence = self._sequence
        self._sequence += 1
        return sequence
