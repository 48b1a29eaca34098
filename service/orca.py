"""Load reports for gRPC's weighted_round_robin and other ORCA clients: with each call, and out of band."""

from __future__ import annotations

from typing import Any

import grpc
from grpc import aio
from xds.data.orca.v3 import orca_load_report_pb2
from xds.service.orca.v3 import orca_pb2

from service.convert.capacity import kv_utilization, utilization
from service.replica import Replica
from service.status import abort, draining

TRAILER = "endpoint-load-metrics-bin"
SERVICE = "xds.service.orca.v3.OpenRcaService"
LEAST_INTERVAL_SECONDS = 0.1
DEFAULT_INTERVAL_SECONDS = 1.0

Context = aio.ServicerContext[Any, Any]


def load_report(replica: Replica) -> orca_load_report_pb2.OrcaLoadReport:
    """application_utilization and mem_utilization as in CapacityService's `utilization` and `kv_utilization`;
    of an engine that is gone the last ones, since balancers pass over a report of 0."""
    info, stats, rate = replica.info, replica.engine.stats, replica.rate
    kv = kv_utilization(info, stats)
    return orca_load_report_pb2.OrcaLoadReport(
        application_utilization=utilization(info, stats),
        mem_utilization=kv,
        rps_fractional=rate.requests,
        eps=rate.faults,
        named_metrics={
            "queued_requests": stats.queued_requests,
            "running_requests": stats.running_requests,
            "kv_utilization": kv,
        },
    )


class LoadReports:
    """The report as bytes, made once for each of the engine's snapshots: under overload it goes with a thousand
    refusals a second."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._of: tuple[object, float] = (None, 0.0)
        self._report = b""

    def attach(self, context: Context) -> None:
        """Puts the report into the call's trailing metadata; `abort` keeps it there."""
        stats, rate = self._replica.engine.stats, self._replica.rate.updated_at
        if self._of[0] is not stats or self._of[1] != rate:
            self._of = (stats, rate)
            self._report = load_report(self._replica).SerializeToString()
        context.set_trailing_metadata(((TRAILER, self._report),))


class OpenRcaService:
    """Reports in the interval that a client asks for. Python's gRPC has no server side of ORCA, hence this one."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        stream = grpc.unary_stream_rpc_method_handler(
            self.StreamCoreMetrics,
            request_deserializer=orca_pb2.OrcaLoadReportRequest.FromString,
            response_serializer=orca_load_report_pb2.OrcaLoadReport.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"StreamCoreMetrics": stream})

    async def StreamCoreMetrics(self, request: orca_pb2.OrcaLoadReportRequest, context: Context) -> None:
        interval = DEFAULT_INTERVAL_SECONDS
        if request.HasField("report_interval"):
            interval = max(LEAST_INTERVAL_SECONDS, request.report_interval.ToNanoseconds() / 1e9)
        while not self._replica.stopping:
            await context.write(load_report(self._replica))
            await self._replica.sleep(interval)
        await abort(context, draining())
