"""What one step may hold: how the tokens that are still to be computed are shared out over steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.schedule.plan import ScheduledSequence
from engine.schedule.sequence import Sequence


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

    def ahead(self, sequence: Sequence) -> int:
        """How many tokens of a running sequence run before any prompt that is not running yet."""
        ...


def piece_of(sequence: Sequence, count: int) -> ScheduledSequence:
    """The next `count` uncomputed tokens."""
    start = sequence.num_computed
    return ScheduledSequence(sequence, sequence.slot, start, count, start + count == sequence.num_tokens)


@dataclass(frozen=True, slots=True)
class MixedSteps:
    """Decodes first, then as much of prompts as the budget of `max_tokens` leaves. Never more sequences run than the
    budget has tokens."""

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
        for sequence in prefills:
            if budget:
                piece = piece_of(sequence, min(sequence.num_uncomputed, budget))
                pieces.append(piece)
                budget -= piece.count
                if piece.start + piece.count > sequence.capacity:
                    needy.append((sequence, piece.start + piece.count))
        return Wanted(decodes, pieces, needy)

    def room(self, wanted: Wanted) -> int:
        return self.max_tokens - len(wanted.decodes) - sum(piece.count for piece in wanted.pieces)

    def entrance(self, sequence: Sequence, room: int) -> ScheduledSequence:
        return piece_of(sequence, min(sequence.num_uncomputed, room))

    def left(self, room: int, piece: ScheduledSequence | None) -> int:
        return room - (piece.count if piece is not None else 0)

    def step(
        self, decodes: list[Sequence], pieces: list[ScheduledSequence]
    ) -> tuple[list[Sequence], list[ScheduledSequence]]:
        return decodes, pieces

    def ahead(self, sequence: Sequence) -> int:
        return sequence.num_uncomputed if sequence.num_uncomputed > 1 else 0


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

    def ahead(self, sequence: Sequence) -> int:
        return max(0, sequence.num_prompt - sequence.num_computed)

    def _chunk(self, sequence: Sequence) -> ScheduledSequence:
        return piece_of(sequence, min(sequence.num_prompt - sequence.num_computed, self._max_tokens))


def is_of_prompt(piece: ScheduledSequence) -> bool:
    """Whether it holds tokens of the prompt rather than one of the output."""
    return piece.start < piece.sequence.num_prompt
