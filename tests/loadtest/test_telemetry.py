"""What is seen of the service and its machine while it is under load."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import psutil
import pytest
from grpc import aio

from loadtest.fingerprint import fingerprint
from loadtest.records import GpuSample, TelemetryRow
from loadtest.target import PROBE_SECONDS, describe, until_recovered, vocabulary
from loadtest.telemetry import ProcessTree, Telemetry, gpu_sample, ready, scrape
from loadtest.thermal import ThermalGate
from service.config import ServiceConfig
from tests.loadtest.known_server import Behaviour
from tests.loadtest.playing import IDS, known_service
from tests.service.server import WAIT_SECONDS, free_port, running, until

HEAT = 0x40


async def test_a_row_a_second_of_a_service() -> None:
    port = free_port()
    async with running(config=ServiceConfig(drain_grace=0.0, metrics_port=port)) as served:
        address = served.server.address
        origin = time.monotonic()
        url = f"http://127.0.0.1:{port}/metrics"
        async with Telemetry(3, origin, address, url, psutil.Process().pid) as telemetry:
            await until(lambda: len(telemetry.rows) > 0)
        assert 1.0 <= telemetry.rows[0].at < 1.0 + WAIT_SECONDS
        row = telemetry.rows[-1]
        assert row.level == 3
        assert row.healthy
        assert row.metrics["requests_running"] == 0.0
        assert row.metrics["steps_total"] >= 0.0
        assert not any("bucket" in name for name in row.metrics)
        assert row.server_pss is not None
        assert row.server_pss > 10_000_000
        assert row.server_cpu is not None


async def test_what_fails_is_left_out() -> None:
    assert scrape("http://127.0.0.1:9/metrics") == {}
    assert scrape("data:,no metrics") == {}
    async with known_service(Behaviour(mode="step")) as service:
        assert await asyncio.to_thread(scrape, f"http://{service.address}/metrics") == {}  # gRPC's port
    async with aio.insecure_channel("127.0.0.1:9") as channel:
        assert await ready(channel) is False


async def test_a_service_says_what_it_is() -> None:
    async with running() as served:
        target = await describe(served.server.address, ["python"])
        assert (target.model, target.max_context_tokens, target.max_running_requests) == ("fake", 256, 64)
        assert target.command == ["python"]
        ids = await vocabulary(served.server.address)
        assert set(ids) <= set(range(256))
        assert len(ids) > 10


async def test_recovery_is_when_a_probe_is_as_fast_as_before() -> None:
    async with known_service(Behaviour(mode="queue", mean=0.05)) as service:
        since = time.monotonic()
        took = await until_recovered(service.address, IDS[:4], 0.5, since, since + 5.0)
        assert took is not None
        assert 0.05 <= took < 5.0 + PROBE_SECONDS
        assert await until_recovered(service.address, IDS[:4], 0.001, since, time.monotonic() + 0.3) is None


def test_a_process_tree() -> None:
    tree = ProcessTree(psutil.Process().pid)
    assert tree.cpu_seconds() > 0.0
    assert 0.0 <= tree.children_cpu_seconds() < tree.cpu_seconds()


def test_lines_of_nvidia_smi() -> None:
    sample = gpu_sample("45, 512.31, 1980, 2619, 97, 0x0000000000000004")
    assert sample == GpuSample(
        temperature=45.0, power=512.31, sm_clock=1980.0, memory_clock=2619.0, utilization=97.0, throttle=4
    )
    assert gpu_sample("45, [N/A], 1980, 2619, 97, 0x0") is None


def gpu(temperature: float, throttle: int = 0) -> GpuSample:
    return GpuSample(
        temperature=temperature, power=1.0, sm_clock=1.0, memory_clock=1.0, utilization=1.0, throttle=throttle
    )


async def test_the_next_level_waits_until_a_hot_gpu_is_cool() -> None:
    coming = [[gpu(80.0, HEAT)], [gpu(60.0)], [gpu(44.0)]]
    reads = 0

    async def read() -> list[GpuSample]:
        nonlocal reads
        reads += 1
        return coming[reads - 1]

    gate = ThermalGate(read, period=0.01)
    gate.note([TelemetryRow(at=0.0, level=0, gpus=[gpu(40.0)]), TelemetryRow(at=1.0, level=0, gpus=[gpu(85.0, HEAT)])])
    assert await gate.cool() < 5.0
    assert reads == 3
    await gate.cool()
    assert reads == 3  # cool already


async def test_a_gpu_that_is_only_busy_waits_for_nobody() -> None:
    async def read() -> list[GpuSample]:
        raise AssertionError("not hot")

    gate = ThermalGate(read)
    gate.note([TelemetryRow(at=0.0, level=0, gpus=[gpu(85.0, 0x4)]), TelemetryRow(at=1.0, level=0)])
    assert await gate.cool() < 1.0


def test_a_fingerprint_says_which_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.fingerprint.COPY_BYTES", 1 << 20)
    found = fingerprint()
    assert found.cores >= 1
    assert found.memory_bandwidth > 1e8
    assert found.versions["grpcio"]
    assert found.commit
    assert Path("/proc/cpuinfo").exists()
