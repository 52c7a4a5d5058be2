"""Metrics: what is scraped is what the table says."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from enginectl.builtin.prometheus import (
    MAX_ADAPTERS,
    METRICS,
    Histogram,
    PrometheusFrontend,
    PrometheusObserver,
    build_frontend,
    build_observer,
)
from enginectl.config import EngineConfig, ServerConfig
from enginectl.errors import ConfigError
from enginectl.server import build_app
from enginectl.testing.fake_client import FakeClient, fake_info
from enginectl.types import EngineStats, FinishedRequest, FinishReason, Timings, Usage

ENGINE = EngineConfig(model="fake/model")


def finished(**changes: Any) -> FinishedRequest:
    """A request of 11 output tokens: queued 0.25 s, first token after 0.5 s, ended after 1.5 s."""
    values: dict[str, Any] = {
        "request_id": "r",
        "reasons": (FinishReason.STOP,),
        "usage": Usage(100, 11, 50),
        "timings": (Timings(10.0, 10.25, 10.5, 11.5, 0),),
        "max_tokens": 64,
    }
    return FinishedRequest(**(values | changes))


class WithAdapters(FakeClient):
    """An engine that serves adapters."""

    def __init__(self) -> None:
        super().__init__(info=fake_info(table=(("adapter", "sgmv", "sgmv", "dist", "1"),)))

    def open_adapters(self) -> tuple[frozenset[str], frozenset[str]]:
        return frozenset({"billing", "support"}), frozenset({"legal"})


async def scrape(observer: PrometheusObserver, *, client: FakeClient | None = None, **options: Any) -> dict[str, Any]:
    """Families by name."""
    app = build_app(client or FakeClient(), None, ENGINE, ServerConfig(**options), [PrometheusFrontend()], [observer])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        response = await http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return {family.name: family for family in text_string_to_metric_families(response.text)}


def value(families: dict[str, Any], name: str, **labels: str) -> float:
    """The one sample with these labels."""
    samples = [sample for family in families.values() for sample in family.samples if sample.name == name]
    found = [sample.value for sample in samples if labels.items() <= sample.labels.items()]
    assert len(found) == 1, (name, labels, samples)
    return float(found[0])


@pytest.mark.parametrize("prefix", ["enginectl", "vllm"])
async def test_the_scrape_has_exactly_the_metrics_of_the_table(prefix: str) -> None:
    observer = build_observer(None)  # type: ignore[arg-type]
    observer.on_finished(finished())
    observer.on_stats(EngineStats(drafted_by_position=(3,), accepted_by_position=(2,)))
    families = await scrape(observer, client=WithAdapters(), metrics_prefix=prefix)
    assert list(families) == [f"{prefix}:{metric.name}" for metric in METRICS]
    for metric in METRICS:
        family = families[f"{prefix}:{metric.name}"]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert labels == {"model_name", *metric.labels}


def test_the_table_has_the_names_that_dashboards_read() -> None:
    """The list in the compatibility document."""
    documented = """num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries prefix_cache_hits
        num_preemptions prompt_tokens generation_tokens request_success time_to_first_token_seconds
        inter_token_latency_seconds request_time_per_output_token_seconds e2e_request_latency_seconds
        request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds iteration_tokens_total
        spec_decode_num_draft_tokens spec_decode_num_accepted_tokens lora_requests_info cache_config_info"""
    assert set(documented.split()) <= {metric.name for metric in METRICS}


async def test_state_comes_from_the_newest_statistics() -> None:
    observer = PrometheusObserver()
    observer.on_stats(EngineStats(num_steps=1, step_tokens=8))
    observer.on_stats(
        EngineStats(
            num_running=3,
            num_waiting=2,
            num_blocks=40,
            num_blocks_in_use=10,
            num_blocks_idle=5,
            num_preemptions=4,
            num_prompt_tokens=1000,
            num_generation_tokens=99,
            prefix_queries=500,
            prefix_hits=250,
            num_drafted=20,
            num_accepted=15,
            drafted_by_position=(12, 8),
            accepted_by_position=(10, 5),
            num_steps=2,
            step_tokens=9,
        )
    )
    families = await scrape(observer, served_model_name=("shown", "other"))
    expected = {
        "num_requests_running": 3,
        "num_requests_waiting": 2,
        "kv_cache_usage_perc": 0.25,
        "num_preemptions_total": 4,
        "prompt_tokens_total": 1000,
        "generation_tokens_total": 99,
        "prefix_cache_queries_total": 500,
        "prefix_cache_hits_total": 250,
        "spec_decode_num_draft_tokens_total": 20,
        "spec_decode_num_accepted_tokens_total": 15,
        "iteration_tokens_total_count": 2,
        "iteration_tokens_total_sum": 17,
    }
    for name, number in expected.items():
        assert value(families, f"enginectl:{name}", model_name="shown") == number
    for position, (drafted, accepted) in enumerate(((12, 10), (8, 5))):
        per_position = {"position": str(position)}
        assert value(families, "enginectl:spec_decode_num_draft_tokens_per_pos_total", **per_position) == drafted
        assert value(families, "enginectl:spec_decode_num_accepted_tokens_per_pos_total", **per_position) == accepted
    assert value(families, "enginectl:iteration_tokens_total_bucket", le="8.0") == 1
    assert value(families, "enginectl:cache_config_info", num_gpu_blocks="40", block_size="16") == 1


async def test_times_of_finished_requests() -> None:
    observer = PrometheusObserver()
    observer.on_finished(finished())
    families = await scrape(observer)
    expected = {
        "request_queue_time_seconds": 0.25,
        "request_prefill_time_seconds": 0.25,
        "time_to_first_token_seconds": 0.5,
        "request_decode_time_seconds": 1.0,
        "e2e_request_latency_seconds": 1.5,
        "request_time_per_output_token_seconds": 0.1,
        "inter_token_latency_seconds": 1.0,
        "request_prompt_tokens": 100,
        "request_generation_tokens": 11,
        "request_params_max_tokens": 64,
        "request_params_n": 1,
    }
    for name, total in expected.items():
        assert value(families, f"enginectl:{name}_sum", adapter="") == pytest.approx(total), name
    assert value(families, "enginectl:inter_token_latency_seconds_count", adapter="") == 10
    assert value(families, "enginectl:e2e_request_latency_seconds_count", adapter="") == 1
    assert value(families, "enginectl:request_success_total", finished_reason="stop", adapter="") == 1


async def test_choices_and_adapters_are_told_apart() -> None:
    observer = PrometheusObserver()
    reasons = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.STOP)
    timings = (Timings(10.0, 10.0, 10.5, 11.0, 0), Timings(10.0, 10.1, 10.6, 12.0, 1))
    observer.on_finished(finished(reasons=reasons, timings=timings, n=3, adapter="billing"))
    families = await scrape(observer)
    assert value(families, "enginectl:request_success_total", finished_reason="stop", adapter="billing") == 2
    assert value(families, "enginectl:request_success_total", finished_reason="length", adapter="billing") == 1
    assert value(families, "enginectl:e2e_request_latency_seconds_sum", adapter="billing") == 2.0
    assert value(families, "enginectl:e2e_request_latency_seconds_count", adapter="") == 0


async def test_series_of_adapters_are_bounded() -> None:
    """A server that had thousands of adapters kept a label, and thirty series, for each of them."""
    observer = PrometheusObserver()
    for i in range(3 * MAX_ADAPTERS):
        observer.on_finished(finished(adapter=f"a{i}"))
        observer.on_finished(finished(adapter="used all the time"))
        observer.on_finished(finished())
    names = {"", "used all the time", *(f"a{i}" for i in range(2 * MAX_ADAPTERS + 1, 3 * MAX_ADAPTERS))}
    assert set(observer.histograms("e2e_request_latency_seconds")) == names
    assert {adapter for _, adapter in observer.successes} == names


async def test_a_request_that_never_ran_has_no_times() -> None:
    observer = PrometheusObserver()
    timings = (Timings(10.0, 0.0, 0.0, 11.0, 0),)
    observer.on_finished(finished(reasons=(FinishReason.ABORT,), timings=timings, usage=Usage(5, 0)))
    observer.on_finished(finished(reasons=(FinishReason.ERROR,), timings=(), usage=Usage(5, 0)))
    families = await scrape(observer)
    assert value(families, "enginectl:request_success_total", finished_reason="abort") == 1
    assert value(families, "enginectl:e2e_request_latency_seconds_count") == 0


def test_histogram_buckets_are_cumulative_and_weighted() -> None:
    histogram = Histogram((1, 2))
    histogram.observe(1)
    histogram.observe(1.5, 3)
    histogram.observe(9)
    assert histogram.exposed() == ([("1.0", 1.0), ("2.0", 4.0), ("+Inf", 5.0)], 14.5)


def test_two_observers_share_nothing() -> None:
    first, second = PrometheusObserver(), PrometheusObserver()
    first.on_finished(finished())
    assert second.successes == {}


@pytest.mark.parametrize("prefix", ["", "two words", "9x", "a:b"])
async def test_a_prefix_that_is_no_name_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match="metrics_prefix"):
        await scrape(PrometheusObserver(), metrics_prefix=prefix)


def test_metrics_need_an_observer() -> None:
    with pytest.raises(ConfigError, match="observer"):
        build_app(FakeClient(), None, ENGINE, ServerConfig(), [build_frontend(None)])  # type: ignore[arg-type]


async def test_openmetrics_is_served_to_those_who_ask() -> None:
    app = build_app(FakeClient(), None, ENGINE, ServerConfig(), [PrometheusFrontend()], [PrometheusObserver()])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        response = await http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")


async def test_adapters_of_open_requests() -> None:
    name, before = "enginectl:lora_requests_info", time.time()
    families = await scrape(PrometheusObserver(), client=WithAdapters())
    labels = {"running_lora_adapters": "billing,support", "waiting_lora_adapters": "legal", "max_lora": "4"}
    assert value(families, name, **labels) >= before
    assert families[name].samples
    without = await scrape(PrometheusObserver())
    assert without[name].samples == []
