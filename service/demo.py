"""`octavo demo`: a service of the embedded model as a process of its own, one streamed answer, and a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time

from rich.console import Console

from octavo.v1 import generation_pb2
from service.client import Client, GenerationError, chat_request
from service.terminal import capacity_table, show_generation

QUESTION = "What is the capital of France, and what is it famous for?"
READY = re.compile(r"octavo ready on (\S+?): ")
START_SECONDS = 180.0
STOP_SECONDS = 30.0


class DemoError(Exception):
    """The demo did not go as it should; the message says where. exit_code: for the command."""

    def __init__(self, problem: str, exit_code: int = 1) -> None:
        super().__init__(problem)
        self.exit_code = exit_code


async def run_demo(model: str, question: str, max_tokens: int, console: Console) -> int:
    """Returns the exit code: 0 only if every step went well and the service ended by itself with 0."""
    started = time.monotonic()

    def step(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - started:5.1f} s[/dim]  {text}", highlight=False, soft_wrap=True)

    step(f"starting the service with model {model} on loopback")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "service", "serve", "--model", model, "--port", "0"),
        *("--metrics-port", "0", "--log-level", "warning"),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        address = await _ready_address(process)
        step(f"ready on {address}; streaming one answer through the bidirectional RPC")
        await _ask(address, question, max_tokens, console)
        step("sending SIGTERM: the service drains and stops")
        process.send_signal(signal.SIGTERM)
        code = await asyncio.wait_for(process.wait(), STOP_SECONDS)
        if code != 0:
            raise DemoError(f"the service ended with exit code {code}")
        step("the service ended with exit code 0")
    except (DemoError, GenerationError, TimeoutError) as error:
        console.print(f"demo failed: {str(error) or 'out of time'}", style="red", markup=False)
        return error.exit_code if isinstance(error, DemoError) else 1
    finally:
        with contextlib.suppress(ProcessLookupError):
            if process.returncode is None:
                process.kill()
                await process.wait()
    return 0


async def _ready_address(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(START_SECONDS):
        while line := (await process.stdout.readline()).decode():
            if match := READY.match(line):
                return match[1]
        code = await process.wait()
        raise DemoError(f"the service ended with exit code {code} before it was ready", max(code, 1))


async def _ask(address: str, question: str, max_tokens: int, console: Console) -> None:
    console.print(f"\n[bold]> {question}[/bold]", highlight=False)
    async with Client(address) as client:
        greedy = generation_pb2.SamplingParameters(temperature=0.0)
        start = chat_request([("user", question)], max_tokens=max_tokens, sampling=greedy)
        figures = await show_generation(client.generate(start), console)
        if not figures.tokens:
            raise DemoError("the answer is empty")
        console.print()
        console.print(capacity_table(await client.capacity()))
