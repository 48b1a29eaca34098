"""What `python -m tests.bench` measures, by name. A section is imported when its turn comes."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

Figures = dict[str, float]
Section = Callable[[], Figures]

CPU_SECTIONS = {
    "allocator": "tests.bench.allocator",
    "scheduling": "tests.bench.scheduling",
    "generation": "tests.bench.generation",
    "service": "tests.bench.service_path",
    "frontend": "tests.service.frontend_cost",
    "abuse": "tests.service.abuse",
    "shared prefix": "tests.bench.shared_prefix",
    "memory": "tests.bench.memory",
    "impossible job": "tests.bench.impossible_job_cpu",
}


def _cpu() -> dict[str, Section]:
    """Each a module with a `measure`."""
    import_module("service")  # finds the generated code of proto/
    return {name: lambda path=path: import_module(path).measure() for name, path in CPU_SECTIONS.items()}


def _gpu() -> dict[str, Section]:
    from tests.bench import gpu

    return gpu.sections()


def names(kind: str) -> list[str]:
    """kind: "cpu" or "gpu"."""
    return list(_sections(kind))


def measure(kind: str, name: str) -> Figures:
    return _sections(kind)[name]()


def _sections(kind: str) -> dict[str, Section]:
    return _cpu() if kind == "cpu" else _gpu()
