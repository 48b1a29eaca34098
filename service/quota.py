"""What each caller may use: requests at once, and tokens a minute from a bucket that fills steadily."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from service.status import Failure, quota_exceeded
from service.tokens import Principal


class TokenBucket:
    """Holds up to a minute's tokens. A request may start while any are left and is charged for what it used, so a
    single request is never too large; the debt is paid before the next one starts."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._filled_at = clock()

    def charge(self, tokens: int) -> None:
        self._fill()
        self._level -= tokens

    def wait(self) -> float:
        """Seconds until there is a token left; 0 if there is."""
        self._fill()
        return 0.0 if self._level > 0 else (1.0 - self._level) * 60.0 / self.per_minute

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._filled_at) * self.per_minute / 60.0)
        self._filled_at = now


class Quotas:
    """By the callers' names, so that they outlive a reload of the tokens."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._live: Counter[str] = Counter()
        self._buckets: dict[str, TokenBucket] = {}

    def refusal(self, caller: Principal) -> Failure | None:
        """Why this caller may not start a request now."""
        if caller.live_requests is not None and self._live[caller.name] >= caller.live_requests:
            return quota_exceeded(f"{caller.name} has {caller.live_requests} live requests, its limit", 1.0)
        wait = self._bucket(caller).wait() if caller.tokens_per_minute is not None else 0.0
        if wait > 0:
            return quota_exceeded(f"{caller.name} used its {caller.tokens_per_minute} tokens a minute", wait)
        return None

    def begin(self, caller: Principal) -> None:
        self._live[caller.name] += 1

    def end(self, caller: Principal, tokens: int) -> None:
        """A request of this caller ended, having used so many prompt and output tokens."""
        self._live[caller.name] -= 1
        if not self._live[caller.name]:
            del self._live[caller.name]
        if caller.tokens_per_minute is not None:
            self._bucket(caller).charge(tokens)

    def _bucket(self, caller: Principal) -> TokenBucket:
        assert caller.tokens_per_minute is not None
        bucket = self._buckets.get(caller.name)
        if bucket is None or bucket.per_minute != caller.tokens_per_minute:
            bucket = self._buckets[caller.name] = TokenBucket(caller.tokens_per_minute, self._clock)
        return bucket
