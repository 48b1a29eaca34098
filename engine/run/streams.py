"""The two queues of a device that block moves need: computing, and copies beside it. Each runs in the order given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Tensor = torch.Tensor


class Mark(Protocol):
    """A point in the queue of copies."""

    def done(self) -> bool:
        """Whether everything before it has been copied; does not wait."""
        ...


class Streams(Protocol):
    """`compute` and the model's own kernels are one queue, `copy` the other. Neither waits for the other unless told
    to."""

    def compute(self, action: Callable[[], None]) -> None: ...

    def copy(self, target: Tensor, source: Tensor) -> None: ...

    def copies_wait(self) -> None:
        """Copies given from now on begin when what compute was given so far has run."""
        ...

    def mark_copies(self) -> Mark: ...

    def compute_waits(self, mark: Mark) -> None:
        """What compute is given from now on begins when the copies before the mark have been made."""
        ...


class _Done:
    def done(self) -> bool:
        return True


class OneQueue:
    """On the CPU everything is done when the call returns."""

    def compute(self, action: Callable[[], None]) -> None:
        action()

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def copies_wait(self) -> None:
        pass

    def mark_copies(self) -> Mark:
        return _Done()

    def compute_waits(self, mark: Mark) -> None:
        pass


class _EventMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class CudaStreams:
    """The caller's current stream, and one of its own for copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def compute(self, action: Callable[[], None]) -> None:
        action()

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self.copies):
            target.copy_(source, non_blocking=True)

    def copies_wait(self) -> None:
        self.copies.wait_stream(torch.cuda.current_stream(self._device))

    def mark_copies(self) -> Mark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.copies)
        return _EventMark(event)

    def compute_waits(self, mark: Mark) -> None:
        assert isinstance(mark, _EventMark)
        torch.cuda.current_stream(self._device).wait_event(mark.event)
