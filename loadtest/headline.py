"""A result in one sentence and four figures."""

from __future__ import annotations

from dataclasses import dataclass, field

from loadtest.judgements import LevelClass, Verdict
from loadtest.quantity import interval, number, seconds, share
from loadtest.reading import Reading
from loadtest.records import RunKind

BAD = frozenset({LevelClass.COLLAPSING, LevelClass.HUNG, LevelClass.CRASHED, LevelClass.NOT_RECOVERED})
BUSY = 0.25  # of the cores, by the load average before the run


@dataclass(frozen=True)
class Tile:
    """`tone`: good, bad, none, or "" for neither."""

    name: str
    value: str
    unit: str = ""
    note: str = ""
    tone: str = ""


@dataclass(frozen=True)
class Headline:
    sentence: str
    tiles: list[Tile]
    alerts: list[str] = field(default_factory=list)


def headline(reading: Reading) -> Headline:
    sentences = {RunKind.MAP: _map_sentence, RunKind.FAULTS: _faults_sentence, RunKind.OVERHEAD: _overhead_sentence}
    tiles = {RunKind.MAP: _map_tiles, RunKind.FAULTS: _faults_tiles, RunKind.OVERHEAD: _overhead_tiles}
    kind = reading.run.kind
    return Headline(sentences[kind](reading), tiles[kind](reading), alerts(reading))


def alerts(reading: Reading) -> list[str]:
    """What a reader must know before any figure."""
    found = []
    if not reading.summary.complete:
        found.append("This run did not finish: what follows holds for the levels that were measured.")
    fingerprint = reading.run.fingerprint
    if fingerprint.load_average > BUSY * fingerprint.cores:
        found.append(
            f"The machine was not idle: its load average was {number(fingerprint.load_average)} on "
            f"{fingerprint.cores} cores in the minute before the run."
        )
    void = [verdict for verdict in reading.verdicts if verdict.level_class is LevelClass.VOID]
    if void:
        names = ", ".join(verdict.group for verdict in void)
        found.append(f"{_plural(len(void), 'group')} of levels count nowhere, since the measurement failed: {names}.")
    return found


# --- a map -----------------------------------------------------------------------------------------------------------


def _map_sentence(reading: Reading) -> str:
    knee, beyond, back = reading.summary.knee, _furthest(reading), reading.recovery
    if knee is None:
        return _no_knee(reading)
    parts = [f"Keeps up with {interval(knee)}"]
    if beyond is not None:
        kept = reading.summary.measures.get(f"goodput_share_at_{beyond.multiple:g}")
        parts.append(f"at {beyond.multiple:g} times that it {_behaviour(beyond, kept)}")
    if back is not None:
        known = back.measures.recovery
        parts.append("it did not recover" if known is None else f"it is back {seconds(known)} after an overload")
    return "; ".join(parts) + "."


def _no_knee(reading: Reading) -> str:
    if not reading.sweep:
        return "No knee: no open-loop level was measured."
    last = reading.sweep[-1]
    keeping = [verdict for verdict in reading.sweep if verdict.level_class is LevelClass.KEEPS_UP]
    if len(keeping) == len(reading.sweep):
        return f"Keeps up with every rate that was tried, up to {number(last.rate)} requests/s."
    return "No knee was bracketed by the levels that were measured."


def _furthest(reading: Reading) -> Verdict | None:
    beyond = [verdict for verdict in reading.sweep if verdict.multiple is not None]
    return max(beyond, key=lambda verdict: verdict.multiple or 0.0, default=None)


def _behaviour(verdict: Verdict, kept: float | None) -> str:
    words = {
        LevelClass.KEEPS_UP: "still keeps up",
        LevelClass.SATURATED_STABLE: "refuses what is too much",
        LevelClass.SATURATED_GROWING: "falls behind, later and later",
        LevelClass.COLLAPSING: "collapses",
        LevelClass.HUNG: "hangs",
        LevelClass.CRASHED: "crashes",
        LevelClass.CANNOT_TELL: "cannot be told to keep up or not",
    }
    found = words.get(verdict.level_class, str(verdict.level_class))
    return found if kept is None else f"{found} and holds {share(kept)} of its peak goodput"


def _map_tiles(reading: Reading) -> list[Tile]:
    return [_knee_tile(reading), _goodput_tile(reading), _beyond_tile(reading), _recovery_tile(reading)]


def _knee_tile(reading: Reading) -> Tile:
    knee = reading.summary.knee
    if knee is None:
        return Tile("Knee", "none found", note="no bracket between keeping up and not", tone="none")
    slo = f"; within the limits to {interval(reading.summary.slo)}" if reading.summary.slo else ""
    mean = reading.summary.mean_knee
    machine = f"; on average {interval(mean, '')}, 95 %, as windows differ by {share(mean.scatter)}" if mean else ""
    return Tile("Knee", interval(knee, ""), "requests/s", f"interval of {share(knee.width)}{machine}{slo}")


def _goodput_tile(reading: Reading) -> Tile:
    peak = reading.summary.measures.get("best_goodput")
    if peak is None:
        return Tile("Best goodput", "not measured", tone="none")
    limits = reading.run.limits
    tokens = reading.summary.measures.get("peak_token_rate")
    note = f"within TTFT {seconds(limits.ttft)} and TPOT {seconds(limits.tpot)}; up to {number(tokens)} tokens/s"
    return Tile("Best goodput", number(peak), "requests/s", note)


def _beyond_tile(reading: Reading) -> Tile:
    beyond = _furthest(reading)
    if beyond is None:
        return Tile("Beyond the knee", "not measured", tone="none")
    measures = beyond.measures
    known = reading.summary.measures
    kept, best = (known.get(f"{name}_share_at_{beyond.multiple:g}") for name in ("goodput", "best_goodput"))
    notes = [f"{share(kept)} of the peak goodput ({share(best)} of the best level's)"]
    if measures.ttft is not None:
        notes.append(f"accepted: TTFT p99 {seconds(measures.ttft.p99.value)}")
    if measures.refusal is not None:
        notes.append(f"{measures.refused} refused, p99 {seconds(measures.refusal.p99.value)}")
    tone = "bad" if beyond.level_class in BAD else "good" if beyond.level_class is LevelClass.SATURATED_STABLE else ""
    return Tile(f"At {beyond.multiple:g} × the knee", str(beyond.level_class), note="; ".join(notes), tone=tone)


def _recovery_tile(reading: Reading) -> Tile:
    back = reading.recovery
    if back is None:
        return Tile("Recovery", "not measured", tone="none")
    known = back.measures.recovery
    if known is None:
        return Tile("Recovery", "never", note=back.evidence, tone="bad")
    drain = f"; drained in {seconds(back.measures.drain)}" if back.measures.drain is not None else ""
    note = f"until a probe was as fast as a request alone (within 1.2 ×){drain}"
    return Tile("Recovery", seconds(known), note=note)


# --- faults and overhead ---------------------------------------------------------------------------------------------


def _faults_sentence(reading: Reading) -> str:
    cells = reading.faults
    broken = sorted({cell.fault for cell in cells if cell.broken})
    faults = len({cell.fault for cell in cells})
    if not cells:
        return "No fault was measured."
    if not broken:
        return f"{_plural(faults, 'fault')}, and all that had to hold did."
    return f"{faults - len(broken)} of {_plural(faults, 'fault')} went as they must; not: {', '.join(broken)}."


def _faults_tiles(reading: Reading) -> list[Tile]:
    cells = reading.faults
    broken = [cell for cell in cells if cell.broken]
    slowest = max((cell.recovery for cell in cells if cell.recovery is not None), default=None)
    hung = sum(cell.level_class is LevelClass.HUNG for cell in cells)
    tone = "bad" if broken else "good"
    return [
        Tile("As expected", f"{len(cells) - len(broken)} of {len(cells)}", "cells", tone=tone),
        Tile("Slowest recovery", seconds(slowest), note="until a probe was served as before"),
        Tile("Hung", str(hung), "cells", tone="bad" if hung else "good"),
    ]


def _overhead_sentence(reading: Reading) -> str:
    if not reading.overhead:
        return "No overhead was measured."
    best = max(reading.overhead, key=lambda row: row.consumed)
    return (
        f"The service around the forward pass moves {number(best.consumed)} tokens/s, "
        f"{number(best.tokens_per_second_per_core)} for each core."
    )


def _overhead_tiles(reading: Reading) -> list[Tile]:
    if not reading.overhead:
        return []
    best = max(reading.overhead, key=lambda row: row.consumed)
    matched = all(row.counts_match for row in reading.overhead)
    return [
        Tile("Most consumed", number(best.consumed), "tokens/s", f"{best.regime} at {number(best.offered)} offered"),
        Tile("Front end", number(best.frontend_us_per_token), "µs/token", "CPU time there"),
        Tile("Per GB", number(best.per_gb), "tokens/s", "of proportional memory"),
        Tile(
            "Output counts",
            "match" if matched else "differ",
            note="what clients got against what the service counted",
            tone="good" if matched else "bad",
        ),
    ]


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
