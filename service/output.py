"""One request's way out: engine events in, gapless output events out, in the pace that its client asked for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import msgspec

from engine import (
    Admitted,
    CandidateFinish,
    Delta,
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
from service.pending import EVENT_BYTES, TOKEN_BYTES, PendingBytes, logprob_bytes, refusal_bytes
from service.prompt_output import PromptOutput
from service.request import Generation, TokenPrompt
from service.spans import RequestSpan
from service.status import Failure, from_engine, internal

LOGGER = logging.getLogger(__name__)

WHOLE_TOKEN_BYTES = EVENT_BYTES + TOKEN_BYTES
EVENT_BYTES_AT_ONCE = 1 << 20  # of one candidate in one event; gRPC clients refuse messages of more than 4 MiB
GATHERED_BYTES = 1 << 18  # a candidate that coalesces sends when it has so much, whatever the time

REQUEST_ENDED = "request ended"


def ending(
    engine_id: str, client_id: str, outcome: Failure | str, usage: Usage, seconds: float
) -> dict[str, str | int | float]:
    """What the log says of a request's end."""
    return {
        "request_id": engine_id,
        "client_request_id": client_id,
        "outcome": outcome.reason if isinstance(outcome, Failure) else outcome,
        "problem": outcome.message if isinstance(outcome, Failure) else "",
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "seconds": round(seconds, 6),
    }


class Piece(msgspec.Struct, frozen=True, gc=False):
    """Tokens of one candidate that are ready to be sent, with exactly their text. `size` is about their bytes."""

    token_ids: Sequence[int]
    text: str
    logprobs: Sequence[TokenLogprob]
    size: int
    finish: CandidateFinish | None = None
    stop_sequence: str | None = None


def piece_of(
    delta: Delta, tokenizer: Tokenizer, finish: CandidateFinish | None = None, stop_sequence: str | None = None
) -> Piece:
    token_ids, text, logprobs = delta.token_ids, delta.text, delta.logprobs
    size = EVENT_BYTES + len(text) + TOKEN_BYTES * len(token_ids)
    if logprobs:
        size += sum([logprob_bytes(logprob, tokenizer) for logprob in logprobs])
    return Piece(token_ids, text, logprobs, size, finish, stop_sequence)


def joined(pieces: Sequence[Piece]) -> Piece:
    """Several pieces as one; the last one may be the candidate's end."""
    return Piece(
        [token_id for piece in pieces for token_id in piece.token_ids],
        "".join([piece.text for piece in pieces]),
        [logprob for piece in pieces for logprob in piece.logprobs],
        sum([piece.size for piece in pieces]),
        pieces[-1].finish,
        pieces[-1].stop_sequence,
    )


class CandidateOutput:
    """One candidate's text and what of it still has to be sent. Counts are in tokens."""

    def __init__(self, index: int, text: OutputText, pending: PendingBytes) -> None:
        self.index = index
        self.text = text
        self.pieces: deque[Piece] = deque()
        self.held = 0  # bytes of them, roughly
        self.pending = pending
        self.sent = 0
        self.acknowledged = 0
        self.ended = False
        self.send_after = 0.0
        self.last_token_at = 0.0

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.held += piece.size
        self.pending.total += piece.size

    def drop(self) -> bool:
        """Forgets what was not sent; says whether the candidate's end was part of it."""
        had_end = bool(self.pieces) and self.pieces[-1].finish is not None
        self.pending.total -= self.held
        self.held = 0
        self.pieces.clear()
        return had_end

    def take(self, window: int, most: int | None = None) -> Piece | None:
        """What is ready and the window lets through, as one piece; everything if there is no window (0). most: bytes,
        but at least one of the pieces that are held."""
        if not window and len(self.pieces) == 1:
            taken = self.pieces.popleft()
        else:
            passing = self._passing(window) if window else len(self.pieces)
            if most is not None and self.held > most:
                passing = min(passing, self._within(most))
            if not passing:
                return None
            taken = joined([self.pieces.popleft() for _ in range(passing)])
        self.held -= taken.size
        self.pending.total -= taken.size
        return taken

    def passes(self, window: int) -> bool:
        """Whether the window lets something through."""
        return bool(self.pieces) and (not window or self._passing(window) > 0)

    def _within(self, most: int) -> int:
        """How many pieces so many bytes hold; one at least."""
        total = 0
        for index, piece in enumerate(self.pieces):
            total += piece.size
            if total > most:
                return max(1, index)
        return len(self.pieces)

    def _passing(self, window: int) -> int:
        """How many pieces the window lets through."""
        unacknowledged = self.sent - self.acknowledged
        for index, piece in enumerate(self.pieces):
            count = len(piece.token_ids)
            # A piece larger than the whole window passes when nothing else is under way: it cannot be split.
            if count and unacknowledged and unacknowledged + count > window:
                return index
            unacknowledged += count
        return len(self.pieces)


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
        self.candidates = [CandidateOutput(index, text, self._pending) for index, text in enumerate(texts)]

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
        if candidate.ended:
            return
        token_ids = event.token_ids
        count = len(token_ids)
        if count:
            if not self._generated:
                self._span.first_token()
            self._generated += count
            candidate.last_token_at = self._timer.tokens(count, candidate.last_token_at)
        if event.finish is None and not event.logprobs:
            text = candidate.text.push_whole(token_ids)
            if text is not None:  # by far the most frequent
                candidate.add(Piece(token_ids, text, (), WHOLE_TOKEN_BYTES + len(text)))
                return
        before = candidate.text.token_count
        if event.finish is None:
            delta = candidate.text.push(token_ids, event.logprobs)
        else:
            delta = candidate.text.push(*self._output_tokens(event))
        if delta.stopped is not None:
            self._met_stop = True
            self._generated -= count - (candidate.text.used_tokens - before)
            self._end_candidate(candidate, delta, CandidateFinish(FinishReason.STOP), delta.stopped)
            if event.finish is None:
                self.control.stop_candidate(candidate.index)
        elif event.finish is not None:
            self._add(candidate, delta)
            rest = candidate.text.finish()
            finish = event.finish if rest.stopped is None else CandidateFinish(FinishReason.STOP)
            self._end_candidate(candidate, rest, finish, rest.stopped)
        else:
            self._add(candidate, delta)

    def _counted(self, usage: Usage) -> Usage:
        """The engine's usage. Behind a stop sequence it has sampled more tokens or fewer, as it went: none count."""
        return msgspec.structs.replace(usage, completion_tokens=self._generated) if self._met_stop else usage

    def _output_tokens(self, event: TokensGenerated) -> tuple[Sequence[int], Sequence[TokenLogprob]]:
        """Without the token that ended the candidate, which is no output unless it was asked for."""
        finish = event.finish
        if finish is None or finish.token_id is None or self.generation.include_stop:
            return event.token_ids, event.logprobs
        if event.token_ids and event.token_ids[-1] == finish.token_id:
            return event.token_ids[:-1], event.logprobs[:-1]
        return event.token_ids, event.logprobs

    def _add(self, candidate: CandidateOutput, delta: Delta) -> None:
        if delta.token_ids or delta.text:
            candidate.add(piece_of(delta, self._tokenizer))

    def _end_candidate(
        self, candidate: CandidateOutput, delta: Delta, finish: CandidateFinish, stop_sequence: str | None = None
    ) -> None:
        candidate.ended = True
        self._finishes.append(finish.reason)
        candidate.add(piece_of(delta, self._tokenizer, finish, stop_sequence))

    def _on_finished(self, event: RequestFinished) -> None:
        self.timing = event.timing
        if self._override is not None:
            self._close(self._override, self._counted(event.usage))
            return
        self.cancelled = event.cancelled
        for candidate in self.candidates:
            # Who cancels acknowledges no more: what a window holds back would never get out.
            end_dropped = self.cancelled and self.options.window > 0 and candidate.drop()
            if end_dropped or not candidate.ended:
                rest = Delta() if self.options.window else candidate.text.finish()
                self._end_candidate(candidate, rest, CandidateFinish(FinishReason.CANCELLED))
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
        self._prompt.take_all()
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
            self._prompt.take_all()
            self._drop_if_windowed()
            if not self.admitted:
                self._hold_refusal(self.failure)
        self._timer.ended(failure, usage, self.timing, cancelled=self.cancelled)
        self._span.ended(failure, usage, self.timing, self._finishes, cancelled=self.cancelled)
        outcome = "cancelled" if self.cancelled else "finished"
        ids = (self.control.engine_id, self.generation.request_id)
        if LOGGER.isEnabledFor(logging.INFO):
            LOGGER.info(REQUEST_ENDED, extra=ending(*ids, self.failure or outcome, usage, self._timer.elapsed()))
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
        if not candidate.send_after or candidate.ended or self.closed or candidate.held > GATHERED_BYTES:
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
