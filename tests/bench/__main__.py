"""`python -m tests.bench cpu|gpu`: measures, prints a table, writes build/bench/{cpu,gpu}.json."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench import sections
from tests.bench.machine import commit, machine, today
from tests.bench.sections import Figures

OUT = Path(__file__).resolve().parents[2] / "build" / "bench"


def run(kind: str, only: list[str], save: Callable[[Figures], None]) -> Figures:
    """save: gets all figures so far behind each section, so that none is lost to a later one that fails."""
    names = sections.names(kind)
    unknown = set(only) - set(names)
    if unknown:
        raise SystemExit(f"no section {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    figures: Figures = {}
    console = Console(stderr=True)
    # Each in a process of its own: an engine holds most of a GPU until it is collected.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for name in names:
            if only and name not in only:
                continue
            console.print(f"==> {name}")
            figures |= pool.submit(sections.measure, kind, name).result()
            save(figures)
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
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{arguments.kind}.json"
    where = {"machine": machine(), "commit": commit(), "date": today()}

    def save(found: Figures) -> None:
        path.write_text(json.dumps({**where, **found}, indent=2) + "\n")

    show(run(arguments.kind, arguments.only, save))
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
