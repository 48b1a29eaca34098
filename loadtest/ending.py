"""How a request ended, from the status that it ended with."""

from __future__ import annotations

from typing import Any, NamedTuple

import grpc
from google.rpc import error_details_pb2, status_pb2

from loadtest.records import Outcome

NAMES = {code.value[0]: code.name for code in grpc.StatusCode}
# Every channel a connection of its own, and what is refused is seen as refused.
CHANNEL_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
CAUSE_CHARACTERS = 200


class Ending(NamedTuple):
    """The fields of a `RequestRow` that say how it ended."""

    outcome: Outcome
    code: str
    reason: str
    cause: str


def ending_of(status: status_pb2.Status, *, has_tokens: bool) -> Ending:
    """Of a failure. RESOURCE_EXHAUSTED is a refusal unless the request was being served."""
    code, reason = NAMES.get(status.code, str(status.code)), reason_of(status)
    refused = code == "RESOURCE_EXHAUSTED" and not has_tokens and reason != "SLOW_CONSUMER"
    outcome = Outcome.REFUSED if refused else Outcome.FAILED
    return Ending(outcome, code, reason, status.message[:CAUSE_CHARACTERS])


def with_details(status: status_pb2.Status, metadata: Any) -> status_pb2.Status:
    """The service's own status where the trailers carry one."""
    for key, value in metadata or ():
        if key == "grpc-status-details-bin":
            return status_pb2.Status.FromString(value)
    return status


def status_of(error: Any) -> status_pb2.Status:
    """Of an RPC's error, of either API."""
    plain = status_pb2.Status(code=error.code().value[0], message=error.details() or "")
    return with_details(plain, error.trailing_metadata())


def reason_of(status: status_pb2.Status) -> str:
    """ErrorInfo's reason; "" without one."""
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        if detail.Unpack(info):
            return str(info.reason)
    return ""
