"""The requests that are live in this replica, and the one way to cancel each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from engine import EngineClient, Usage
from service.output import RequestOutput
from service.pace import Pacer
from service.quota import Quotas
from service.status import Failure, deadline_exceeded, expired_in_queue
from service.stream import OutputStream
from service.tokens import Principal

# The engine says what is past its deadline between two steps. It may be in a long one, or stopped.
DEADLINE_GRACE = 2.0


class LiveRequest:
    """A request from its arrival to the engine's last word on it, tokenization included."""

    def __init__(
        self, engine: EngineClient, engine_id: str, client_id: str, caller: Principal, requests: LiveRequests
    ) -> None:
        self.engine_id = engine_id
        self.client_id = client_id
        self.caller = caller
        self.submitted = False
        self.deadline: float | None = None  # of `time.monotonic()`
        self.queue_deadline: float | None = None  # likewise
        self.tokenization: asyncio.Task[None] | None = None
        self.output: RequestOutput | None = None
        self._engine = engine
        self._requests = requests

    @property
    def instance_id(self) -> str:
        return self._engine.info.instance_id

    def stop_candidate(self, index: int) -> None:
        self._engine.stop_candidate(self.engine_id, index)

    def cancel(self) -> bool:
        """Ends the request wherever it is; its output becomes `finished` with CANCELLED. False: it had ended."""
        output = self.output
        if output is None or output.closed:
            return False
        if self.submitted:
            return self._engine.cancel(self.engine_id)
        self._cancel_tokenization()
        output.cancel_unsubmitted()
        return True

    def cancel_with(self, failure: Failure) -> None:
        """Ends the request with a failure that carries the engine's final usage."""
        output = self.output
        if output is None or output.closed:
            return
        output.fail_when_cancelled(failure)
        if not (self.submitted and self._engine.cancel(self.engine_id)):
            self._cancel_tokenization()
            output.fail(failure)

    def release(self) -> None:
        """Lets the engine forget the request; nobody reads its output any more. Synchronous, for `finally`."""
        self._cancel_tokenization()
        self._requests.remove(self)
        if self.submitted:
            self._engine.cancel(self.engine_id)
        elif self.output is not None and not self.output.closed:
            self.output.cancel_unsubmitted()  # nobody else would note its end

    def check_deadline(self, now: float, *, stalled: bool) -> None:
        """Ends what the engine should have ended by now. What the engine has taken in may have had its turn in the step
        that goes on: whether its time in the queue is over is for the engine to say, unless it stands still."""
        output = self.output
        if output is None or output.closed:
            return
        if _passed(self.deadline, now):
            output.abandon(deadline_exceeded("the deadline passed while the engine was busy"))
        elif not _passed(self.queue_deadline, now) or output.scheduled:
            return
        elif not output.admitted:
            output.abandon(expired_in_queue("the deadline passed before the engine, which was busy, saw the request"))
        elif stalled:
            output.abandon(expired_in_queue("the deadline passed in the queue of an engine that stands still"))

    def ended(self) -> None:
        self._requests.remove(self)

    def _cancel_tokenization(self) -> None:
        if self.tokenization is not None:
            self.tokenization.cancel()


def _passed(deadline: float | None, now: float) -> bool:
    return deadline is not None and now >= deadline + DEADLINE_GRACE


class LiveRequests:
    """All live requests by engine id, and by the id that their clients gave them. They count against quotas."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self._by_engine_id: dict[str, LiveRequest] = {}
        self._by_client_id: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return len(self._by_engine_id)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(list(self._by_engine_id.values()))

    def add(self, request: LiveRequest) -> None:
        self._by_engine_id[request.engine_id] = request
        self._by_client_id.setdefault(request.client_id, set()).add(request.engine_id)
        self._quotas.begin(request.caller)

    def remove(self, request: LiveRequest) -> None:
        """Idempotent."""
        if self._by_engine_id.pop(request.engine_id, None) is None:
            return
        same_id = self._by_client_id[request.client_id]
        same_id.discard(request.engine_id)
        if not same_id:
            del self._by_client_id[request.client_id]
        usage = request.output.usage_so_far if request.output is not None else Usage()
        self._quotas.end(request.caller, usage.prompt_tokens + usage.completion_tokens)

    def check_deadlines(self, now: float, *, stalled: bool) -> None:
        """Called now and then. now: `time.monotonic()`. stalled: whether the engine stands still."""
        for request in self:
            request.check_deadline(now, stalled=stalled)

    def find(self, request_id: str) -> LiveRequest | None:
        """By engine id, or by a client's id if only one live request has it."""
        if request_id in self._by_engine_id:
            return self._by_engine_id[request_id]
        same_id = self._by_client_id.get(request_id, set())
        return self._by_engine_id[next(iter(same_id))] if len(same_id) == 1 else None


class OpenStreams:
    """The generation RPCs that are open; the watch over clients that do not read."""

    def __init__(self) -> None:
        self._streams: set[OutputStream] = set()
        self.pacer = Pacer(lambda: len(self._streams))

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def has_output(self) -> bool:
        """Whether any stream still owes its client an event."""
        return any(stream.owes for stream in self._streams)

    def add(self, stream: OutputStream) -> None:
        self._streams.add(stream)

    def remove(self, stream: OutputStream) -> None:
        self._streams.discard(stream)

    def fail_all(self, failure: Failure) -> None:
        for stream in list(self._streams):
            if not stream.complete:  # its last events are on their way
                stream.fail(failure)

    def check_stalls(self, now: float) -> None:
        for stream in list(self._streams):
            stream.check_stall(now)
