"""`python -m tests.loadtest.overload LOW HIGH [PAIRS]`: goodput at two rates beyond the knee, in turns, of the demo
model served as `make load` serves it. Cores that drift do so for both rates of a pair alike, which a single level of
each cannot show.

Prints a line for each pair, as JSON, then the mean of the pairs' ratios with its 95 % interval.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from loadtest.__main__ import serve_arguments
from loadtest.drive import ServiceDriver
from loadtest.judge import served_goodput
from loadtest.measure import STUDENT, measure
from loadtest.mix import mix_of
from loadtest.orders import Transport
from loadtest.plan import LevelPlan
from loadtest.progress import RunProgress
from loadtest.records import Limits, Phase, RunKind
from loadtest.session import Record, SessionOptions, machine_of, session

SERVE = serve_arguments("demo", "--max-num-seqs 4 --max-queued-requests 24")  # as the Makefile has it
LIMITS = Limits(ttft=2.0, tpot=0.1)


async def main(low: float, high: float, pairs: int = 8) -> None:
    """low, high: requests/s. pairs: 2 to 11, half a minute each rate."""
    options = SessionOptions(
        out=Path(tempfile.mkdtemp()) / "overload",
        limits=LIMITS,
        serve_arguments=SERVE,
        mix="brief",
        transport=Transport.MULTIPLEXED,
    )
    machine, mix, ratios = await machine_of(), mix_of(options.mix), list[float]()
    print(json.dumps({"cpu": machine.cpu, "cores": machine.cores, "commit": machine.commit}), flush=True)
    async with (
        RunProgress(Console(stderr=True)) as progress,
        session(Record(options, RunKind.MAP), machine, mix, progress) as opened,
    ):
        for pair in range(pairs):
            found: dict[float, float] = {}
            for turn, rate in enumerate((low, high) if pair % 2 == 0 else (high, low)):
                found[rate] = await goodput(opened.driver, rate, 2 * pair + turn)
            if not found[low]:
                raise SystemExit(f"at {low:g} requests/s none kept its limits")
            ratios.append(found[high] / found[low])
            print(json.dumps({str(rate): round(value, 2) for rate, value in found.items()}), flush=True)
    error = STUDENT[pairs - 2] * statistics.stdev(ratios) / math.sqrt(pairs)
    print(json.dumps({"ratio": round(statistics.fmean(ratios), 4), "interval": round(error, 4)}))


async def goodput(driver: ServiceDriver, rate: float, draw: int) -> float:
    """Requests/s within the limits. draw: of arrivals and of what prompts say."""
    plan = LevelPlan(
        phase=Phase.BEYOND, rate=rate, warm_up=5.0, window=20.0, drain_limit=30.0, seed=10 * draw, words=draw
    )
    return served_goodput(measure([await driver.run(plan)], LIMITS))


if __name__ == "__main__":
    rates = [float(word) for word in sys.argv[1:3]]
    asyncio.run(main(rates[0], rates[1], *(int(word) for word in sys.argv[3:4])))
