"""A service in a process of its own, for benchmarks and clients from outside."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

READY_SECONDS = 120.0
PROBE_SECONDS = 0.2
STOP_SECONDS = 30.0
SERVICE = "octavo.v1.GenerationService"


@contextlib.contextmanager
def running_service(model: str, *flags: str) -> Iterator[str]:
    """Its address, when it is ready. Stopped by SIGTERM at the end; raises RuntimeError, with the last lines of its
    log, if it does not come up or down."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    command = [sys.executable, "-m", "service", "serve", "--model", model, "--port", str(port), "--metrics-port", "0"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, *flags], cwd=Path(__file__).resolve().parents[2], stdout=subprocess.DEVNULL, stderr=log
        )
        try:
            _wait_until_serving(address, process, log)
            yield address
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                raise RuntimeError(f"the service did not stop; its log ends:\n{_tail(log)}") from None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_serving(address: str, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    end = time.monotonic() + READY_SECONDS
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < end and process.poll() is None:
            with contextlib.suppress(grpc.RpcError):
                answer = stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=1)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            time.sleep(PROBE_SECONDS)
    raise RuntimeError(f"no service became ready at {address}; its log ends:\n{_tail(log)}")


def _tail(log: IO[bytes], length: int = 2000) -> str:
    size = log.seek(0, 2)
    log.seek(max(0, size - length))
    return log.read().decode(errors="replace")
