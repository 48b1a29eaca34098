"""The machine and the software that a result is of."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import psutil  # type: ignore[import-untyped]

from loadtest.records import Fingerprint, Gpu

PACKAGES = ("grpcio", "protobuf", "torch", "numpy", "locust", "msgspec", "uvloop")
COPY_BYTES = 64 << 20  # a thread; well beyond caches
COPIES = 5
GPU_FIELDS = "name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit"


def fingerprint() -> Fingerprint:
    """Takes about a second, most of it for the memory's bandwidth."""
    return Fingerprint(
        cpu=cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory=int(psutil.virtual_memory().total),
        memory_bandwidth=memory_bandwidth(),
        kernel=platform.release(),
        python=platform.python_version(),
        versions={name: found for name in PACKAGES if (found := _version(name)) is not None},
        commit=commit(),
        load_average=os.getloadavg()[0],
        gpus=gpus(),
    )


def memory_bandwidth() -> float:
    """Bytes/s, read and written, of the best of a few copies on all cores at once."""
    cores = len(os.sched_getaffinity(0))
    pairs = [(np.ones(COPY_BYTES, np.uint8), np.empty(COPY_BYTES, np.uint8)) for _ in range(cores)]
    best = 0.0
    for _ in range(COPIES):
        threads = [threading.Thread(target=np.copyto, args=(target, source)) for source, target in pairs]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = max(best, 2 * COPY_BYTES * cores / (time.perf_counter() - begin))
    return best


def commit() -> str:
    """With `+changes` if the tree differs from it; "unknown" outside a repository."""
    root = Path(__file__).resolve().parent.parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False).stdout.strip()

    if shutil.which("git") is None or not (name := git("rev-parse", "--short", "HEAD")):
        return "unknown"
    return name + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def gpus() -> list[Gpu]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader,nounits"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return [_gpu(line) for line in answer.stdout.splitlines()] if answer.returncode == 0 else []


def _gpu(line: str) -> Gpu:
    name, driver, memory, sm, memory_clock, power = (field.strip() for field in line.split(","))
    return Gpu(
        name=name,
        driver=driver,
        memory=int(float(memory)) << 20,
        max_sm_clock=int(float(sm)),
        max_memory_clock=int(float(memory_clock)),
        power_limit=float(power),
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
