"""Plays one level of the real client against a server of known behaviour."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import msgspec

from loadtest.drive import LEAD, setups
from loadtest.fleet import Fleet, entries_of
from loadtest.launch import Service
from loadtest.measure import LevelRows
from loadtest.mix import SHORT, deal
from loadtest.orders import Entry, Order, Transport
from loadtest.records import ArrivalProcess, Level, Phase, RequestRow
from tests.loadtest.known_server import Behaviour

IDS = list(range(32, 96))


def known_service(behaviour: Behaviour) -> Service:
    return Service([msgspec.json.encode(behaviour).decode()], module="tests.loadtest.known_server")


async def play(
    behaviour: Behaviour,
    times: Sequence[float],
    seconds: float,
    *,
    clients: int = 1,
    transport: Transport = Transport.STREAM,
    tokens: tuple[int, int] = (1, 1),
    drain: float = 10.0,
    cap: int = 10_000,
    concurrency: int | None = None,
    stamps: bool = False,
    warm_up: float = 0.0,
    change: Callable[[Entry], Entry] = lambda entry: entry,
) -> LevelRows:
    """`times`: of arrivals, in seconds. The rows' window is all of it; what the clients say
    of themselves is of what comes after `warm_up`."""
    mix = {"short": replace(SHORT, output=tokens)}
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(known_service(behaviour))
        origin = time.monotonic()
        clients_of = setups(clients, service.address, IDS, 4096, origin, transport=transport, stamps=stamps)
        fleet = await stack.enter_async_context(Fleet(clients_of))
        begin = time.monotonic() + LEAD
        order = Order(
            level=0,
            entries=[change(entry) for entry in entries_of(deal(times, mix, 1), begin)],
            begin=begin,
            window_begin=begin + warm_up,
            stop=begin + seconds,
            cut=begin + seconds + drain,
            cap=cap,
            concurrency=concurrency,
        )
        played = await fleet.play(order)
    rows = sorted((row for part in played for row in part.rows), key=lambda row: row.index)
    level = level_of(round(begin - origin, 6), seconds, len(times) / seconds, concurrency)
    return LevelRows(msgspec.structs.replace(level, clients=[part.report for part in played]), rows)


def level_of(start: float, seconds: float, rate: float, concurrency: int | None = None, **more: Any) -> Level:
    return Level(
        index=0,
        phase=Phase.LADDER,
        group="rate:test",
        process=ArrivalProcess.POISSON,
        start=start,
        window_start=start,
        window_end=start + seconds,
        end=start + seconds,
        rate=None if concurrency else rate,
        concurrency=concurrency,
        **more,
    )


def waits(rows: Sequence[RequestRow]) -> list[float]:
    return [row.ttft for row in rows if row.ttft is not None]
