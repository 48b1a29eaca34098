"""What happens to the service and its machine while it is under load: a row a second."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import shutil
import time
import urllib.request
from typing import Any

import grpc
import psutil  # type: ignore[import-untyped]
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from loadtest.records import GpuSample, TelemetryRow

PERIOD = 1.0
PATIENCE = 0.8  # for a scrape or a health check
PREFIX = "octavo_"
READINESS = "octavo.v1.GenerationService"
GPU_FIELDS = "temperature.gpu,power.draw,clocks.sm,clocks.mem,utilization.gpu,clocks_event_reasons.active"


class ProcessTree:
    """CPU and memory of a process and its children."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)

    def processes(self) -> list[psutil.Process]:
        try:
            return [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def cpu_seconds(self) -> float:
        """Of those that live, with what their ended children used."""
        return sum(self.cpu_by_process().values())

    def cpu_by_process(self) -> dict[int, float]:
        found = {}
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                found[process.pid] = float(times.user + times.system)
        return found

    def children_cpu_seconds(self) -> float:
        return sum(seconds for pid, seconds in self.cpu_by_process().items() if pid != self._root.pid)

    def pss(self) -> int:
        """Bytes; memory that processes share counts once."""
        total = 0
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += int(process.memory_full_info().pss)
        return total


class Telemetry:
    """`async with Telemetry(...) as telemetry`, then `rows` is filled until the block ends. Readings that fail are
    left out of their row and do not stop the rest."""

    def __init__(
        self, level: int, origin: float, address: str, metrics_url: str | None = None, pid: int | None = None
    ) -> None:
        self.rows: list[TelemetryRow] = []
        self._level = level
        self._origin = origin
        self._address = address
        self._url = metrics_url
        self._tree = ProcessTree(pid) if pid is not None and psutil.pid_exists(pid) else None
        self._has_gpu = shutil.which("nvidia-smi") is not None

    async def __aenter__(self) -> Telemetry:
        self._channel = aio.insecure_channel(self._address, [("grpc.use_local_subchannel_pool", 1)])
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close(None)

    async def _watch(self) -> None:
        psutil.cpu_percent()  # from here on
        used, then, below = self._cpu(), time.monotonic(), self._children_cpu()
        while True:
            await asyncio.sleep(PERIOD - (time.monotonic() - then) % PERIOD)
            metrics, healthy, gpus = await asyncio.gather(self._scrape(), self._health(), self._gpus())
            now, cpu, engine = time.monotonic(), self._cpu(), self._children_cpu()
            self.rows.append(
                TelemetryRow(
                    at=round(now - self._origin, 4),
                    level=self._level,
                    metrics=metrics,
                    server_cpu=None if cpu is None or used is None else round((cpu - used) / (now - then), 4),
                    engine_cpu=None if engine is None or below is None else round((engine - below) / (now - then), 4),
                    server_pss=None if self._tree is None else self._tree.pss(),
                    machine_cpu=round(psutil.cpu_percent() * (psutil.cpu_count() or 1) / 100, 3),
                    healthy=healthy,
                    gpus=gpus,
                )
            )
            used, then, below = cpu, now, engine

    def _cpu(self) -> float | None:
        return None if self._tree is None else self._tree.cpu_seconds()

    def _children_cpu(self) -> float | None:
        return None if self._tree is None else self._tree.children_cpu_seconds()

    async def _scrape(self) -> dict[str, float]:
        return {} if self._url is None else await asyncio.to_thread(scrape, self._url)

    async def _health(self) -> bool | None:
        return await ready(self._channel)

    async def _gpus(self) -> list[GpuSample]:
        return await gpu_samples() if self._has_gpu else []


def scrape(url: str, patience: float = PATIENCE) -> dict[str, float]:
    """The service's metrics without its prefix and without histogram buckets; empty if what answers, if anything does,
    is no such page."""
    try:
        with urllib.request.urlopen(url, timeout=patience) as response:
            families = list(text_string_to_metric_families(response.read().decode()))
    except (OSError, http.client.HTTPException, ValueError):
        return {}
    found = {}
    for family in families:
        for sample in family.samples:
            name = sample.name.removeprefix(PREFIX)
            if not name.endswith(("_bucket", "_created")) and family.type != "info":
                labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
                found[f"{name}{{{labels}}}" if labels else name] = float(sample.value)
    return found


async def ready(channel: aio.Channel) -> bool | None:
    """Whether readiness says SERVING; False if nothing answers in time."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=READINESS), timeout=PATIENCE)
    except aio.AioRpcError as error:
        return None if error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND) else False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def gpu_samples() -> list[GpuSample]:
    """Of all GPUs, as nvidia-smi tells them; empty if it does not answer."""
    process = await asyncio.create_subprocess_exec(
        *("nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader,nounits"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), PATIENCE * 3)
    except TimeoutError:
        process.kill()
        await process.wait()
        return []
    return [sample for line in out.decode().splitlines() if (sample := gpu_sample(line)) is not None]


def gpu_sample(line: str) -> GpuSample | None:
    """A line of nvidia-smi; None where a figure is not supported."""
    fields = [field.strip() for field in line.split(",")]
    try:
        temperature, power, sm, memory, utilization = (float(field) for field in fields[:5])
        return GpuSample(
            temperature=temperature,
            power=power,
            sm_clock=sm,
            memory_clock=memory,
            utilization=utilization,
            throttle=int(fields[5], 16),
        )
    except (ValueError, IndexError):
        return None
