"""`python -m tests.bench cpu|gpu`: measures, prints a table, writes build/bench/{cpu,gpu}.json."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench.machine import commit, machine, today

Figures = dict[str, float]
Section = Callable[[], Figures]

OUT = Path(__file__).resolve().parents[2] / "build" / "bench"


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


def cpu_sections() -> dict[str, Section]:
    """Each a module with a `measure`, imported when its turn comes."""
    import_module("service")  # finds the generated code of proto/
    return {name: lambda path=path: import_module(path).measure() for name, path in CPU_SECTIONS.items()}


def gpu_sections() -> dict[str, Section]:
    from tests.bench import gpu

    return gpu.sections()


def run(kind: str, only: list[str]) -> Figures:
    sections = cpu_sections() if kind == "cpu" else gpu_sections()
    unknown = set(only) - set(sections)
    if unknown:
        raise SystemExit(f"no section {', '.join(sorted(unknown))}; there are {', '.join(sections)}")
    figures: Figures = {}
    console = Console(stderr=True)
    for name, section in sections.items():
        if only and name not in only:
            continue
        console.print(f"==> {name}")
        figures |= section()
    return figures


def show(figures: Figures) -> None:
    table = Table("figure", "value")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.4g}")
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("kind", choices=["cpu", "gpu"])
    parser.add_argument("--only", action="append", default=[], help="a section, several times for several")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    figures = run(arguments.kind, arguments.only)
    arguments.out.mkdir(parents=True, exist_ok=True)
    result = {"machine": machine(), "commit": commit(), "date": today(), **figures}
    path = arguments.out / f"{arguments.kind}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    show(figures)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
