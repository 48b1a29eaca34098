"""What a request tells whoever follows it, and the answer where nobody does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine import FinishReason, Timing, Usage
from service.request import Generation
from service.status import Failure


class RequestSpan(Protocol):
    """One request from its arrival to its last event. The calls come in this order, the first two at most once."""

    def admitted(self, engine_id: str, queue_position: int) -> None: ...

    def first_token(self) -> None: ...

    def ended(
        self, failure: Failure | None, usage: Usage, timing: Timing, finish: Sequence[FinishReason], *, cancelled: bool
    ) -> None: ...


class Spans(Protocol):
    def begin(self, generation: Generation, instance_id: str) -> RequestSpan:
        """instance_id: of the engine."""
        ...

    def refused(self, request_id: str, failure: Failure, arrival: float, instance_id: str) -> None:
        """The whole of a request that got no further than this. arrival: `time.monotonic()` seconds."""
        ...

    def close(self, seconds: float) -> None:
        """Sends what is left, for so long at most. Called on any thread."""
        ...


class _NoSpan:
    def admitted(self, engine_id: str, queue_position: int) -> None:
        pass

    def first_token(self) -> None:
        pass

    def ended(
        self, failure: Failure | None, usage: Usage, timing: Timing, finish: Sequence[FinishReason], *, cancelled: bool
    ) -> None:
        pass


NO_SPAN = _NoSpan()


class NoSpans:
    """Where no tracing was asked for."""

    def begin(self, generation: Generation, instance_id: str) -> RequestSpan:
        return NO_SPAN

    def refused(self, request_id: str, failure: Failure, arrival: float, instance_id: str) -> None:
        pass

    def close(self, seconds: float) -> None:
        pass
