"""OpenTelemetry traces: a span a request, below its caller's. The packages are loaded only if they are asked for."""

from __future__ import annotations

import importlib.util
import os
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit

import grpc
from grpc import aio

from engine import ConfigurationError, FinishReason, Timing, Usage
from service.request import Generation, TokenPrompt
from service.spans import NoSpans, RequestSpan, Spans
from service.status import Failure
from service.version import version

# W3C Trace Context, as it came with the call.
PARENT: ContextVar[Mapping[str, str]] = ContextVar("octavo_trace_parent", default={})  # noqa: B039  # never written to

_PARENT_KEYS = ("traceparent", "tracestate")
_PACKAGES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def wants_traces(endpoint: str | None, env: Mapping[str, str] = os.environ) -> bool:
    """Whether a flag or the standard variables ask for traces."""
    if env.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if endpoint:
        return True
    exporter = env.get("OTEL_TRACES_EXPORTER", "")
    return exporter == "otlp" or (not exporter and any(env.get(name) for name in _ENDPOINTS))


def check_traces(endpoint: str | None) -> None:
    """Raises ConfigurationError if traces are asked for and cannot be made, or if no collector can be at `endpoint`."""
    if endpoint:
        _check_endpoint(endpoint)
    if wants_traces(endpoint) and not all(_is_installed(name) for name in _PACKAGES):
        asked = "--otlp-traces-endpoint needs" if endpoint else "the OTEL_ variables ask for traces, which need"
        raise ConfigurationError(f"{asked} OpenTelemetry: pip install 'octavo[otel]'")


def _check_endpoint(endpoint: str) -> None:
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # no number of a port
        usable = False
    if not usable:
        raise ConfigurationError(f"--otlp-traces-endpoint {endpoint}: is not http://HOST:PORT or https://HOST:PORT")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def open_spans(endpoint: str | None, model: str) -> Spans:
    """Spans for the collector at `endpoint`, or wherever the standard variables say; none if nobody asked. Raises
    ConfigurationError."""
    check_traces(endpoint)
    if not wants_traces(endpoint):
        return NoSpans()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return OpenTelemetrySpans(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)), model)


class OpenTelemetrySpans:
    """Sampling, resource and exporter follow OpenTelemetry's own environment variables."""

    def __init__(self, processor: Any, model: str) -> None:
        """processor: a SpanProcessor."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        said = Resource.create()  # by the environment
        ours = {"service.version": version(), "service.instance.id": uuid.uuid4().hex}
        if str(said.attributes["service.name"]).startswith("unknown_service"):
            ours["service.name"] = "octavo"
        # Not at exit by itself, which would wait for a collector that does not answer.
        self._provider = TracerProvider(resource=said.merge(Resource(ours)), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("octavo")
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    def begin(self, generation: Generation, instance_id: str) -> RequestSpan:
        from opentelemetry.trace import SpanKind

        parent = PARENT.get()
        span = self._tracer.start_span(
            f"generate {self._model}",
            context=self._propagator.extract(parent) if parent else None,
            kind=SpanKind.SERVER,
            attributes=_request_attributes(generation, self._model) | {"octavo.engine_instance_id": instance_id},
            start_time=_wall_clock(generation.arrival),
        )
        return OpenTelemetrySpan(span)

    def refused(self, request_id: str, failure: Failure, arrival: float, instance_id: str) -> None:
        span = self.begin(Generation(request_id, TokenPrompt([]), arrival), instance_id)
        span.ended(failure, Usage(), Timing(), [], cancelled=False)

    def close(self, seconds: float) -> None:
        # A collector that does not answer is waited for in a thread that holds up nobody's exit.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(seconds)


class OpenTelemetrySpan:
    """Events: `queued` when the engine took the request, `prefill` when it was first scheduled, `decode` when its first
    token came."""

    def __init__(self, span: Any) -> None:
        self._span = span

    def admitted(self, engine_id: str, queue_position: int) -> None:
        self._span.set_attribute("octavo.engine_request_id", engine_id)
        self._span.add_event("queued", {"octavo.queue_position": queue_position})

    def first_token(self) -> None:
        self._span.add_event("decode")

    def ended(
        self, failure: Failure | None, usage: Usage, timing: Timing, finish: Sequence[FinishReason], *, cancelled: bool
    ) -> None:
        from opentelemetry.trace import StatusCode

        span = self._span
        if timing.total:
            span.add_event("prefill", timestamp=_wall_clock(time.monotonic() - timing.total + timing.queued))
        span.set_attributes(
            {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.response.finish_reasons": [reason.name.lower() for reason in finish],
                "octavo.usage.cached_input_tokens": usage.cached_prompt_tokens,
                "octavo.preemptions": timing.preemptions,
                "octavo.cancelled": cancelled,
                "rpc.grpc.status_code": 0 if failure is None else failure.code.value[0],
            }
        )
        if failure is not None:
            span.set_attribute("error.type", failure.reason)
            span.set_status(StatusCode.ERROR, failure.reason)
        span.end()


def _request_attributes(generation: Generation, model: str) -> dict[str, Any]:
    """Sizes and settings, never text: neither prompt nor stop sequences, grammar or salt."""
    sampling, stop = generation.sampling, generation.stop
    attributes: dict[str, Any] = {
        "rpc.system": "grpc",
        "rpc.service": "octavo.v1.GenerationService",
        "gen_ai.operation.name": "generate_content",
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": model,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.choice.count": sampling.n,
        "octavo.request_id": generation.request_id,
        "octavo.priority": generation.priority,
    }
    if stop.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = stop.max_tokens
    return attributes


def _wall_clock(monotonic: float) -> int:
    """Nanoseconds since 1970 of a `time.monotonic()` time."""
    return time.time_ns() - round((time.monotonic() - monotonic) * 1e9)


class TraceParents(aio.ServerInterceptor):  # type: ignore[type-arg]  # no generic class at run time
    """Tells a call's handler what trace it belongs to."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        metadata = handler_call_details.invocation_metadata or ()
        PARENT.set({key: str(value) for key, value in metadata if key in _PARENT_KEYS})
        return await continuation(handler_call_details)
