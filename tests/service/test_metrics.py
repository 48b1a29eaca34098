"""Prometheus: what orchestrators and dashboards read."""

from __future__ import annotations

import asyncio
import threading
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine import EngineState, FailureKind
from service.config import ServiceConfig
from service.metrics import OBSERVED_AT_ONCE, Histogram
from tests.service.calls import refusal, run_stream, start
from tests.service.fake_engine import FakeEngineClient, Script
from tests.service.server import Running, free_port, running


async def scrape(served: Running) -> dict[str, float]:
    """Sample name with its labels -> value."""
    url = f"http://127.0.0.1:{served.server.config.metrics_port}/metrics"
    body = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read().decode())
    samples = (sample for family in text_string_to_metric_families(body) for sample in family.samples)
    return {
        sample.name + "".join(f"{{{key}={value}}}" for key, value in sorted(sample.labels.items())): sample.value
        for sample in samples
    }


async def test_scrape_of_a_replica_that_served() -> None:
    async with running(FakeEngineClient(), ServiceConfig(drain_grace=0.0, metrics_port=free_port())) as served:
        await run_stream(served, start("hello", max_tokens=5))
        await refusal(served, start(""))
        served.engine.stats_overrides = {"queued_requests": 2, "cached_blocks": 24, "cached_prompt_tokens": 7}
        values = await scrape(served)
        assert values["octavo_ready"] == 1
        assert values["octavo_requests_running"] == 0
        assert values["octavo_requests_waiting"] == 2
        assert values["octavo_kv_blocks"] == 1024
        assert values["octavo_kv_block_size_tokens"] == 16
        assert values["octavo_kv_evictable_blocks"] == 24
        assert values["octavo_cached_prompt_tokens_total"] == 7
        assert values["octavo_generated_tokens_total"] == 5
        assert values["octavo_requests_ended_total{outcome=finished}"] == 1
        assert values["octavo_requests_ended_total{outcome=INVALID_PARAMETER}"] == 1
        assert values["octavo_time_to_first_token_seconds_count"] == 1
        assert values["octavo_inter_token_seconds_count"] == 4
        assert values["octavo_completion_tokens_sum"] == 5
        assert values["octavo_step_seconds_count"] >= 5
        for name in ("octavo_preemptions_total", "octavo_integrity_errors_total", "octavo_heartbeat_age_seconds"):
            assert name in values
        served.engine.die()
        assert (await scrape(served))["octavo_ready"] == 0


async def test_figures_of_a_dead_engine_are_not_told_and_come_back_with_the_next() -> None:
    async with running(FakeEngineClient(), ServiceConfig(drain_grace=0.0, metrics_port=free_port())) as served:
        await run_stream(served, start("hello", max_tokens=5))
        before = await scrape(served)
        served.engine.die()
        after = await scrape(served)
        gone = {name.partition("{")[0] for name in before.keys() - after.keys()}
        assert gone == {
            "octavo_engine_info",
            "octavo_requests_running",
            "octavo_requests_waiting",
            "octavo_prompt_tokens_waiting",
            "octavo_uncached_prompt_tokens_waiting",
            "octavo_queue_delay_seconds",
            "octavo_kv_block_size_tokens",
            "octavo_kv_blocks",
            "octavo_kv_free_blocks",
            "octavo_kv_evictable_blocks",
            "octavo_kv_swapped_blocks",
            "octavo_kv_utilization",
            "octavo_prefill_tokens_per_second",
            "octavo_decode_tokens_per_second",
            "octavo_heartbeat_age_seconds",
        }
        assert after["octavo_generated_tokens_total"] == 5
        served.engine.set_state(EngineState.READY)
        assert (await scrape(served)).keys() >= before.keys()


FIGURES = {
    "step": "octavo_steps_total",
    "prompt_tokens": "octavo_prompt_tokens_received_total",
    "cached_prompt_tokens": "octavo_cached_prompt_tokens_total",
    "generated_tokens": "octavo_generated_tokens_total",
    "preemptions": "octavo_preemptions_total",
    "integrity_errors": "octavo_integrity_errors_total",
    "running_requests": "octavo_requests_running",
    "queued_requests": "octavo_requests_waiting",
    "queued_prompt_tokens": "octavo_prompt_tokens_waiting",
    "queued_uncached_tokens": "octavo_uncached_prompt_tokens_waiting",
    "queue_delay_seconds": "octavo_queue_delay_seconds",
    "free_blocks": "octavo_kv_free_blocks",
    "cached_blocks": "octavo_kv_evictable_blocks",
    "swapped_blocks": "octavo_kv_swapped_blocks",
    "prefill_tokens_per_second": "octavo_prefill_tokens_per_second",
    "decode_tokens_per_second": "octavo_decode_tokens_per_second",
}


async def test_every_figure_of_the_engine_is_exported_as_itself() -> None:
    async with running(FakeEngineClient(), ServiceConfig(drain_grace=0.0, metrics_port=free_port())) as served:
        served.engine.stats_overrides = {name: 100 + place for place, name in enumerate(FIGURES)}
        values = await scrape(served)
        assert {name: values[metric] for name, metric in FIGURES.items()} == served.engine.stats_overrides
        held = 1024 - served.engine.stats.free_blocks - served.engine.stats.cached_blocks
        assert values["octavo_kv_utilization"] == held / 1024


@pytest.mark.parametrize("kind", list(FailureKind))
async def test_every_failure_counts_by_its_reason(kind: FailureKind) -> None:
    async with running(FakeEngineClient(), ServiceConfig(drain_grace=0.0, metrics_port=free_port())) as served:
        served.engine.plan = lambda _: Script(fail_after=0, fail_kind=kind)
        status = await refusal(served, start("x"))
        values = await scrape(served)
        ended = {name: value for name, value in values.items() if name.startswith("octavo_requests_ended_total")}
        assert ended == {f"octavo_requests_ended_total{{outcome={status.reason}}}": 1}
        assert values["octavo_request_seconds_count"] == 1


async def test_other_paths_are_not_found() -> None:
    async with running(config=ServiceConfig(drain_grace=0.0, metrics_port=free_port())) as served:
        for path in ("", "metric", "metrics/", "favicon.ico"):
            url = f"http://127.0.0.1:{served.server.config.metrics_port}/{path}"
            with pytest.raises(urllib.error.HTTPError, match="404"):
                await asyncio.to_thread(urllib.request.urlopen, url, timeout=5)
        assert (await scrape(served))["octavo_ready"] == 1


async def test_metrics_end_with_the_server() -> None:
    config = ServiceConfig(drain_grace=0.0, metrics_port=free_port())
    for _ in range(2):  # the port is free again
        async with running(config=config) as served:
            assert (await scrape(served))["octavo_ready"] == 1


def test_histogram_counts_into_cumulative_buckets() -> None:
    histogram = Histogram("h", "help", (1, 2))
    for value in (0.5, 1.0, 1.5, 3.0):
        histogram.observe(value)
    histogram.observe(2.0, times=3)
    samples = {s.labels.get("le", s.name): s.value for s in histogram.family().samples}
    assert samples == {"1.0": 2, "2.0": 6, "+Inf": 7, "h_count": 7, "h_sum": 12.0}


def test_histogram_loses_nothing_while_it_is_scraped() -> None:
    histogram, done = Histogram("h", "help", (1, 2)), threading.Event()

    def scrape_all_the_time() -> None:
        while not done.is_set():
            histogram.family()

    scraping = threading.Thread(target=scrape_all_the_time)
    scraping.start()
    for _ in range(5 * OBSERVED_AT_ONCE):
        histogram.observe(1.5)
    done.set()
    scraping.join()
    samples = {s.labels.get("le", s.name): s.value for s in histogram.family().samples}
    assert samples["1.0"] == 0
    assert samples["2.0"] == samples["+Inf"] == histogram.count == 5 * OBSERVED_AT_ONCE
