"""`python -m tests.loadtest.known_server BEHAVIOUR`: a gRPC server of known behaviour, for testing the instrument.

BEHAVIOUR is JSON of `Behaviour`. Every delta's text is `@SECONDS `, the server's monotonic clock when it was made.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import grpc
import msgspec
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from grpc_status import rpc_status

import loadtest  # noqa: F401  # puts proto/ on the path
from octavo.v1 import generation_pb2, generation_pb2_grpc


class Behaviour(msgspec.Struct, frozen=True, kw_only=True):
    """mode "pace": each request gets `tokens_per_period` tokens every `period` seconds. "queue": a single token after a
    first-come-first-served queue with `servers` servers of mean service time `mean`, exponential or not. "step":
    continuous batching; a step takes `base + each * n` seconds for n of at most `seats` running requests, and more than
    `queue` waiting ones are refused. In each, the whole process stands still for `freeze` seconds, `freeze_after`
    seconds after its first request."""

    mode: str
    period: float = 0.02
    tokens_per_period: int = 1
    servers: int = 1
    mean: float = 0.01
    exponential: bool = False
    seed: int = 1
    base: float = 0.02
    each: float = 0.0
    seats: int = 16
    queue: int = 1_000_000
    freeze_after: float | None = None
    freeze: float = 0.0


class Request:
    """One live request: what it has left, and where its events go."""

    def __init__(self, start: generation_pb2.StartGeneration) -> None:
        self.id = start.request_id or "r"
        self.prompt = len(start.token_ids.ids)
        self.total = self.left = start.stop.max_tokens or 1
        self.sequence = 0
        self.events: deque[generation_pb2.GenerationEvent] = deque()
        self.ready = asyncio.Event()
        self.ended = False
        self.refused = False
        self._put(generation_pb2.GenerationEvent(admitted=generation_pb2.Admitted(prompt_tokens=self.prompt)))

    def give(self, tokens: int) -> None:
        tokens = min(tokens, self.left)
        delta = generation_pb2.CandidateDelta(
            token_offset=self.total - self.left, token_count=tokens, text=f"@{time.monotonic():.6f} "
        )
        self.left -= tokens
        self._put(generation_pb2.GenerationEvent(delta=delta))
        if not self.left:
            usage = generation_pb2.Usage(prompt_tokens=self.prompt, completion_tokens=self.total)
            self._put(generation_pb2.GenerationEvent(finished=generation_pb2.RequestFinished(usage=usage)))
            self.ended = True

    def _put(self, event: generation_pb2.GenerationEvent) -> None:
        event.request_id, event.sequence = self.id, self.sequence
        self.sequence += 1
        self.events.append(event)
        self.ready.set()


class KnownServer(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self._free = [0.0] * behaviour.servers
        self._random = random.Random(behaviour.seed)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._woken = asyncio.Event()
        self._frozen = behaviour.freeze_after is None
        self._stepper = asyncio.create_task(self._step_loop()) if behaviour.mode == "step" else None
        self._tasks: set[asyncio.Task[None]] = set()

    # --- RPCs -------------------------------------------------------------------------------------------------------

    async def GenerateStream(  # type: ignore[override]
        self, request: generation_pb2.GenerateStreamRequest, context: Any
    ) -> AsyncIterator[generation_pb2.GenerateStreamResponse]:
        live = self._begin(request.start)
        if live.refused:
            await context.abort_with_status(rpc_status.to_status(refusal()))
        try:
            while not live.ended or live.events:
                await live.ready.wait()
                live.ready.clear()
                events = list(live.events)
                live.events.clear()
                if events:
                    yield generation_pb2.GenerateStreamResponse(events=events)
        finally:
            self._forget(live)

    async def Generate(  # type: ignore[override]
        self, request_iterator: AsyncIterator[generation_pb2.GenerateRequest], context: Any
    ) -> None:
        lives: dict[str, Request] = {}
        woken = asyncio.Event()
        reader = asyncio.create_task(self._read(request_iterator, lives, woken))
        try:
            while not (reader.done() and not lives):
                await woken.wait()
                woken.clear()
                batch = generation_pb2.GenerateResponse()
                for live in list(lives.values()):
                    batch.events.extend(live.events)
                    live.events.clear()
                    if live.ended:
                        del lives[live.id]
                if batch.events:
                    await context.write(batch)
        finally:
            reader.cancel()
            for live in lives.values():
                self._forget(live)

    async def _read(
        self,
        requests: AsyncIterator[generation_pb2.GenerateRequest],
        lives: dict[str, Request],
        woken: asyncio.Event,
    ) -> None:
        async for request in requests:
            if request.HasField("start"):
                live = self._begin(request.start, woken)
                if live.refused:
                    failed = generation_pb2.RequestFailed(status=refusal())
                    live.events.clear()
                    live.events.append(generation_pb2.GenerationEvent(request_id=live.id, failed=failed))
                    live.ended = True
                lives[live.id] = live
            elif request.HasField("cancel") and (cancelled := lives.pop(request.cancel.request_id, None)):
                self._forget(cancelled)
            woken.set()
        woken.set()

    # --- behaviour --------------------------------------------------------------------------------------------------

    def _begin(self, start: generation_pb2.StartGeneration, woken: asyncio.Event | None = None) -> Request:
        self._maybe_freeze()
        live = Request(start)
        if woken is not None:
            live.ready = woken
        mode = self.behaviour.mode
        if mode == "queue":
            asyncio.get_running_loop().call_at(self._service_end(), live.give, live.left)
        elif mode == "pace":
            self._spawn(self._pace(live))
        elif len(self._waiting) >= self.behaviour.queue:
            live.refused = True
        else:
            self._waiting.append(live)
            self._woken.set()
        return live

    def _maybe_freeze(self) -> None:
        if not self._frozen:
            self._frozen = True
            asyncio.get_running_loop().call_later(self.behaviour.freeze_after or 0.0, time.sleep, self.behaviour.freeze)

    def _service_end(self) -> float:
        mean = self.behaviour.mean
        took = self._random.expovariate(1 / mean) if self.behaviour.exponential else mean
        end = max(time.monotonic(), heapq.heappop(self._free)) + took
        heapq.heappush(self._free, end)
        return end

    async def _pace(self, live: Request) -> None:
        at = time.monotonic()
        while live.left:
            at += self.behaviour.period
            await asyncio.sleep(at - time.monotonic())
            live.give(self.behaviour.tokens_per_period)

    async def _step_loop(self) -> None:
        behaviour = self.behaviour
        at = time.monotonic()
        while True:
            while self._waiting and len(self._running) < behaviour.seats:
                self._running.append(self._waiting.popleft())
            if not self._running:
                self._woken.clear()
                await self._woken.wait()
                at = time.monotonic()
                continue
            at += behaviour.base + behaviour.each * len(self._running)  # no drift: the capacity is exact
            await asyncio.sleep(at - time.monotonic())
            for live in self._running:
                live.give(1)
            self._running = [live for live in self._running if live.left]

    def _forget(self, live: Request) -> None:
        live.left = 0
        if live in self._waiting:
            self._waiting.remove(live)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def refusal() -> status_pb2.Status:
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="octavo.v1"))
    return status_pb2.Status(code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message="full", details=[detail])


async def serve(behaviour: Behaviour) -> None:
    server = aio.server(options=[("grpc.so_reuseport", 0)])
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(KnownServer(behaviour), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    print(f"octavo ready on 127.0.0.1:{port}: known behaviour", flush=True)
    await stop.wait()
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(serve(msgspec.json.decode(sys.argv[1], type=Behaviour)))
