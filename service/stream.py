"""One writer per RPC: it sends everything that is ready in one message and never holds more than a bounded amount."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from octavo.v1 import generation_pb2
from service.convert.events import add_failed
from service.output import RequestOutput
from service.pace import Pacer
from service.pending import PendingBytes, refusal_bytes
from service.status import Failure, RequestRefusedError, slow_consumer

Batch = generation_pb2.GenerateResponse | generation_pb2.GenerateStreamResponse

_LARGE_FIRST_MESSAGE = 16 << 10  # bytes; a client's smallest window is four times that


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """pending_bytes: output and refusals held for a client that reads too slowly. burst: seconds of a write from which
    log probabilities of prompts are among them. stall: seconds that one write, or a shut window, may last.
    message_bytes: a message is cut when it reaches this size, below what gRPC clients accept (4 MiB)."""

    pending_bytes: int = 1 << 20
    burst: float = 2.0
    stall: float = 30.0
    message_bytes: int = 1 << 20


class OutputStream:
    """The outputs of one RPC and their writer.

    `outputs` call `mark_ready` when they have something to give; `run` sends it. A stream-wide failure (`fail`) ends
    `run` with RequestRefusedError, also while a write is stalled.

    open_call: sends the RPC's headers. grpc.aio sends them with the first message, and could send no status while that
    one is stalled: a first message that may stall goes behind headers of its own.
    """

    def __init__(
        self,
        send: Callable[[Batch], Awaitable[None]],
        open_call: Callable[[], Awaitable[None]],
        new_batch: Callable[[], Batch],
        limits: StreamLimits,
        *,
        multiplexed: bool,
        pacer: Pacer,
    ) -> None:
        self.pending = PendingBytes()
        self.outputs: dict[str, RequestOutput] = {}
        self.sent_anything = False
        self.writing_since: float | None = None
        self._opened = False  # the RPC's headers have been sent
        self._send = send
        self._open_call = open_call
        self._new_batch = new_batch
        self._limits = limits
        self._multiplexed = multiplexed
        self._ready: dict[RequestOutput, None] = {}  # a set that keeps its order
        self._wake = asyncio.Event()
        self._pacer = pacer
        self._sent_at = 0.0
        self._resting = False
        self._input_closed = False
        self._first: RequestOutput | None = None
        self._begun = False  # a request has come
        self._refused: dict[str, Failure] = {}  # requests that were refused as they came, and whose clients wait
        self._refused_bytes = 0
        self.failed: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()

    # --- the reader's side ------------------------------------------------------------------------------------------

    def has(self, request_id: str) -> bool:
        """Whether the client still waits for this request's end."""
        return request_id in self.outputs or request_id in self._refused

    @property
    def owes(self) -> bool:
        """Whether the client still waits for any request's end."""
        return bool(self.outputs or self._refused)

    def attach(self, output: RequestOutput) -> None:
        self.outputs[output.request_id] = output
        if not self._begun:
            self._begun, self._first = True, output

    def refuse(self, request_id: str, failure: Failure) -> None:
        """Ends a request that was never attached. The first one's refusal may be the whole RPC's."""
        if not self._begun and self._is_for_all(failure):
            self.fail(failure)
            return
        self._begun = True
        self._refused[request_id] = failure
        size = refusal_bytes(request_id, failure)
        self._refused_bytes += size
        self.pending.total += size
        if self.writing_since is None:
            self._wake.set()
        else:
            self._check_unread()

    def close_input(self) -> None:
        """No further requests will come: `run` ends when those attached have."""
        self._input_closed = True
        self._wake.set()

    @property
    def opening(self) -> bool:
        """Whether the RPC's headers are on their way. Until they have left no status can be sent."""
        return self.writing_since is not None and not self._opened

    @property
    def complete(self) -> bool:
        """No request is to come and none is left: `run` ends well as soon as its last message is out."""
        return self._input_closed and not self.owes

    def fail(self, failure: Failure) -> None:
        """Ends the RPC with this status; what is pending is dropped."""
        if not self.failed.done():
            self.failed.set_result(failure)
            self._wake.set()

    # --- the outputs' side ------------------------------------------------------------------------------------------

    def mark_ready(self, output: RequestOutput) -> None:
        self._ready[output] = None
        if self.writing_since is not None:
            self._check_unread()
        elif self._wake.is_set():
            return  # by another output of the same step
        elif output.urgent or (not self._resting and self._may_send):
            self._wake.set()
        elif not self._resting:
            self._rest()

    @property
    def _may_send(self) -> bool:
        """Whether enough time has passed since the last message."""
        seconds = self._pacer.seconds
        return not seconds or time.monotonic() - self._sent_at >= seconds

    def _rest(self) -> None:
        self._resting = True
        self._pacer.rest(self._rested)

    def _rested(self) -> None:
        self._resting = False
        if self._ready:
            self._sent_at = 0.0
            self._wake.set()

    def check_stall(self, now: float) -> None:
        """Called now and then: fails what has waited for its client for too long. now: `time.monotonic()`."""
        stall = self._limits.stall
        written = 0.0 if self.writing_since is None else now - self.writing_since
        if written > stall:
            self._fail_slow(f"a write has been stalled for more than {stall:g} s")
        elif written > self._limits.burst:
            self._check_unread(prompts=True)
        for output in list(self.outputs.values()):
            if output.shut_since is not None and now - output.shut_since > stall:
                output.abandon(slow_consumer(f"nothing was acknowledged for more than {stall:g} s"))

    def _check_unread(self, *, prompts: bool = False) -> None:
        """During a write: what waits behind it is bounded. prompts: with their log probabilities."""
        size = self.pending.total if prompts else self.pending.total - self.pending.prompts
        if size > self._limits.pending_bytes:
            self._fail_slow(f"{size} bytes wait while the client does not read")

    def _fail_slow(self, problem: str) -> None:
        self.fail(slow_consumer(problem))

    # --- the writer -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Returns when input is closed and every request has ended. Raises RequestRefusedError for a failed stream."""
        while not self.failed.done():
            batch = self._collect() if self._refused or (self._ready and self._is_due()) else None
            if batch is not None:
                self.writing_since = time.monotonic()
                if not self._opened and batch.ByteSize() > _LARGE_FIRST_MESSAGE:
                    await self._open_call()
                    self._opened = True
                await self._send(batch)
                self.writing_since, self._sent_at = None, time.monotonic()
                self.sent_anything = self._opened = True
            elif self.complete:
                return
            else:
                await self._wake.wait()
                self._wake.clear()
        raise RequestRefusedError(self.failed.result())

    def _is_due(self) -> bool:
        """Whether what is ready may go now; if not, the writer is woken when it may."""
        if self._may_send or any(output.urgent for output in self._ready):
            return True
        if not self._resting:
            self._rest()
        return False

    def _collect(self) -> Batch | None:
        batch = self._new_batch()
        events, enough = batch.events, self.pending.total - self._limits.message_bytes
        refused, self._refused = self._refused, {}
        self.pending.total -= self._refused_bytes
        self._refused_bytes = 0
        for request_id, failure in refused.items():
            add_failed(events, request_id, 0, failure)
        ready, self._ready = self._ready, {}
        for output in ready:
            if self.pending.total < enough:  # the message is full
                self._ready[output] = None
                continue
            if output.failure is not None and not events and self._fails_stream(output):
                return None
            output.take(events)
            if output.done:
                self.outputs.pop(output.request_id, None)
        self._check_held()
        return batch if events else None

    def _fails_stream(self, output: RequestOutput) -> bool:
        """A refused first start fails the whole RPC while nothing was sent and no other came, for the client's own
        retry policy."""
        failure = output.failure
        if failure is None or self.sent_anything or output is not self._first or len(self.outputs) > 1:
            return False
        if self._is_for_all(failure):
            self.fail(failure)
            return True
        return False

    def _is_for_all(self, failure: Failure) -> bool:
        """Whether the RPC fails if its first request does so before anything was sent."""
        return failure.fails_first_start or not self._multiplexed

    def _check_held(self) -> None:
        """What is left after a collection is held by shut windows (or by the size of one message, which is less)."""
        if not self._ready and self.pending.total > self._limits.pending_bytes:
            self._fail_slow(f"{self.pending.total} bytes wait for acknowledgements")
