"""`python -m loadtest compare`: two results as a table, a page and charts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from rich.table import Table

from loadtest.bootstrap import DRAWS
from loadtest.compare import (
    BELOW_KNEE,
    CONFIDENCE,
    FIGURES,
    KNEE_MARGIN,
    MARGIN,
    NEAR,
    Change,
    Comparison,
    Finding,
    compare,
)
from loadtest.headline import Tile
from loadtest.page.render import render
from loadtest.plots.comparison import figures
from loadtest.quantity import NONE, by_format, interval, moment, number, seconds, share
from loadtest.reading import Reading
from loadtest.report import write_plots
from loadtest.result import Result

TONES = {Finding.FASTER: "good", Finding.SLOWER: "bad", Finding.SAME: "", Finding.CANNOT_TELL: "none"}
STYLES = {Finding.FASTER: "green", Finding.SLOWER: "red", Finding.SAME: "", Finding.CANNOT_TELL: "yellow"}


def write_comparison(first: Path, second: Path, out: Path, seed: int = 1) -> tuple[Comparison, Path]:
    """Writes `plots/` and `report.html` into `out`. Raises ResultError, CompareError."""
    comparison = compare(Reading(Result.open(first)), Reading(Result.open(second)), seed)
    out.mkdir(parents=True, exist_ok=True)
    write_plots(out / "plots", figures(comparison))
    page = out / "report.html"
    page.write_text(page_of(comparison), encoding="utf-8")
    return comparison, page


def sentence(comparison: Comparison) -> str:
    if comparison.finding is Finding.CANNOT_TELL:
        return f"It cannot be told whether they agree: {comparison.reason}."
    if comparison.finding is Finding.SAME:
        return f"The second agrees with the first {comparison.reason}."
    return f"The second differs: it is {comparison.finding} than the first {comparison.reason}."


def table(comparison: Comparison) -> Table:
    """For a terminal: over all levels."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("figure", "as measured", "second as fast as first", "interval", "finding"):
        made.add_column(name, justify="left" if name in ("figure", "finding") else "right", no_wrap=True)
    for change in comparison.overall:
        made.add_row(
            *(change.figure, _raw(change), _speed(change), _interval(change), str(change.finding)),
            style=STYLES[change.finding],
        )
    return made


def levels_line(comparison: Comparison) -> str:
    counts = Counter(change.finding for pair in comparison.pairs for change in pair.changes)
    found = ", ".join(f"{counts[finding]} {finding}" for finding in Finding if counts[finding])
    return f"{len(comparison.pairs)} pairs of levels, each by {len(FIGURES)} figures: {found}"


def page_of(comparison: Comparison) -> str:
    """The page's HTML."""
    made = figures(comparison)
    first, second = comparison.first, comparison.second
    count = len(comparison.unpaired)
    unpaired = [f"{count} levels have no partner of the same concurrency, rate or multiple, and are not compared."]
    context: dict[str, Any] = {
        "title": f"Octavo load test: {first.folder.name} and {second.folder.name}",
        "first_name": _name(first),
        "second_name": _name(second),
        "sentence": sentence(comparison),
        "sections": [
            {"id": anchor, "name": name}
            for anchor, name in (
                ("charts", "Charts"),
                ("figures-overall", "Over all levels"),
                ("levels", "Level by level"),
                ("method", "Method"),
            )
        ],
        "tiles": tiles(comparison),
        "alerts": [*comparison.cautions, *(unpaired if count else [])],
        "charts": made,
        "overall": [
            {
                "name": change.figure,
                "finding": str(change.finding),
                "raw": _raw(change),
                "speed": _speed(change),
                "interval": _interval(change),
            }
            for change in comparison.overall
        ],
        "names": [figure.name for figure in FIGURES],
        "pairs": [
            {
                "name": pair.name,
                "first": pair.first.level_class,
                "second": pair.second.level_class,
                "cells": [_cell(change) for change in pair.changes],
            }
            for pair in comparison.pairs
        ],
        "method": [*method(), *([f"Not compared: {'; '.join(comparison.unpaired)}."] if count else [])],
    }
    return render("compare.html", made, **context)


def tiles(comparison: Comparison) -> list[Tile]:
    first, second = comparison.first.summary, comparison.second.summary
    finding = Tile("The second is", str(comparison.finding), note=comparison.reason, tone=TONES[comparison.finding])
    knee = Tile("Knee", interval(second.knee, ""), "requests/s", f"the first: {interval(first.knee)}")
    goodput = Tile(
        "Best goodput",
        number(second.measures.get("best_goodput")),
        "requests/s",
        f"the first: {number(first.measures.get('best_goodput'))} requests/s",
    )
    alone = Tile(
        "First token, a request alone",
        seconds(second.measures.get("floor_ttft")),
        note=f"the first: {seconds(first.measures.get('floor_ttft'))}",
    )
    return [finding, knee, goodput, alone, machine_tile(comparison)]


def machine_tile(comparison: Comparison) -> Tile:
    correction = comparison.correction
    if correction.why:
        return Tile("The machine", "not corrected", note=correction.why, tone="none")
    one, other = (seconds(machine.seconds) for machine in correction.machines)
    note = f"in the second run, of the first: its reference took {one}, then {other} (means)"
    return Tile("The machine's speed", share(correction.ratio), note=note)


def machine_line(comparison: Comparison) -> str:
    made = machine_tile(comparison)
    return f"{made.name.lower()}: {made.value} {made.note}" if made.tone != "none" else f"not corrected: {made.note}"


def method() -> list[str]:
    return [
        "Levels are paired by concurrency; by offered rate, if they differ by less than "
        f"{share(NEAR)}; beyond the knee else by the multiple of each one's own knee.",
        f"Intervals: each level's window is cut into ten batches of time, which are drawn {DRAWS} times with "
        "replacement; so what is near in time stays together. Levels that had the same arrivals (the same seed) are "
        "drawn together. The intervals hold for what varies within a run. What differs between two runs of the same "
        "code on the same machine (heat, neighbours, memory layout) is not in them.",
        "The machine: where both runs took the reference (the same fixed work, twice a second), times are multiplied "
        "and rates divided by the machine's speed in their window, relative to its mean in the first run; the knee is "
        "one of rates so divided. An interval includes how well that speed is known. It does not include that the "
        "reference is not the service: a machine slower by 8 % for the one may be slower by 6 for the other, which "
        "the margin is for. An open loop has fewer requests in flight on a faster machine; nothing corrects that.",
        f"A pair's interval is one of {share(CONFIDENCE)}; those over all levels hold together with "
        f"{share(CONFIDENCE)} (Bonferroni).",
        f"Same: the interval lies within {share(MARGIN)} ({share(KNEE_MARGIN)} for the knee, which is an interval "
        "itself). Faster or slower: it leaves out 1, and its middle lies beyond that margin, which is for what differs "
        "between two runs of one thing. Else it cannot be told.",
        f"Over all levels, latencies count where both keep up below {share(BELOW_KNEE)} of either knee (else they are "
        "those of a queue), rates where neither does (else they are those of the load), and closed loops for both.",
        "The whole differs (is faster or slower) if a figure does and none says the opposite, and agrees only if "
        "median TTFT and TPOT, rates of completions and tokens, and the knee do. End-to-end latency follows the "
        "lengths of the outputs as well, and goodput beyond the knee jumps where the queue's wait passes the limit.",
    ]


def _cell(change: Change) -> dict[str, str]:
    figure = next(figure for figure in FIGURES if figure.name == change.figure)
    values = f"{by_format(change.first, figure.format)} → {by_format(change.second, figure.format)}"
    words = _speed(change) if change.speed is not None else str(change.finding)
    if change.raw is not None and _raw(change) != words:
        words += f" (measured {_raw(change)})"
    return {
        "slug": str(change.finding).replace(" ", "-"),
        "told": values,
        "words": words,
        "interval": _interval(change) if change.speed is not None else "",
    }


def _speed(change: Change) -> str:
    return NONE if change.speed is None else share(change.speed)


def _raw(change: Change) -> str:
    return NONE if change.raw is None else share(change.raw)


def _interval(change: Change) -> str:
    return NONE if change.low is None else f"{number(change.low * 100)} to {share(change.high)}"


def _name(reading: Reading) -> str:
    run = reading.run
    return f"{reading.folder.name} ({run.fingerprint.commit[:9]}, {moment(run.created)})"
