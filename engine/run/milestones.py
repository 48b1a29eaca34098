"""Progress inside a step that a device computes on its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

EVERY = 8  # pieces of a forward pass; there are three a layer


class Event(Protocol):
    """A point in a device's queue of work."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Milestones:
    """Points between the layers of a step. Waiting for them one after the other shows that the device advances, however
    long the whole step takes; a device that hangs reaches no further one."""

    def __init__(self, new_event: Callable[[], Event], pulse: Callable[[], None]) -> None:
        """pulse: called at each that the device has passed."""
        self._new_event = new_event
        self._pulse = pulse
        self._pieces = 0
        self._events: list[Event] = []
        self.marking = False  # while a step is given to the device as it is to run, and not recorded for a graph

    def piece(self) -> None:
        """A piece of a step's work was given to the device."""
        self._pieces += 1
        if self.marking and not self._pieces % EVERY:
            event = self._new_event()
            event.record()
            self._events.append(event)

    def take(self) -> list[Event]:
        """Those marked since the last call, those of steps that nobody waited for among them."""
        events, self._events = self._events, []
        return events

    def wait(self, events: list[Event]) -> None:
        for event in events:
            event.synchronize()
            self._pulse()
