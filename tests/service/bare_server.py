"""`python -m tests.service.bare_server STREAMS STEP_SECONDS STEPS`: the least a grpc.aio server can do for a token.

Method `many` is for STREAMS calls at a time, each of which gets one constant message a step, the size of a token's;
`one` is for a single call, which gets one message a step, the size of all of theirs.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc
from grpc import aio

from service.serve import run

TOKEN_MESSAGE = b"\x0a\x1a" + bytes(26)


class BareServer:
    def __init__(self, streams: int, step_seconds: float, steps: int) -> None:
        self._streams = streams
        self._step_seconds = step_seconds
        self._steps = steps
        self._waiting: list[asyncio.Event] = []

    async def serve(self) -> None:
        server = aio.server()
        methods = {
            "one": grpc.unary_stream_rpc_method_handler(self._handler(TOKEN_MESSAGE * self._streams)),
            "many": grpc.unary_stream_rpc_method_handler(self._handler(TOKEN_MESSAGE)),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", methods),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        print(f"octavo ready on 127.0.0.1:{port}: nothing", flush=True)
        while True:
            await asyncio.sleep(self._step_seconds)
            for ready in self._waiting:
                ready.set()

    def _handler(self, message: bytes) -> Any:
        async def handle(request: bytes, context: Any) -> None:
            ready = asyncio.Event()
            self._waiting.append(ready)
            for _ in range(self._steps):
                await ready.wait()
                ready.clear()
                await context.write(message)
            self._waiting.remove(ready)

        return handle


if __name__ == "__main__":
    sys.exit(run(lambda: BareServer(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])).serve()))
