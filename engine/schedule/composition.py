"""What one step may hold: how the tokens that are still to be computed are shared out over steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.schedule.plan import ScheduledSequence
from engine.schedule.sequence import Sequence

ANY_LENGTH = 2**63


@dataclass(frozen=True, slots=True)
class Wanted:
    """Of the running sequences, what could run if blocks suffice. `decodes` draw their next token from their newest
    one; `pieces` are all else; `needy`: those of either whose blocks do not hold so many tokens."""

    decodes: list[Sequence]
    pieces: list[ScheduledSequence]
    needy: list[tuple[Sequence, int]]


class Composition(Protocol):
    def wanted(self, running: list[Sequence]) -> Wanted: ...

    def room(self, wanted: Wanted) -> int:
        """Tokens that sequences which are not running yet may add to the step."""
        ...

    def admits(self, sequence: Sequence, uncomputed: int, room: int, unfinished: Sequence | None) -> bool:
        """Whether a waiting sequence with so much to compute may begin to run. unfinished: the first of the step's
        whose piece does not compute all of it."""
        ...

    def entrance(self, sequence: Sequence, room: int) -> ScheduledSequence | None:
        """The piece of a sequence that has just begun to run; None: its turn is another step's."""
        ...

    def left(self, room: int, piece: ScheduledSequence | None) -> int:
        """`room` once the piece has come in."""
        ...

    def step(
        self, decodes: list[Sequence], pieces: list[ScheduledSequence]
    ) -> tuple[list[Sequence], list[ScheduledSequence]]:
        """What of all this the step runs."""
        ...

    def ahead(self, running: list[Sequence], length: int) -> int:
        """At least how many tokens of running sequences run before a prompt of `length` tokens that is not running yet
        has its first."""
        ...

    def not_overtaken(self, length: int) -> int:
        """Waiting prompts of at most so many tokens run before one of `length` tokens that comes behind them."""
        ...


def unfinished(pieces: list[ScheduledSequence]) -> Sequence | None:
    """The first sequence that has something left to compute behind its piece."""
    return next((piece.sequence for piece in pieces if not piece.samples), None)


def piece_of(sequence: Sequence, count: int) -> ScheduledSequence:
    """The next `count` uncomputed tokens."""
    start = sequence.num_computed
    return ScheduledSequence(sequence, sequence.slot, start, count, start + count == sequence.num_tokens)


@dataclass(frozen=True, slots=True)
class MixedSteps:
    """Decodes first, then as much of prompts as the budget of `max_tokens` leaves, in order. Never more sequences run
    than the budget has tokens.

    A prompt that the rest of the budget does not finish leaves half of that to prompts behind it that it does finish,
    unless they have a lower priority: a long prompt takes at most twice as long, and holds up nobody for longer than a
    step. What they leave is its own."""

    max_tokens: int

    def wanted(self, running: list[Sequence]) -> Wanted:
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        needy: list[tuple[Sequence, int]] = []
        for sequence in running:
            start = sequence.num_computed
            tokens = len(sequence.token_ids) + sequence.num_pending
            if tokens - start > 1:
                prefills.append(sequence)
            elif tokens < sequence.max_tokens_total:  # else its pending token is its last
                decodes.append(sequence)
                if start >= sequence.capacity:
                    needy.append((sequence, start + 1))
        pieces: list[ScheduledSequence] = []
        budget = self.max_tokens - len(decodes)
        long: Sequence | None = None
        for sequence in prefills:
            if budget and self.admits(sequence, sequence.num_uncomputed, budget, long):
                piece = self.entrance(sequence, budget)
                reach = piece.start + min(sequence.num_uncomputed, budget)
                if reach > sequence.capacity:
                    needy.append((sequence, reach))
                long = long or unfinished([piece])
                pieces.append(piece)
                budget -= piece.count
        return Wanted(decodes, pieces, needy)

    def room(self, wanted: Wanted) -> int:
        return self.max_tokens - len(wanted.decodes) - sum(piece.count for piece in wanted.pieces)

    def admits(self, sequence: Sequence, uncomputed: int, room: int, unfinished: Sequence | None) -> bool:
        if unfinished is None:
            return True
        return uncomputed <= room and sequence.group.request.priority >= unfinished.group.request.priority

    def entrance(self, sequence: Sequence, room: int) -> ScheduledSequence:
        whole = sequence.num_uncomputed <= room
        return piece_of(sequence, sequence.num_uncomputed if whole else room - room // 2)

    def left(self, room: int, piece: ScheduledSequence | None) -> int:
        return room - (piece.count if piece is not None else 0)

    def step(
        self, decodes: list[Sequence], pieces: list[ScheduledSequence]
    ) -> tuple[list[Sequence], list[ScheduledSequence]]:
        long = unfinished(pieces)
        if long is None:
            return decodes, pieces
        left = self.max_tokens - len(decodes) - sum(piece.count for piece in pieces)

        def grown(piece: ScheduledSequence) -> ScheduledSequence:
            return piece_of(long, min(piece.count + left, long.num_uncomputed, long.capacity - piece.start))

        return decodes, [grown(piece) if piece.sequence is long else piece for piece in pieces]

    def ahead(self, running: list[Sequence], length: int) -> int:
        tokens = sum(sequence.num_uncomputed for sequence in running if sequence.num_uncomputed > 1)
        return min(tokens, self.max_tokens - length) if self._is_short(length) else tokens

    def not_overtaken(self, length: int) -> int:
        return self.max_tokens // 2 if self._is_short(length) else ANY_LENGTH

    def _is_short(self, length: int) -> bool:
        """Whether it fits beside a long one."""
        return length <= self.max_tokens // 2


class SeparateSteps:
    """For results that depend on nothing but the request: a step holds one chunk of one prompt, or single tokens behind
    prompts, never both.

    A prompt's chunks are of `max_tokens`, the last one of the rest, whatever else there is to do. Tokens behind it
    always run one a step, also those that a sequence had before it lost its blocks: they are fed in again, and nothing
    is drawn from them. Where there is work of both kinds they take turns."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._prompt_was_last = False

    def wanted(self, running: list[Sequence]) -> Wanted:
        decodes: list[Sequence] = []
        pieces: list[ScheduledSequence] = []
        needy: list[tuple[Sequence, int]] = []
        for sequence in running:
            start = sequence.num_computed
            tokens = len(sequence.token_ids) + sequence.num_pending
            if start < sequence.num_prompt:
                pieces.append(self._chunk(sequence))
                continue
            if start + 1 < tokens:
                pieces.append(piece_of(sequence, 1))
            elif tokens < sequence.max_tokens_total:
                decodes.append(sequence)
            else:
                continue
            if start >= sequence.capacity:
                needy.append((sequence, start + 1))
        return Wanted(decodes, pieces, needy)

    def room(self, wanted: Wanted) -> int:
        waits = bool(wanted.decodes or wanted.pieces) and self._prompt_was_last
        return 0 if waits or any(is_of_prompt(piece) for piece in wanted.pieces) else self._max_tokens

    def admits(self, sequence: Sequence, uncomputed: int, room: int, unfinished: Sequence | None) -> bool:
        return True

    def entrance(self, sequence: Sequence, room: int) -> ScheduledSequence | None:
        return self._chunk(sequence) if sequence.num_computed < sequence.num_prompt else None

    def left(self, room: int, piece: ScheduledSequence | None) -> int:
        return room if piece is None else 0

    def step(
        self, decodes: list[Sequence], pieces: list[ScheduledSequence]
    ) -> tuple[list[Sequence], list[ScheduledSequence]]:
        chunks = [piece for piece in pieces if is_of_prompt(piece)]
        repeated = [piece for piece in pieces if not is_of_prompt(piece)]
        self._prompt_was_last = bool(chunks) and not (self._prompt_was_last and (decodes or repeated))
        return ([], chunks[:1]) if self._prompt_was_last else (decodes, repeated)

    def ahead(self, running: list[Sequence], length: int) -> int:
        return sum(max(0, sequence.num_prompt - sequence.num_computed) for sequence in running)

    def not_overtaken(self, length: int) -> int:
        return ANY_LENGTH

    def _chunk(self, sequence: Sequence) -> ScheduledSequence:
        return piece_of(sequence, min(sequence.num_prompt - sequence.num_computed, self._max_tokens))


def is_of_prompt(piece: ScheduledSequence) -> bool:
    """Whether it holds tokens of the prompt rather than one of the output."""
    return piece.start < piece.sequence.num_prompt
