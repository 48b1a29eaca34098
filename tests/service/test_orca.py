"""Load reports: with every generation call, and in the interval that a balancer asks for."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from google.protobuf import json_format
from google.protobuf.duration_pb2 import Duration
from xds.data.orca.v3 import orca_load_report_pb2
from xds.service.orca.v3 import orca_pb2

from octavo.v1 import generation_pb2 as pb
from service.orca import DEFAULT_INTERVAL_SECONDS, LEAST_INTERVAL_SECONDS, TRAILER
from service.rate import RequestRate
from tests.service.calls import run_stream, start
from tests.service.process import BIN, run_command
from tests.service.server import Running, until


async def trailer(served: Running, method: str, request: pb.StartGeneration) -> orca_load_report_pb2.OrcaLoadReport:
    """By grpcurl: gRPC's C core takes this trailer for its balancers and shows it to nobody."""
    data = json_format.MessageToJson(pb.GenerateRequest(start=request))
    target = f"octavo.v1.GenerationService/{method}"
    arguments = ("-v", "-plaintext", "-d", data, served.server.address, target)
    _, out, _ = await run_command(BIN / "grpcurl", *arguments, seconds=30)
    (line,) = [line for line in out.splitlines() if line.startswith(f"{TRAILER}: ")]
    encoded = line.removeprefix(f"{TRAILER}: ")
    return orca_load_report_pb2.OrcaLoadReport.FromString(base64.b64decode(encoded + "=" * (-len(encoded) % 4)))


@pytest.mark.parametrize("method", ["GenerateUnary", "GenerateStream", "Generate"])
async def test_every_kind_of_call_carries_a_report(served: Running, method: str) -> None:
    served.engine.stats_overrides = {"free_blocks": 512, "queued_requests": 32}
    load = await trailer(served, method, start(max_tokens=1))
    assert load.mem_utilization == pytest.approx(0.5)
    assert load.application_utilization == pytest.approx(0.5 + 32 / 64, abs=0.05)
    assert load.named_metrics["queued_requests"] == 32


async def test_a_refused_call_carries_one_too(served: Running) -> None:
    assert (await trailer(served, "GenerateUnary", start(""))).application_utilization == 0.0


def reports(served: Running, interval: Duration | None) -> Any:
    """The out-of-band call of a client that asks for this interval."""
    method = served.channel.unary_stream(
        "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics",
        request_serializer=orca_pb2.OrcaLoadReportRequest.SerializeToString,
        response_deserializer=orca_load_report_pb2.OrcaLoadReport.FromString,
    )
    return method(orca_pb2.OrcaLoadReportRequest(report_interval=interval), timeout=10)


@pytest.mark.parametrize(
    ("asked", "seconds"),
    [
        (None, DEFAULT_INTERVAL_SECONDS),
        (Duration(seconds=7), 7.0),
        (Duration(), LEAST_INTERVAL_SECONDS),
        (Duration(nanos=1), LEAST_INTERVAL_SECONDS),
        (Duration(seconds=-(2**63), nanos=-1), LEAST_INTERVAL_SECONDS),
        (Duration(seconds=1, nanos=-(2**31)), LEAST_INTERVAL_SECONDS),
        (Duration(seconds=2**63 - 1), 2.0**63),
    ],
)
async def test_no_client_gets_reports_faster_than_the_least_interval(
    served: Running, monkeypatch: pytest.MonkeyPatch, asked: Duration | None, seconds: float
) -> None:
    slept, replica = list[float](), served.server.replica
    sleep = replica.sleep

    async def noted(interval: float) -> None:
        slept.append(interval)
        await sleep(interval)

    monkeypatch.setattr(replica, "sleep", noted)
    call = reports(served, asked)
    await call.read()
    await until(lambda: slept != [])
    assert slept[0] == seconds
    assert not call.done()
    call.cancel()


async def test_out_of_band_reports_follow_the_load(served: Running) -> None:
    call = reports(served, Duration(nanos=100_000_000))
    assert (await call.read()).mem_utilization == 0.0
    served.engine.stats_overrides = {"free_blocks": 0}
    await call.read()
    assert (await call.read()).mem_utilization == 1.0
    await run_stream(served, start(max_tokens=1))
    await call.read()
    assert (await call.read()).rps_fractional > 0
    call.cancel()


def test_rate_is_smoothed() -> None:
    rate = RequestRate()
    now = rate.updated_at
    for second in range(1, 61):
        rate.update(5 * second, second, now + second)
    assert rate.requests == pytest.approx(5, rel=0.01)
    assert rate.faults == pytest.approx(1, rel=0.01)
    rate.update(300, 60, now + 60 + 10)
    assert rate.requests == pytest.approx(5 / 2.718, rel=0.01)
