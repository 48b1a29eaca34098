"""Signs of progress from inside a step."""

from __future__ import annotations

import time
from collections.abc import Callable

HEARTBEAT_SECONDS = 0.25


class Pulse:
    """Called whenever a piece of work is done: a step, or a part of one that may take seconds on a slow machine.

    `at`: when that was last, `time.monotonic()`. listener: told the time, at most once a heartbeat. The calls come from
    the work itself and never from a timer, so that work which hangs has no pulse.
    """

    def __init__(self) -> None:
        self.at = time.monotonic()
        self.listener: Callable[[float], None] | None = None
        self._told = self.at

    def told(self) -> None:
        """The listener heard of it in another way."""
        self._told = self.at

    def __call__(self) -> None:
        self.at = time.monotonic()
        if self.listener is not None and self.at - self._told >= HEARTBEAT_SECONDS:
            self._told = self.at
            self.listener(self.at)
