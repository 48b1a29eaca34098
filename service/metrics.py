"""Prometheus metrics: gauges and counters read from the engine's snapshots, histograms of what clients feel."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from engine import EngineInfo, EngineState, EngineStats, Timing, Usage
from service.ports import resolved
from service.status import Failure

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

POLL_SECONDS = 0.1
OBSERVED_AT_ONCE = 4096
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
FAULTS = ("ENGINE_ERROR", "ENGINE_DIED", "ENGINE_STALLED")
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class Histogram:
    """Counts in fixed buckets. prometheus_client's own costs microseconds an observation; this is paid per token, and
    sorts what it was given only when it is asked or has enough."""

    def __init__(self, name: str, documentation: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.documentation = documentation
        self._bounds = tuple(float(bound) for bound in bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._observed: list[float] = []
        self._sorting = threading.Lock()

    @property
    def count(self) -> int:
        return sum(self._counts) + len(self._observed)

    def observe(self, value: float, times: int = 1) -> None:
        observed = self._observed
        if times == 1:
            observed.append(value)
        else:
            observed += [value] * times
        if len(observed) >= OBSERVED_AT_ONCE:
            self._sort()

    def _sort(self) -> None:
        with self._sorting:
            self._count(self._take())

    def _take(self) -> list[float]:
        """What was observed. Scrapes come from other threads: the list stays the same, and appending does not wait."""
        observed = self._observed[:]
        del self._observed[: len(observed)]
        return observed

    def _count(self, observed: list[float]) -> None:
        self._sum += sum(observed)
        observed.sort()
        below = 0
        for index, bound in enumerate(self._bounds):
            upto = bisect_right(observed, bound)
            self._counts[index] += upto - below
            below = upto
        self._counts[-1] += len(observed) - below

    def family(self) -> HistogramMetricFamily:
        self._sort()
        labels = [str(bound) for bound in self._bounds] + ["+Inf"]
        cumulative, buckets = 0, []
        for label, count in zip(labels, self._counts, strict=True):
            cumulative += count
            buckets.append((label, float(cumulative)))
        return HistogramMetricFamily(self.name, self.documentation, buckets=buckets, sum_value=self._sum)


class EngineView(Protocol):
    """What of the engine is exported."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def state(self) -> EngineState: ...


class Metrics:
    """One replica's metrics, in a registry of their own."""

    def __init__(self, engine: EngineView, ready: Callable[[], bool]) -> None:
        self.registry = CollectorRegistry()
        self.time_to_first_token = Histogram(
            "octavo_time_to_first_token_seconds", "From arrival to the first token.", SECONDS
        )
        self.inter_token = Histogram(
            "octavo_inter_token_seconds",
            "Between tokens of a candidate; k tokens of one step count as k equal gaps.",
            SECONDS,
        )
        self.end_to_end = Histogram(
            "octavo_request_seconds", "From arrival to the last event, failed ones too.", SECONDS
        )
        self.queued = Histogram("octavo_queue_seconds", "From arrival to the first scheduling.", SECONDS)
        self.step = Histogram("octavo_step_seconds", "Duration of engine steps.", SECONDS)
        self.step_tokens = Histogram("octavo_step_tokens", "Tokens generated in one engine step.", TOKENS)
        self.prompt_tokens = Histogram("octavo_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self.completion_tokens = Histogram("octavo_completion_tokens", "Output tokens of a request.", TOKENS)
        self._outcomes: dict[str, int] = {}
        self._engine = engine
        self._ready = ready
        self._seen = EngineStats()
        self.registry.register(self)

    @property
    def histograms(self) -> tuple[Histogram, ...]:
        return (
            self.time_to_first_token,
            self.inter_token,
            self.end_to_end,
            self.queued,
            self.step,
            self.step_tokens,
            self.prompt_tokens,
            self.completion_tokens,
        )

    def timer(self, arrival: float) -> RequestTimer:
        return RequestTimer(self, arrival)

    def refused(self, failure: Failure, arrival: float) -> float:
        """Notes a request that got no further. Returns the seconds since its arrival."""
        elapsed = time.monotonic() - arrival
        self.end_to_end.observe(elapsed)
        self.outcome(failure.reason)
        return elapsed

    def outcome(self, name: str) -> None:
        self._outcomes[name] = self._outcomes.get(name, 0) + 1

    @property
    def ended(self) -> int:
        return sum(self._outcomes.values())

    @property
    def faults(self) -> int:
        """Requests that ended by a fault of this replica."""
        return sum(self._outcomes.get(reason, 0) for reason in FAULTS)

    def outcomes(self, name: str) -> int:
        """Requests that ended so: `finished`, `cancelled` or a failure's reason."""
        return self._outcomes.get(name, 0)

    def on_stats(self, stats: EngineStats) -> None:
        """Observes the step behind a snapshot; heartbeats repeat a step and count once."""
        steps = stats.step - self._seen.step
        if steps > 0:
            self.step.observe(stats.last_step_seconds)
            tokens = stats.generated_tokens - self._seen.generated_tokens
            self.step_tokens.observe(max(0, tokens) / steps)
        self._seen = stats

    def collect(self) -> Iterable[Metric]:
        """Called by the registry at every scrape, from its own thread."""
        yield GaugeMetricFamily("octavo_ready", "1 while new requests are served.", value=float(self._ready()))
        if self._engine.state is EngineState.READY:  # the last figures of one that is gone are nobody's
            yield from self._gauges(self._engine.info, self._engine.stats)
        yield from self._counters(self._engine.stats)
        for histogram in self.histograms:
            yield histogram.family()

    def _gauges(self, info: EngineInfo, stats: EngineStats) -> Iterable[Metric]:
        yield InfoMetricFamily(
            "octavo_engine",
            "The engine behind this replica.",
            {
                "instance_id": info.instance_id,
                "model": info.model,
                "device": info.device,
                "dtype": info.dtype,
                "block_size": str(info.block_size),
                "num_blocks": str(info.num_blocks),
            },
        )
        held = info.num_blocks - stats.free_blocks - stats.cached_blocks
        for name, documentation, value in (
            ("octavo_requests_running", "Requests that take part in steps.", stats.running_requests),
            ("octavo_requests_waiting", "Requests in the queue.", stats.queued_requests),
            ("octavo_prompt_tokens_waiting", "Prompt tokens in the queue.", stats.queued_prompt_tokens),
            (
                "octavo_uncached_prompt_tokens_waiting",
                "Of these, those that are expected to be computed.",
                stats.queued_uncached_tokens,
            ),
            ("octavo_queue_delay_seconds", "Estimated wait of a request that comes now.", stats.queue_delay_seconds),
            ("octavo_kv_block_size_tokens", "Tokens in a KV block.", info.block_size),
            ("octavo_kv_blocks", "KV blocks of the pool.", info.num_blocks),
            ("octavo_kv_free_blocks", "KV blocks that hold nothing.", stats.free_blocks),
            ("octavo_kv_evictable_blocks", "KV blocks held by the prefix cache only.", stats.cached_blocks),
            ("octavo_kv_swapped_blocks", "KV blocks in host memory.", stats.swapped_blocks),
            ("octavo_kv_utilization", "Share of KV blocks held by requests.", held / max(1, info.num_blocks)),
            ("octavo_prefill_tokens_per_second", "Recent prefill rate.", stats.prefill_tokens_per_second),
            ("octavo_decode_tokens_per_second", "Recent decode rate.", stats.decode_tokens_per_second),
            (
                "octavo_heartbeat_age_seconds",
                "Age of the newest engine heartbeat.",
                time.monotonic() - stats.heartbeat,
            ),
        ):
            yield GaugeMetricFamily(name, documentation, value=float(value))

    def _counters(self, stats: EngineStats) -> Iterable[Metric]:
        for name, documentation, value in (
            ("octavo_steps", "Engine steps.", stats.step),
            ("octavo_prompt_tokens_received", "Prompt tokens of requests.", stats.prompt_tokens),
            (
                "octavo_cached_prompt_tokens",
                "Prompt tokens found in the prefix cache.",
                stats.cached_prompt_tokens,
            ),
            ("octavo_generated_tokens", "Tokens generated.", stats.generated_tokens),
            ("octavo_preemptions", "Preemptions of running requests.", stats.preemptions),
            ("octavo_integrity_errors", "KV accounting faults; 0 or a bug.", stats.integrity_errors),
        ):
            yield CounterMetricFamily(name, documentation, value=float(value))
        ended = CounterMetricFamily("octavo_requests_ended", "Requests by how they ended.", labels=["outcome"])
        for outcome, count in sorted(self._outcomes.items()):
            ended.add_metric([outcome], float(count))
        yield ended


class RequestTimer:
    """Times one request. Times are `time.monotonic()` seconds."""

    def __init__(self, metrics: Metrics, arrival: float) -> None:
        self._metrics = metrics
        self._gap = metrics.inter_token.observe
        self._arrival = arrival
        self._first_token_at: float | None = None

    def elapsed(self) -> float:
        return time.monotonic() - self._arrival

    def tokens(self, count: int, last_token_at: float) -> float:
        """Notes tokens of a candidate whose last ones came at `last_token_at` (0: none yet). Returns the time."""
        now = time.monotonic()
        if last_token_at:
            self._gap((now - last_token_at) / count, count)
        elif self._first_token_at is None:
            self._first_token_at = now
            self._metrics.time_to_first_token.observe(now - self._arrival)
        return now

    def ended(self, failure: Failure | None, usage: Usage, timing: Timing, *, cancelled: bool) -> None:
        metrics = self._metrics
        metrics.end_to_end.observe(self.elapsed())
        if failure is not None:
            metrics.outcome(failure.reason)
            return
        metrics.outcome("cancelled" if cancelled else "finished")
        metrics.queued.observe(timing.queued)
        metrics.prompt_tokens.observe(usage.prompt_tokens)
        metrics.completion_tokens.observe(usage.completion_tokens)


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Answers scrapes at http://host:port/metrics from threads. Raises OSError if the port is taken."""

    daemon_threads = True

    def __init__(self, metrics: Metrics, host: str, port: int) -> None:
        self.address_family, address = resolved(host, port)
        super().__init__(address, QuietHandler)
        self.set_app(only_metrics(make_wsgi_app(metrics.registry)))
        threading.Thread(target=self.serve_forever, args=(POLL_SECONDS,), daemon=True).start()

    def server_bind(self) -> None:
        # The base class looks the host's name up, which may take seconds.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def stop(self) -> None:
        """Takes POLL_SECONDS at most."""
        self.shutdown()
        self.server_close()


class QuietHandler(WSGIRequestHandler):
    """Logs no request."""

    def log_message(self, format: str, *args: object) -> None:
        pass


def only_metrics(application: WSGIApplication) -> WSGIApplication:
    """404 beside /metrics: a scrape of a mistyped path must not look like a good one."""

    def route(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ.get("PATH_INFO") == "/metrics":
            return application(environ, start_response)
        start_response("404 Not Found", [("Content-Type", "text/plain")])
        return [b"metrics are at /metrics\n"]

    return route
