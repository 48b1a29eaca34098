"""`python -m tests.loadtest.sustained [TOKENS_PER_SECOND] [SECONDS]`: what the load generator receives in a second from
a server of known pace, with the lag between the server's stamps and its own. Server and clients share two cores.

Prints a line for each transport and number of client processes, as JSON, and its figures' machine.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from loadtest.fingerprint import fingerprint
from loadtest.orders import Transport
from loadtest.records import Outcome
from tests.loadtest.known_server import Behaviour
from tests.loadtest.playing import play

PERIOD = 0.02
LENGTHS = (400, 400)  # tokens of a request: 8 s
RISE = 8.0  # until arrivals and ends are in balance


async def sustained(rate: float, seconds: float, transport: Transport, clients: int) -> dict[str, Any]:
    """One token a message event, a token every 20 ms for each request, as many requests as `rate` takes."""
    starts = rate * PERIOD / (LENGTHS[0] * PERIOD)
    total = RISE + seconds
    part = await play(
        Behaviour(mode="pace", period=PERIOD),
        [index / starts for index in range(int(total * starts))],
        total,
        warm_up=RISE,
        transport=transport,
        tokens=LENGTHS,
        clients=clients,
        stamps=True,
        drain=LENGTHS[0] * PERIOD + 5.0,
    )
    reports = part.level.clients
    received = sum(report.tokens_per_second for report in reports)
    return {
        "transport": str(transport),
        "clients": clients,
        "asked_tokens_per_second": rate,
        "received_tokens_per_second": round(received),
        "receive_lag_p99_ms": round(1e3 * max(report.receive_lag_p99 or 0.0 for report in reports), 2),
        "client_cpu_us_per_token": round(1e6 * sum(report.cpu for report in reports) / max(1.0, received), 1),
        "not_completed": sum(row.outcome is not Outcome.COMPLETED for row in part.rows),
    }


async def main(rate: float, seconds: float) -> None:
    print(json.dumps({"cpu": (machine := fingerprint()).cpu, "cores": machine.cores, "commit": machine.commit}))
    for transport, clients in ((Transport.MULTIPLEXED, 1), (Transport.MULTIPLEXED, 2), (Transport.STREAM, 1)):
        print(json.dumps(await sustained(rate, seconds, transport, clients)), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*(float(word) for word in (*sys.argv[1:], *("20000", "20")[len(sys.argv) - 1 :]))))
