"""What the command line shows: a generation as it streams, its figures, and the capacity snapshot."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from google.protobuf import json_format
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from octavo.v1 import capacity_pb2, generation_pb2
from service.client import GenerationError


@dataclass
class Figures:
    """What a client measured of one generation. Times in `time.monotonic()` seconds."""

    started: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    last_token: float | None = None
    tokens: int = 0
    first_tokens: int = 0
    finish: str = ""
    usage: generation_pb2.Usage = field(default_factory=generation_pb2.Usage)

    def on_delta(self, delta: generation_pb2.CandidateDelta) -> None:
        now = time.monotonic()
        if delta.token_count:
            if self.first_token is None:
                self.first_token, self.first_tokens = now, delta.token_count
            self.last_token = now
            self.tokens += delta.token_count
        if delta.HasField("finish"):
            name = generation_pb2.FinishReason.Name(delta.finish.reason)
            self.finish = name.removeprefix("FINISH_REASON_").lower()

    @property
    def time_to_first_token(self) -> float:
        return (self.first_token or self.started) - self.started

    @property
    def tokens_per_second(self) -> float | None:
        """Decode speed, without the prompt's time: tokens after those that came first, by the time they took. None
        unless tokens came at two times at least."""
        if self.first_token is None or self.last_token is None or self.last_token == self.first_token:
            return None
        return (self.tokens - self.first_tokens) / (self.last_token - self.first_token)

    def line(self) -> str:
        rate = "" if self.tokens_per_second is None else f"{self.tokens_per_second:.1f} tokens/s · "
        return (
            f"TTFT {self.time_to_first_token * 1e3:.0f} ms · {rate}"
            f"finish: {self.finish} · {self.usage.prompt_tokens} prompt + {self.usage.completion_tokens} output tokens"
        )

    def as_json(self, text: str) -> str:
        return json.dumps(
            {
                "text": text,
                "finish_reason": self.finish,
                "time_to_first_token_seconds": round(self.time_to_first_token, 6),
                "tokens_per_second": None if self.tokens_per_second is None else round(self.tokens_per_second, 3),
                "prompt_tokens": self.usage.prompt_tokens,
                "completion_tokens": self.usage.completion_tokens,
            },
            ensure_ascii=False,
        )


class WaitNotice:
    """Tells on standard error that a request waits for the engine: on a terminal until `end`, elsewhere in a line."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._status: Status | None = None
        self._told = ""

    def tell(self, error: GenerationError) -> None:
        if error.message == self._told:
            return
        self.end()
        self._told = error.message
        text = f"octavo: waiting for the engine: {error.message}"
        if self._console.is_terminal:
            self._status = self._console.status(escape(text))
            self._status.start()
        else:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def end(self) -> None:
        if self._status is not None:
            self._status.stop()


async def show_generation(
    events: AsyncGenerator[generation_pb2.GenerationEvent, None],
    console: Console,
    *,
    as_json: bool = False,
    on_event: Callable[[], None] = lambda: None,
) -> Figures:
    """Prints text as it comes and the figures under it, or one JSON object at the end. on_event: called before."""
    figures, texts = Figures(), []
    async with aclosing(events):  # also where the terminal is gone
        async for event in events:
            on_event()
            if event.HasField("delta"):
                figures.on_delta(event.delta)
                texts.append(event.delta.text)
                if not as_json:
                    console.print(event.delta.text, end="", markup=False, highlight=False, soft_wrap=True)
            elif event.HasField("finished"):
                figures.usage = event.finished.usage
    if as_json:
        console.print(figures.as_json("".join(texts)), markup=False, highlight=False, soft_wrap=True)
    else:
        console.print(f"\n[dim]{escape(figures.line())}[/dim]", highlight=False, soft_wrap=True)
    return figures


def capacity_table(capacity: capacity_pb2.Capacity) -> Table:
    limits, load = capacity.limits, capacity.load
    state = capacity_pb2.ReplicaState.Name(capacity.state).removeprefix("REPLICA_STATE_").lower()
    table = Table(title=f"{capacity.model}: {state}, {'accepting' if capacity.accepting else 'refusing'}")
    table.add_column("")
    table.add_column("now", justify="right")
    table.add_column("limit", justify="right")
    used = limits.kv_total_blocks - load.kv_free_blocks - load.kv_evictable_blocks
    for name, now, limit in (
        ("running requests", load.running_requests, limits.max_running_requests),
        ("queued requests", load.queued_requests, limits.max_queued_requests),
        ("queued prompt tokens", load.queued_uncached_tokens, limits.max_queued_prompt_tokens),
        (f"KV blocks of {limits.kv_block_tokens} tokens", used, limits.kv_total_blocks),
        ("context tokens", "", limits.max_context_tokens),
    ):
        table.add_row(name, str(now), str(limit))
    table.add_row("prefill tokens/s", f"{load.prefill_tokens_per_second:.0f}", "")
    table.add_row("decode tokens/s", f"{load.decode_tokens_per_second:.0f}", "")
    return table


def capacity_line(capacity: capacity_pb2.Capacity) -> str:
    load = capacity.load
    state = capacity_pb2.ReplicaState.Name(capacity.state).removeprefix("REPLICA_STATE_").lower()
    return (
        f"{capacity.observe_time.ToJsonString()} {state} running {load.running_requests} queued {load.queued_requests} "
        f"kv {load.kv_utilization:.1%} decode {load.decode_tokens_per_second:.0f} tok/s"
    )


def capacity_json(capacity: capacity_pb2.Capacity) -> str:
    fields = json_format.MessageToDict(
        capacity, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return json.dumps(fields)
