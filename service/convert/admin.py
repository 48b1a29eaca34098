"""Requests and responses of the admin port."""

from __future__ import annotations

from octavo.v1 import admin_pb2
from service.convert.fields import MAX_TIMEOUT_SECONDS, refuse, seconds_of
from service.status import invalid


def parse_drain(request: admin_pb2.DrainRequest) -> float | None:
    """Seconds for running requests; None for the configured time."""
    if not request.HasField("timeout"):
        return None
    seconds = seconds_of(request.timeout, "timeout")
    if not 0.0 <= seconds <= MAX_TIMEOUT_SECONDS:
        raise refuse(invalid("timeout", f"is not within 0 to {MAX_TIMEOUT_SECONDS:g} s"))
    return seconds


def drain_response(live_requests: int) -> admin_pb2.DrainResponse:
    return admin_pb2.DrainResponse(live_requests=live_requests)
