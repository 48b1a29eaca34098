"""`python -m loadtest report`: a result as one page to look at, its charts as PNG and their data as CSV beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from loadtest import classify
from loadtest.headline import headline
from loadtest.judge import FULL, SLO_SHARE
from loadtest.judgements import LevelClass, Verdict
from loadtest.machine import UNSTEADY
from loadtest.notes import notes_of
from loadtest.page.render import render
from loadtest.plots import axes
from loadtest.plots.catalogue import figures
from loadtest.plots.figure import Figure
from loadtest.plots.table import csv_of
from loadtest.quantity import NONE, moment, number, quantile_of, seconds, share, size
from loadtest.reading import Reading
from loadtest.records import Run, RunKind
from loadtest.result import Result
from loadtest.search import SETTLING, SLOWEST, Settings

HERO = "03-offered-completed"
RELATIONS = {"<=": "≤", ">=": "≥", "==": "="}
KINDS = {RunKind.MAP: "map", RunKind.FAULTS: "fault matrix", RunKind.OVERHEAD: "overhead"}


def write_report(folder: Path, say: Callable[[str], None] = lambda text: None) -> Path:
    """Writes `plots/` and `report.html` into the result's folder. Returns the page. Raises ResultError."""
    reading = Reading(Result.open(folder))
    made = figures(reading)
    write_plots(folder / "plots", made, say)
    page = folder / "report.html"
    page.write_text(page_of(reading, made), encoding="utf-8")
    return page


def write_plots(folder: Path, made: Sequence[Figure], say: Callable[[str], None] = lambda text: None) -> None:
    """A PNG and a CSV for each figure."""
    from loadtest.plots.png import draw  # matplotlib takes a second to import

    folder.mkdir(exist_ok=True)
    for figure in made:
        say(figure.title)
        draw(figure, folder / f"{figure.id}.png")
        (folder / f"{figure.id}.csv").write_text(csv_of(figure), encoding="utf-8")


def page_of(reading: Reading, made: Sequence[Figure]) -> str:
    """The page's HTML."""
    run = reading.run
    by_id = {figure.id: figure for figure in made}
    timelines = [figure for figure in made if figure.id.startswith("06-")]
    overhead = [figure for figure in made if "-overhead-" in figure.id]
    faults = by_id.get("10-faults")
    apart = [by_id.get(HERO), faults, *timelines, *overhead]
    context: dict[str, Any] = {
        "title": f"Octavo load test: {KINDS[run.kind]} of {run.target.model or run.target.address}",
        "kind": KINDS[run.kind],
        "model": run.target.model or run.target.address,
        "created": moment(run.created),
        "machine": run.fingerprint.gpus[0].name if run.fingerprint.gpus else run.fingerprint.cpu,
        "headline": headline(reading),
        "hero": by_id.get(HERO),
        "scores": scores(reading),
        "charts": [figure for figure in made if figure not in apart],
        "timelines": _tabs(reading, timelines),
        "levels": level_rows(reading),
        "faults": faults,
        "fault_cells": reading.faults,
        "overhead": overhead,
        "overhead_rows": sorted(reading.overhead, key=lambda row: row.offered),
        "facts": facts(run),
        "caveats": caveats(reading),
        "method": method(run),
    }
    return render("report.html", made, sections=_sections(context), **context)


def _sections(context: dict[str, Any]) -> list[dict[str, str]]:
    """Those that the page has."""
    names = (
        ("scores", "scorecard", "Scorecard"),
        ("charts", "charts", "Charts"),
        ("timelines", "timelines", "Second by second"),
        ("levels", "levels", "Levels"),
        ("faults", "faults", "Faults"),
        ("overhead_rows", "overhead", "Overhead"),
        ("facts", "machine", "Machine"),
        ("method", "method", "Method"),
    )
    return [{"id": anchor, "name": name} for key, anchor, name in names if context[key]]


def _tabs(reading: Reading, timelines: Sequence[Figure]) -> list[dict[str, Any]]:
    by_id = {figure.id: figure for figure in timelines}
    return [
        {"figure": by_id[name], "name": axes.name(verdict), "level_class": verdict.level_class}
        for verdict in reading.around_knee
        if (name := f"06-timeline-{verdict.group.replace(':', '-')}") in by_id
    ]


# --- tables ----------------------------------------------------------------------------------------------------------


def scores(reading: Reading) -> list[dict[str, str]]:
    """Hypotheses with what came out."""
    known = {hypothesis.id: hypothesis for hypothesis in reading.run.hypotheses}
    found = []
    for score in reading.summary.scores:
        hypothesis = known[score.hypothesis]
        error = reading.summary.measures.get(f"{hypothesis.measure}_error")
        verdict, sign, words = {
            True: ("holds", "✓", "holds"),
            False: ("fails", "✗", "does not hold"),
            None: ("open", "?", "not measured"),
        }[score.holds]
        found.append(
            {
                "verdict": verdict,
                "sign": sign,
                "words": words,
                "text": hypothesis.text,
                "measure": hypothesis.measure,
                "measured": _measure_words(hypothesis.measure, score.measured)
                + (f" ± {_measure_words(hypothesis.measure, error)}" if error is not None else ""),
                "bound": f"{RELATIONS[hypothesis.relation]} {_measure_words(hypothesis.measure, hypothesis.bound)}",
            }
        )
    return found


def _measure_words(name: str, value: float | None) -> str:
    """Measures are named for what they are."""
    if name.startswith(("ttft", "refusal", "recovery", "floor")):
        return seconds(value)
    if name.startswith(("goodput_share", "best_goodput_share", "little_gap", "knee_width")):
        return share(value)
    return number(value)


def level_rows(reading: Reading) -> list[dict[str, Any]]:
    """Closed loop, then by rate with the knee between, then what is left."""
    sweep = [v for v in reading.verdicts if v.rate is not None and v.group.startswith("rate:")]
    sweep.sort(key=lambda verdict: verdict.rate or 0.0)
    rest = [v for v in reading.verdicts if v not in sweep and v not in reading.closed and v is not reading.recovery]
    knee = reading.summary.knee
    rows = [{**_level_row(verdict), "divider": ""} for verdict in reading.closed]
    placed = knee is None
    for verdict in sweep:
        if not placed and knee is not None and (verdict.rate or 0.0) >= knee.high:
            rows.append({"divider": f"knee: {number(knee.low)} to {number(knee.high)} requests/s"})
            placed = True
        rows.append({**_level_row(verdict), "divider": ""})
    ends = [reading.recovery, *rest]
    return rows + [{**_level_row(verdict), "divider": ""} for verdict in ends if verdict is not None]


def _level_row(verdict: Verdict) -> dict[str, Any]:
    measures = verdict.measures
    void = verdict.level_class is LevelClass.VOID
    ttft, tpot = measures.ttft, measures.tpot
    return {
        "name": f"recovery from {axes.name(verdict)}" if verdict.group.startswith("recovery") else axes.name(verdict),
        "level_class": verdict.level_class,
        "void": void,
        "evidence": verdict.evidence,
        "voided": [] if void else [f"level {index} voided: {cause}" for index, cause in verdict.void.items()],
        "figures": [
            f"{measures.arrivals}",
            number(measures.completion_rate),
            number(measures.goodput),
            number(measures.token_rate),
            number(measures.in_flight),
            quantile_of(ttft, "p50"),
            quantile_of(ttft, "p99"),
            quantile_of(tpot, "p50"),
            quantile_of(tpot, "p99"),
            f"{measures.refused}",
            f"{measures.failed}",
            f"{measures.censored}",
            share(measures.little_gap),
            _machine_words(verdict),
        ],
    }


def _machine_words(verdict: Verdict) -> str:
    """With how well it is known, and marked where it changed too much."""
    if verdict.machine is None:
        return NONE
    mark = ", unsteady" if verdict.machine.unsteady else ""
    return f"{share(verdict.machine.value)} ± {share(verdict.machine.error)}{mark}"


def facts(run: Run) -> list[dict[str, Any]]:
    """The machine, the service and the run."""
    machine, target = run.fingerprint, run.target
    hardware = [
        ("CPU", machine.cpu),
        ("cores", str(machine.cores)),
        ("memory", size(machine.memory)),
        ("memory bandwidth, measured copy", f"{number(machine.memory_bandwidth / 1e9)} GB/s"),
        ("load average before", number(machine.load_average)),
    ]
    for gpu in machine.gpus:
        hardware += [
            ("GPU", f"{gpu.name}, {size(gpu.memory)}"),
            ("driver", gpu.driver),
            ("clocks, most", f"SM {number(gpu.max_sm_clock)} MHz, memory {number(gpu.max_memory_clock)} MHz"),
            ("power limit", f"{number(gpu.power_limit)} W"),
        ]
    service = [
        ("model", target.model or NONE),
        ("device", target.device or NONE),
        ("address", target.address),
        ("running requests, most", str(target.max_running_requests or NONE)),
        ("queued requests, most", str(target.max_queued_requests or NONE)),
        ("KV cache", f"{target.kv_tokens:,} tokens" if target.kv_tokens else NONE),
        ("context", f"{target.max_context_tokens:,} tokens" if target.max_context_tokens else NONE),
    ]
    how = [
        ("command", " ".join(run.command)),
        ("begun", moment(run.created)),
        ("commit", machine.commit),
        ("seed", str(run.seed)),
        ("mix", run.mix),
        ("limits", f"TTFT {seconds(run.limits.ttft)}, TPOT {seconds(run.limits.tpot)}"),
        *[(name, str(value)) for name, value in run.parameters.items()],
    ]
    software = [("kernel", machine.kernel), ("Python", machine.python), *sorted(machine.versions.items())]
    named = (("Machine", hardware), ("Service", service), ("Run", how), ("Software", software))
    return [{"name": name, "facts": values} for name, values in named]


# --- method ----------------------------------------------------------------------------------------------------------


def caveats(reading: Reading) -> list[str]:
    """What limits this very run."""
    found = notes_of(reading.run, reading.summary)
    counted = [verdict.measures for verdict in reading.verdicts if verdict.level_class is not LevelClass.VOID]
    if reading.run.target.address.startswith(("127.", "localhost", "[::1]")):
        cores = reading.run.fingerprint.cores
        found.append(f"Clients and service shared the {cores} cores of one machine: each slowed the other.")
    if counted:
        late = max(measures.lateness_p99 for measures in counted)
        lag = max(measures.lag_p99 for measures in counted)
        cpu = max(measures.client_cpu for measures in counted)
        found.append(
            f"Of the levels that count, at the worst: sends {seconds(late)} late (p99), a client's event loop "
            f"{seconds(lag)} late (p99), a client process on {share(cpu)} of a core."
        )
    return found


def method(run: Run) -> list[str]:
    """How the figures come about; the rules' bounds are those of the code that judges."""
    return [
        "Open loop: the arrival schedule is drawn from the seed before anything is sent and kept with the result; no "
        "request waits for another. Latencies count from the time at which the schedule wanted a request sent.",
        "In a search the first level of every rate has the same arrivals, stretched in time, and so have the second "
        "and the third: gaps, classes and lengths, never words, which a prefix cache would know. Levels then differ in "
        "their rate alone.",
        f"A window has at least {Settings.completions} arrivals (near the knee {Settings.full}, as far as "
        f"{seconds(Settings.full_window)} go) and {SLOWEST:g} times the p95 of end-to-end times at "
        f"the next lower rate, a warm-up {SETTLING:g} times that, as far as {seconds(Settings.most_window)} go; beyond "
        "the knee windows are shorter, so that all of it takes a quarter of an hour. A schedule is written down before "
        "its level begins, so a warm-up does not wait until the number in flight stands still; one that was too short "
        "shows as a rising number, and the level as one that does not keep up.",
        "TTFT: to the first message with a token. TPOT: mean time of the tokens after the first, for each request. "
        "ITL: single gaps. Percentiles are of all requests of a group (nearest rank); requests still running when a "
        "level was cut off count as lower bounds, and a percentile that they reach is printed as “≥”.",
        f"Goodput: completed requests with TTFT at most {seconds(run.limits.ttft)} and TPOT at most "
        f"{seconds(run.limits.tpot)}.",
        f"Keeps up: failures at most {share(classify.ERRORS)} of arrivals; completions at least "
        f"{share(classify.KEEPS_UP)} of them, but for what the window's edges explain (two standard deviations of the "
        "number in flight at its end less that at its beginning, whose variances are each taken as twice the mean); "
        "and a number in flight that does not rise. It rises if its slope exceeds "
        f"{share(classify.GROWTH)} of the arrivals with 97.5 %. That it exceeds zero would not do: the slope is of ten "
        "stretches of time, which near the knee depend on each other, and in simulation that turned away rates that a "
        "server of known capacity keeps up with. A refusal is an arrival that was not completed, and no failure: a "
        "short queue is filled by a burst now and then well below what the service can do. Saturated, stable: refusals "
        "fill the gap and TTFT does not rise. Saturated, growing: neither. Collapsing: token rate or goodput below "
        f"{share(classify.COLLAPSE)} of the best at a lower rate, by more than so few requests vary. Hung: "
        f"{seconds(classify.SILENCE)} without a token or a step while something was in flight. Crashed: the "
        "service's own word that it died, or no service.",
        f"The knee is an interval: from {share(classify.KEEPS_UP)} of the highest rate that keeps up, less what its "
        "completions may owe to luck (as above), to the lowest rate that does not. The limits' interval: from "
        f"{share(SLO_SHARE)} of the highest rate at which goodput was at least so much of what was "
        "offered, to the lowest at which it was not.",
        "That interval is of the windows that happened to lie at its ends, and on a machine that changes each finds it "
        "at another speed. The knee on average is of every window near it: one that falls behind tells what the "
        f"service could serve just then, one that keeps up that it could serve {share(classify.KEEPS_UP)} of what "
        "arrived, or more, and how they differ, how well the mean is known (a censored log-normal sample, 95 % of its "
        f"mean's posterior with flat priors, the upper end over {share(classify.KEEPS_UP)}, which a short queue may "
        "cost). In simulation it holds the knee of machines that change by 3 to 10 % where the narrower one misses it "
        "in one run of seven.",
        "The machine's speed: a fixed piece of work, twice a second, by the clock of its own thread. A level's speed "
        "is the mean in its window over that in all, its error (±, one standard deviation) that of the means of ten "
        f"stretches of the window; from {share(UNSTEADY)} on the level is marked unsteady. Everything here is as "
        "measured but for what says that it is over the machine's speed: a second knee, and two doubts. A level that "
        "fell behind by no more than the machine was slower just then cannot tell, and a knee begins at its rate over "
        "the machine's speed if that was surely above the mean. A level cannot tell, either, that only luck lets keep "
        f"up, if its window is so short that luck is more than {share(classify.MOST_LUCK)}. Where levels contradict "
        "each other, the search repeats them while there is time. Beside an overload the reference says little of the "
        "service, so goodput there and the knee on average do without it.",
        "Goodput beyond the knee is judged against its peak: at the highest rate that is kept up with, all repeats "
        f"together, or in all levels from {FULL[0]:g} to {FULL[1]:g} times it, if that is more; the level before "
        "recovery counts with the one of its rate. Its error (±, one standard deviation) is what windows of such a "
        "length differ by, as those near the knee do. The best of all levels is the luckiest one, and the luckier the "
        "more levels there are; against it stands a hypothesis of its own.",
        f"A level is voided when the client was the bottleneck: sends later than {seconds(classify.LATENESS)} (p99) "
        f"or {share(classify.LATENESS_SHARE)} of the mean gap, whichever is more; a client process above "
        f"{share(classify.CLIENT_CPU)} of a core; requests that the client could not send.",
        "Where the system allows it, client processes are scheduled before everything of ordinary priority "
        "(SCHED_FIFO): on shared cores they else wait for the service's time slices, and measure those. The service "
        "has less of the cores by what the clients use, at the very moments at which something arrives or goes out.",
    ]
