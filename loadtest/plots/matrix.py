"""Faults by the classes of requests that lived through them; the cost of the service around the forward pass."""

from __future__ import annotations

from loadtest.judgements import FaultCell, Regime
from loadtest.plots.figure import Axis, Cell, Figure, Panel, Rule, Scale, Series
from loadtest.quantity import number, seconds
from loadtest.reading import Reading


def faults(reading: Reading) -> Figure | None:
    """Fault x class of requests, coloured by what was found."""
    cells = reading.faults
    if not cells:
        return None
    names = list(dict.fromkeys(cell.fault for cell in cells))
    kinds = list(dict.fromkeys(cell.kind for cell in cells))
    broken = [cell for cell in cells if cell.broken]
    return Figure(
        id="10-faults",
        title="Fault matrix",
        caption="Rows are faults, columns are the classes of requests sent while they happened. The colour is the "
        "class of behaviour that was found; a cross marks an expectation that did not hold.",
        finding=f"{len(cells) - len(broken)} of {len(cells)} cells behaved as expected"
        + (f"; not: {', '.join(f'{cell.fault} / {cell.kind}' for cell in broken)}." if broken else "."),
        panels=[
            Panel(
                x=Axis(label="requests", scale=Scale.CATEGORY, categories=kinds),
                y=Axis(label="fault", scale=Scale.CATEGORY, categories=names),
                cells=[
                    Cell(
                        x=kinds.index(cell.kind),
                        y=names.index(cell.fault),
                        text=("✗ " if cell.broken else "") + str(cell.level_class),
                        level_class=cell.level_class,
                        note=_note(cell),
                    )
                    for cell in cells
                ],
            )
        ],
        wide=True,
    )


def overhead(reading: Reading) -> list[Figure]:
    """Offered against consumed tokens, and where the CPU time goes."""
    rows = sorted(reading.overhead, key=lambda row: row.offered)
    if not rows:
        return []
    colours = {Regime.KEEP_UP: "green", Regime.SATURATED: "orange", Regime.DRAINING: "blue"}
    consumed = Panel(
        x=Axis(label="offered", unit="tokens/s", low=0.0),
        y=Axis(label="consumed", unit="tokens/s", low=0.0),
        series=[
            Series(name="consumed", x=[row.offered for row in rows], y=[row.consumed for row in rows], colour="grey"),
            *[
                Series(
                    name=str(regime),
                    x=[row.offered for row in rows if row.regime is regime],
                    y=[row.consumed for row in rows if row.regime is regime],
                    colour=colour,
                    marks=True,
                )
                for regime, colour in colours.items()
                if any(row.regime is regime for row in rows)
            ],
        ],
        rules=[Rule(label="y = x", diagonal=True, colour="grey")],
    )
    parts = (
        ("front end", "blue", [row.frontend_us_per_token for row in rows]),
        ("engine", "purple", [row.engine_us_per_token for row in rows]),
        ("clients", "grey", [row.client_us_per_token for row in rows]),
    )
    cost = Panel(
        x=Axis(label="offered", unit="tokens/s", low=0.0),
        y=Axis(label="CPU per token", unit="µs", low=0.0),
        series=[
            Series(name=name, x=[row.offered for row in rows], y=list(values), colour=colour)
            for name, colour, values in parts
        ],
    )
    best = max(rows, key=lambda row: row.consumed)
    return [
        Figure(
            id="15-overhead-tokens",
            title="Overhead: consumed against offered tokens",
            caption="A tiny frozen model, so that what is measured is the service around the forward pass.",
            finding=f"At most {number(best.consumed)} tokens/s were consumed, "
            f"{number(best.tokens_per_second_per_core)} for each core; lag drifted by "
            f"{seconds(best.lag_drift)} a second there.",
            panels=[consumed],
        ),
        Figure(
            id="16-overhead-cpu",
            title="Overhead: CPU time per token",
            caption="Of the front end process, the engine process and the clients.",
            finding=f"At {number(best.offered)} tokens/s offered the front end takes "
            f"{number(best.frontend_us_per_token)} µs a token, the engine {number(best.engine_us_per_token)} µs.",
            panels=[cost],
        ),
    ]


def _note(cell: FaultCell) -> str:
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in cell.outcomes.items())
    broken = f"; broken: {', '.join(cell.broken)}" if cell.broken else ""
    back = f"; back after {seconds(cell.recovery)}" if cell.recovery is not None else ""
    return outcomes + broken + back
