"""The client processes of a run, as one."""

from __future__ import annotations

import asyncio
import multiprocessing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec

from loadtest.orders import Abort, Connected, Entry, Order, Played, Quit, Setup
from loadtest.player import main

END_SECONDS = 10.0
incoming = msgspec.msgpack.Decoder(Connected | Played)


class FleetError(Exception):
    """A client process is not there, or does not answer; the message says which."""


@dataclass
class Member:
    process: BaseProcess
    pipe: Connection

    def send(self, message: Order | Abort | Quit) -> None:
        self.pipe.send_bytes(msgspec.msgpack.encode(message))

    async def receive(self) -> Connected | Played:
        try:
            answer: Connected | Played = incoming.decode(await asyncio.to_thread(self.pipe.recv_bytes))
        except (EOFError, OSError):
            raise FleetError(f"client process {self.process.name} ended") from None
        return answer


class Fleet:
    """`async with Fleet(setups) as fleet`: spawned, connected, ended whatever happens."""

    def __init__(self, setups: list[Setup]) -> None:
        self._setups = setups
        self._members: list[Member] = []

    @property
    def pids(self) -> list[int]:
        return [member.process.pid for member in self._members if member.process.pid is not None]

    async def __aenter__(self) -> Fleet:
        context = multiprocessing.get_context("spawn")
        for setup in self._setups:
            ours, theirs = context.Pipe()
            process = context.Process(target=main, args=(theirs, setup), name=f"client-{setup.client}", daemon=True)
            process.start()
            theirs.close()
            self._members.append(Member(process, ours))
        try:
            for member in self._members:
                connected = await member.receive()
                if isinstance(connected, Connected) and connected.problem:
                    raise FleetError(connected.problem)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._end()

    async def play(self, order: Order) -> list[Played]:
        """Deals the entries, the cap and the users to the processes in turn. Cancelled, it cuts the level off and
        raises `Interrupted` with what there was."""
        playing = asyncio.gather(*(self._one(member, part) for member, part in self._parts(order)))
        try:
            return await asyncio.shield(playing)
        except asyncio.CancelledError:
            for member in self._members:
                member.send(Abort())
            raise Interrupted(await playing) from None

    def _parts(self, order: Order) -> list[tuple[Member, Order]]:
        count = len(self._members)
        parts = []
        for index, member in enumerate(self._members):
            users = None if order.concurrency is None else _share(order.concurrency, index, count)
            if users == 0:
                continue
            part = msgspec.structs.replace(
                order, entries=order.entries[index::count], cap=-(-order.cap // count), concurrency=users
            )
            parts.append((member, part))
        return parts

    async def _one(self, member: Member, order: Order) -> Played:
        member.send(order)
        answer = await member.receive()
        if not isinstance(answer, Played):
            raise FleetError(f"client process {member.process.name} answered {answer}")
        return answer

    async def _end(self) -> None:
        for member in self._members:
            try:
                member.send(Quit())
            except (OSError, ValueError):
                continue
        for member in self._members:
            await asyncio.to_thread(member.process.join, END_SECONDS)
            if member.process.is_alive():
                member.process.kill()
                await asyncio.to_thread(member.process.join)
            member.pipe.close()


class Interrupted(Exception):
    """A level that was cut off; `played` is what there was of it."""

    def __init__(self, played: list[Played]) -> None:
        super().__init__("interrupted")
        self.played = played


def _share(whole: int, index: int, count: int) -> int:
    return whole // count + (index < whole % count)


def entries_of(arrivals: list[Any], begin: float) -> list[Entry]:
    """A schedule as entries, its times from `begin` on."""
    return [Entry(index=index, at=begin + arrival.at, arrival=arrival) for index, arrival in enumerate(arrivals)]
