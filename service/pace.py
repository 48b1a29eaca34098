"""How often streams send while many are open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

# What a message costs the front end in seconds of CPU, most of it inside gRPC, and what share of a core all may take.
MESSAGE_SECONDS = 80e-6
MESSAGES_SHARE = 1 / 8
LEAST_PACE_SECONDS = 0.002
MOST_PACE_SECONDS = 0.010


def pace(streams: int) -> float:
    """Seconds between two messages of one stream while so many are open; 0 sends every step's tokens at once.

    A message costs the same whether it holds one token or five, and as much as the work on ten tokens. Where steps are
    short, the front end would spend itself on messages of one token; several streams send some 1600 a second in all
    instead, beyond sixteen each a hundred, and no token waits for more than 10 ms. First tokens and ends never wait,
    nor do those of steps that take longer than this.
    """
    seconds = streams * MESSAGE_SECONDS / MESSAGES_SHARE
    return 0.0 if seconds < LEAST_PACE_SECONDS else min(seconds, MOST_PACE_SECONDS)


class Pacer:
    """Wakes the streams that rest all at once: messages that are written together cost less than each by itself."""

    def __init__(self, streams: Callable[[], int]) -> None:
        """streams: how many are open."""
        self._streams = streams
        self._resting: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def seconds(self) -> float:
        return pace(self._streams())

    def rest(self, wake: Callable[[], None]) -> None:
        """Calls `wake` when the time has come, `seconds` from now at most."""
        self._resting.append(wake)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.seconds, self._wake)

    def _wake(self) -> None:
        self._timer = None
        resting, self._resting = self._resting, []
        for wake in resting:
            wake()
