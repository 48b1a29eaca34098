"""The failure table itself: codes, details, hints for retries."""

from __future__ import annotations

import grpc
import pytest

from engine import FailureKind, RequestFailed, Usage
from octavo.v1 import generation_pb2 as pb
from service.status import (
    RETRY_AT_ONCE,
    deadline_unattainable,
    drain_timeout,
    draining,
    engine_died,
    engine_stalled,
    engine_starting,
    from_engine,
)
from tests.service.calls import refusal, start
from tests.service.server import Running


@pytest.mark.parametrize("kind", list(FailureKind))
def test_every_engine_failure_has_a_status(kind: FailureKind) -> None:
    event = RequestFailed("r", kind, "why", usage=Usage(prompt_tokens=1), field="sampling.n")
    failure = from_engine(event, "instance")
    assert failure.code is not grpc.StatusCode.UNKNOWN
    assert failure.usage == Usage(prompt_tokens=1)


def test_hints_for_retries_are_those_that_the_readme_has() -> None:
    """Seconds of RetryInfo, and gRPC's own pushback in ms."""
    failures = [
        deadline_unattainable("", {"estimated_ms": "1500"}),
        draining(),
        drain_timeout(),
        engine_died("", "a cause"),
        engine_stalled(),
        engine_starting(),
    ]
    assert {failure.reason: (failure.retry_after, failure.pushback_ms) for failure in failures} == {
        "DEADLINE_UNATTAINABLE": (1.5, -1),
        "DRAINING": (0.0, RETRY_AT_ONCE),
        "DRAIN_TIMEOUT": (None, None),
        "ENGINE_DIED": (0.0, RETRY_AT_ONCE),
        "ENGINE_STALLED": (1.0, 1000),
        "ENGINE_STARTING": (1.0, 1000),
    }


async def test_refusal_without_usage_has_no_detail_of_it(served: Running) -> None:
    status = await refusal(served, start("x" * 500))
    assert status.reason == "PROMPT_TOO_LONG"
    assert not [detail for detail in status.details if isinstance(detail, pb.Usage)]
