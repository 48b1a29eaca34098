"""Locust users that misbehave; those classes exist that --misbehave gives a weight."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
from typing import Any

import gevent
import grpc
from locust import task

from loadtest.ending import CHANNEL_OPTIONS
from loadtest.locust_clients import OctavoUser, given, stream_one
from octavo.v1 import generation_pb2, generation_pb2_grpc

VICTIM_REQUESTS = 8
BAD = {
    name: int(weight) for name, _, weight in (word.partition("=") for word in given("--misbehave").split(",") if word)
}

if "cancel" in BAD:

    class CancelUser(OctavoUser):
        """Goes away at a random token."""

        weight = BAD["cancel"]

        @task
        def generate(self) -> None:
            stream_one(self.clients, self.channel, self.track(), cancel_after=random.randint(1, 12))


if "deaf" in BAD:

    class DeafUser(OctavoUser):
        """Starts requests on a connection of its own and reads none of the answers."""

        weight = BAD["deaf"]

        @task
        def generate(self) -> None:
            with grpc.insecure_channel(self.clients.address, CHANNEL_OPTIONS) as channel:
                stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
                start = self.clients.builder.build(next(self.supply), "deaf")
                call = stub.GenerateStream(generation_pb2.GenerateStreamRequest(start=start))
                gevent.sleep(random.uniform(1.0, 5.0))
                call.cancel()


if "deadline" in BAD:

    class DeadlineUser(OctavoUser):
        """Asks for answers in milliseconds."""

        weight = BAD["deadline"]

        @task
        def generate(self) -> None:
            stream_one(self.clients, self.channel, self.track(), timeout=random.uniform(0.001, 0.05))


if "garbage" in BAD:

    class GarbageUser(OctavoUser):
        """Bytes that are no HTTP/2, and bytes that are no message."""

        weight = BAD["garbage"]

        @task
        def send(self) -> None:
            host, _, port = self.clients.address.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=5.0) as connection:
                connection.sendall(random.choice([b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"]))
                connection.sendall(random.randbytes(2000))
            garble = self.channel.unary_unary("/octavo.v1.GenerationService/GenerateUnary", None, None)
            try:
                garble(random.randbytes(200), timeout=5.0)
            except grpc.RpcError:
                gevent.sleep(0.05)


def suffer(user: OctavoUser, *, freeze: bool) -> None:
    """A client process of its own that is killed, frozen for a while before."""
    command = [sys.executable, "-m", "loadtest.victim", user.clients.address, str(VICTIM_REQUESTS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as victim:
        try:
            assert victim.stdout is not None
            victim.stdout.readline()
            gevent.sleep(random.uniform(0.1, 1.0))
            if freeze:
                victim.send_signal(signal.SIGSTOP)
                gevent.sleep(random.uniform(2.0, 5.0))
        finally:
            victim.kill()


if "frozen" in BAD:

    class FrozenUser(OctavoUser):
        """Its process is stopped while answers come."""

        weight = BAD["frozen"]

        @task
        def freeze(self) -> None:
            suffer(self, freeze=True)


if "killed" in BAD:

    class KilledUser(OctavoUser):
        """Its process is killed while answers come."""

        weight = BAD["killed"]

        @task
        def die(self) -> None:
            suffer(self, freeze=False)
