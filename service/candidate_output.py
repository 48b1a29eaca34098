"""One candidate's way out: sampled tokens in, pieces of text and ids out, as far as its client's window lets them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from engine import CandidateFinish, Delta, FinishReason, OutputText, Tokenizer, TokenLogprob, TokensGenerated
from service.pending import EVENT_BYTES, TOKEN_BYTES, PendingBytes, logprob_bytes

WHOLE_TOKEN_BYTES = EVENT_BYTES + TOKEN_BYTES


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
    """One candidate's text and what of it still has to be sent. Counts are in tokens.

    finish: why it ended. met_stop: a stop sequence in its text ended it, of which the engine knows nothing.
    """

    def __init__(
        self, index: int, text: OutputText, tokenizer: Tokenizer, pending: PendingBytes, *, include_stop: bool
    ) -> None:
        self.index = index
        self.text = text
        self.pieces: deque[Piece] = deque()
        self.held = 0  # bytes of them, roughly
        self.sent = 0
        self.acknowledged = 0
        self.finish: CandidateFinish | None = None
        self.met_stop = False
        self.send_after = 0.0
        self.last_token_at = 0.0
        self._tokenizer = tokenizer
        self._pending = pending
        self._include_stop = include_stop

    # --- in ---------------------------------------------------------------------------------------------------------

    def push(self, event: TokensGenerated) -> int:
        """Takes in what a step sampled, and gives how many of these tokens stand behind a stop sequence."""
        token_ids = event.token_ids
        if event.finish is None and not event.logprobs:
            text = self.text.push_whole(token_ids)
            if text is not None:  # by far the most frequent
                self._add(Piece(token_ids, text, (), WHOLE_TOKEN_BYTES + len(text)))
                return 0
        before = self.text.token_count
        delta = self.text.push(*self._output_tokens(event))
        if delta.stopped is not None:
            self.met_stop = True
            self._end(delta, CandidateFinish(FinishReason.STOP), delta.stopped)
            return len(token_ids) - (self.text.used_tokens - before)
        if delta.token_ids or delta.text:
            self._add(piece_of(delta, self._tokenizer))
        if event.finish is not None:
            rest = self.text.finish()
            finish = event.finish if rest.stopped is None else CandidateFinish(FinishReason.STOP)
            self._end(rest, finish, rest.stopped)
        return 0

    def cancel(self, *, with_rest: bool) -> None:
        """Ends it where it is. with_rest: what its text held back is sent."""
        self._end(self.text.finish() if with_rest else Delta(), CandidateFinish(FinishReason.CANCELLED))

    def drop(self) -> bool:
        """Forgets what was not sent; says whether the candidate's end was part of it."""
        had_end = bool(self.pieces) and self.pieces[-1].finish is not None
        self._pending.total -= self.held
        self.held = 0
        self.pieces.clear()
        return had_end

    def _output_tokens(self, event: TokensGenerated) -> tuple[Sequence[int], Sequence[TokenLogprob]]:
        """Without the token that ended the candidate, which is no output unless it was asked for."""
        finish = event.finish
        if finish is None or finish.token_id is None or self._include_stop:
            return event.token_ids, event.logprobs
        if event.token_ids and event.token_ids[-1] == finish.token_id:
            return event.token_ids[:-1], event.logprobs[:-1]
        return event.token_ids, event.logprobs

    def _end(self, delta: Delta, finish: CandidateFinish, stop_sequence: str | None = None) -> None:
        self.finish = finish
        self._add(piece_of(delta, self._tokenizer, finish, stop_sequence))

    def _add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.held += piece.size
        self._pending.total += piece.size

    # --- out --------------------------------------------------------------------------------------------------------

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
        self._pending.total -= taken.size
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
