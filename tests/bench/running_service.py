"""A service in a process of its own, for benchmarks and clients from outside."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

READY_SECONDS = 120.0
STOP_SECONDS = 30.0
SERVICE = "octavo.v1.GenerationService"


@contextlib.contextmanager
def running_service(model: str, *flags: str) -> Iterator[str]:
    """Its address, when it is ready. Stopped by SIGTERM at the end; raises RuntimeError if it does not come up or
    down."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "service",
            "serve",
            "--model",
            model,
            "--port",
            str(port),
            "--metrics-port",
            "0",
            *flags,
        ],
        cwd=Path(__file__).resolve().parents[2],
        stdout=subprocess.DEVNULL,
    )
    try:
        _wait_until_serving(address)
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise RuntimeError("the service did not stop") from None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_serving(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for answer in stub.Watch(
            health_pb2.HealthCheckRequest(service=SERVICE), timeout=READY_SECONDS, wait_for_ready=True
        ):
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
    raise RuntimeError(f"no service became ready at {address}")
