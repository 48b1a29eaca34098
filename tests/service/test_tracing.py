"""A span a request: whose child it is, what it says of the request, and that it never says what was asked."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from engine import ConfigurationError
from octavo.v1 import generation_pb2 as pb
from service.config import ServiceConfig
from service.server import Server
from service.spans import NoSpans
from service.tracing import OpenTelemetrySpans, check_traces, open_spans, wants_traces
from tests.service.byte_tokenizer import byte_tokenizer
from tests.service.calls import Stream, cancel_message, refusal, run_bidi, run_stream, run_unary, start, start_message
from tests.service.fake_engine import FakeEngineClient, Script
from tests.service.process import ROOT, run_command
from tests.service.server import Running, running_server, until

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
CALLER = (("traceparent", f"00-{TRACE}-{PARENT}-01"), ("tracestate", "vendor=1"))
SECRET = "the moon is made of cheese"


@asynccontextmanager
async def traced() -> AsyncIterator[tuple[Running, InMemorySpanExporter]]:
    exporter, engine = InMemorySpanExporter(), FakeEngineClient()
    await engine.start()
    spans = OpenTelemetrySpans(SimpleSpanProcessor(exporter), "fake")
    server = Server(engine, byte_tokenizer(), ServiceConfig(port=0, drain_grace=0.0), spans)
    async with running_server(server, engine) as served:
        yield served, exporter


def only(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exporter.get_finished_spans()
    return span


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def test_span_of_a_request_is_its_callers_child_with_events_in_order() -> None:
    async with traced() as (served, exporter):
        before = time.time_ns()
        call = served.generation.GenerateStream(
            pb.GenerateStreamRequest(start=start(SECRET, max_tokens=4, request_id="mine")), metadata=CALLER
        )
        async for _ in call:
            pass
        span = only(exporter)
        assert (span.name, span.kind, span.status.status_code) == ("generate fake", SpanKind.SERVER, StatusCode.UNSET)
        assert f"{span.context.trace_id:032x}" == TRACE  # type: ignore[union-attr]
        assert f"{span.parent.span_id:016x}" == PARENT  # type: ignore[union-attr]
        assert span.context.trace_state.get("vendor") == "1"  # type: ignore[union-attr]
        assert sorted(event.name for event in span.events) == ["decode", "prefill", "queued"]
        assert before - 10**6 <= span.start_time < span.end_time <= time.time_ns()  # type: ignore[operator]
        known = attributes(span)
        assert known["gen_ai.usage.input_tokens"] == len(SECRET)
        assert known["gen_ai.usage.output_tokens"] == known["gen_ai.request.max_tokens"] == 4
        assert known["gen_ai.response.finish_reasons"] == ("max_tokens",)
        assert (known["octavo.request_id"], known["octavo.engine_instance_id"]) == ("mine", "fake-1")
        assert known["rpc.grpc.status_code"] == 0


async def test_each_request_of_a_stream_has_its_span_in_the_streams_trace() -> None:
    async with traced() as (served, exporter):
        stream = Stream(served, metadata=CALLER)
        await stream.send(*(start_message(request_id=name, max_tokens=2) for name in "abc"))
        await stream.finish()
        spans = exporter.get_finished_spans()
        assert sorted(attributes(span)["octavo.request_id"] for span in spans) == ["a", "b", "c"]
        assert {f"{span.context.trace_id:032x}" for span in spans} == {TRACE}  # type: ignore[union-attr]
        assert len({span.context.span_id for span in spans}) == 3  # type: ignore[union-attr]


async def test_without_a_caller_every_request_is_a_trace_of_its_own() -> None:
    async with traced() as (served, exporter):
        await run_bidi(served, start_message(request_id="a", max_tokens=1), start_message(request_id="b", max_tokens=1))
        first, second = exporter.get_finished_spans()
        assert first.parent is second.parent is None
        assert first.context.trace_id != second.context.trace_id  # type: ignore[union-attr]


async def test_failures_and_cancels_are_told() -> None:
    async with traced() as (served, exporter):
        await refusal(served, start(sampling=pb.SamplingParameters(temperature=-1.0)))
        served.engine.plan = lambda _: Script(fail_after=2)
        await refusal(served, start())
        served.engine.plan = lambda _: Script()
        stream = Stream(served)
        await stream.send(start_message(request_id="a"))
        await stream.read_until_tokens("a", 1)
        await stream.send(cancel_message("a"))
        await stream.read_until_ended("a")
        refused, failed, cancelled = exporter.get_finished_spans()
        assert (refused.status.status_code, attributes(refused)["error.type"]) == (
            StatusCode.ERROR,
            "INVALID_PARAMETER",
        )
        assert attributes(refused)["rpc.grpc.status_code"] == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert attributes(failed)["error.type"] == "ENGINE_ERROR"
        assert attributes(failed)["gen_ai.usage.output_tokens"] == 2
        assert attributes(cancelled)["octavo.cancelled"]
        assert attributes(cancelled)["gen_ai.response.finish_reasons"] == ("cancelled",)
        stream.call.cancel()


async def test_a_client_that_goes_away_ends_its_spans_also_before_tokenization_ends() -> None:
    async with traced() as (served, exporter):
        go_on = asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow(*_: Any) -> list[int]:
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(10)
            return [1]

        served.server.replica.max_prompt_bytes = 10**9
        served.server.replica.tokenizer.encode = slow  # type: ignore[method-assign]
        stream = Stream(served)
        await stream.send(start_message("x" * 100_000, request_id="a"))
        await until(lambda: len(served.server.replica.live) == 1)
        stream.call.cancel()
        await until(lambda: len(exporter.get_finished_spans()) == 1)
        assert attributes(only(exporter))["octavo.cancelled"]
        go_on.set()


async def test_no_text_is_told() -> None:
    async with traced() as (served, exporter):
        stop = pb.StopCriteria(max_tokens=5, sequences=[SECRET])
        cache = pb.CacheOptions(salt=SECRET)
        await run_unary(served, pb.StartGeneration(text=SECRET, stop=stop, cache=cache))
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=SECRET)])
        await run_stream(served, start(chat=chat, max_tokens=30))
        told = "".join(span.to_json() for span in exporter.get_finished_spans())
        assert "generate fake" in told
        assert SECRET not in told
        assert "abcde" not in told


@pytest.mark.parametrize(
    ("endpoint", "env", "wanted"),
    [
        (None, {}, False),
        ("http://localhost:4317", {}, True),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, True),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4317"}, True),
        (None, {"OTEL_TRACES_EXPORTER": "otlp"}, True),
        (None, {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, False),
        ("http://localhost:4317", {"OTEL_SDK_DISABLED": "true"}, False),
        (None, {"OTEL_SERVICE_NAME": "x"}, False),
    ],
)
def test_a_flag_or_the_standard_variables_ask_for_traces(
    endpoint: str | None, env: dict[str, str], wanted: bool
) -> None:
    assert wants_traces(endpoint, env) is wanted


@pytest.mark.parametrize("endpoint", ["garbage", "localhost:4317", "http://", "http://host:port", "ftp://host:1"])
def test_an_endpoint_where_no_collector_can_be_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^--otlp-traces-endpoint {endpoint}: is not http://HOST:PORT"):
        check_traces(endpoint)


def test_without_the_packages_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_traces(None)
    assert isinstance(open_spans(None, "m"), NoSpans)
    with pytest.raises(ConfigurationError, match=r"--otlp-traces-endpoint needs .*pip install 'octavo\[otel\]'"):
        check_traces("http://localhost:4317")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    with pytest.raises(ConfigurationError, match="OTEL_ variables ask for traces"):
        open_spans(None, "m")


async def test_missing_packages_are_exit_code_2_before_the_model_loads(tmp_path: Path) -> None:
    hidden = tmp_path / "sitecustomize.py"
    hidden.write_text("import sys\nsys.modules['opentelemetry.sdk'] = None\n")
    code, out, err = await run_command(
        *(sys.executable, "-m", "service", "serve", "--model", "demo"),
        *("--otlp-traces-endpoint", "http://localhost:4317", "--port", "0"),
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )
    assert (code, out) == (2, "")
    assert err.splitlines() == ["octavo: --otlp-traces-endpoint needs OpenTelemetry: pip install 'octavo[otel]'"]


async def test_nothing_of_it_is_loaded_unless_asked_for() -> None:
    script = "import sys, service.serve, service.server; print([m for m in sys.modules if 'opentelemetry' in m])"
    code, out, err = await run_command(sys.executable, "-c", script)
    assert (code, out.strip()) == (0, "[]"), err


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """What an OpenTelemetry collector gets."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    async def Export(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()


async def test_spans_reach_a_collector_before_the_server_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    collector, receiving = Collector(), aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, receiving)
    port = receiving.add_insecure_port("127.0.0.1:0")
    await receiving.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    engine = FakeEngineClient()
    await engine.start()
    async with running_server(
        Server(engine, byte_tokenizer(), ServiceConfig(port=0, drain_grace=0.0)), engine
    ) as served:
        await run_stream(served, start(max_tokens=2))
    (request,) = collector.requests
    (spans,) = request.resource_spans
    resource = {item.key: item.value.string_value for item in spans.resource.attributes}
    assert (resource["service.name"], resource["deployment.environment.name"]) == ("octavo", "test")
    assert spans.scope_spans[0].spans[0].name == "generate fake"
    await receiving.stop(0)


async def test_a_collector_that_is_not_there_delays_no_end() -> None:
    engine = FakeEngineClient()
    await engine.start()
    config = ServiceConfig(port=0, drain_grace=0.0, otlp_traces_endpoint="http://127.0.0.1:9")
    async with running_server(Server(engine, byte_tokenizer(), config), engine) as served:
        await run_stream(served, start(max_tokens=2))
        began = time.monotonic()
    assert time.monotonic() - began < 8
