"""Prometheus metrics: an observer that counts, and GET /metrics that shows what it counted.

Nothing here is global: each observer has its own numbers, and names get their prefix and `model_name` when scraped.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector, CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from enginectl.config import EngineConfig
from enginectl.context import BuildContext
from enginectl.errors import ConfigError
from enginectl.interfaces.frontend import Frontend, FrontendContext
from enginectl.interfaces.observer import Observer
from enginectl.provider import Role
from enginectl.types import EngineStats, FinishedRequest


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """One exported metric. name: without prefix, and for counters without `_total`. labels: besides model_name."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0)
_FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_REQUEST_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_CHOICES = (1, 2, 5, 10, 20)
_ADAPTER = ("adapter",)
MAX_ADAPTERS = 128
"""Adapters that have series of their own: those that requests ended with last."""

METRICS: tuple[MetricInfo, ...] = (
    MetricInfo("num_requests_running", "gauge", "Sequences in the running batch"),
    MetricInfo("num_requests_waiting", "gauge", "Sequences waiting for a place in the batch"),
    MetricInfo("kv_cache_usage_perc", "gauge", "Share of KV blocks in use, 0 to 1; cached idle blocks count as free"),
    MetricInfo(
        "cache_config_info",
        "gauge",
        "KV cache configuration, always 1",
        ("block_size", "cache_dtype", "num_gpu_blocks", "gpu_memory_utilization", "prefix_caching_hash_algo"),
    ),
    MetricInfo(
        "lora_requests_info",
        "gauge",
        "Adapters of open requests that have had a token, and of those that have not; the value is the time",
        ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    ),
    MetricInfo("prefix_cache_queries", "counter", "Prompt tokens looked up in the prefix cache"),
    MetricInfo("prefix_cache_hits", "counter", "Prompt tokens found in the prefix cache"),
    MetricInfo("num_preemptions", "counter", "Times a running sequence gave its blocks back"),
    MetricInfo("prompt_tokens", "counter", "Prompt tokens computed"),
    MetricInfo("generation_tokens", "counter", "Output tokens made"),
    MetricInfo("spec_decode_num_draft_tokens", "counter", "Tokens proposed by the speculator"),
    MetricInfo("spec_decode_num_accepted_tokens", "counter", "Proposed tokens that were kept"),
    MetricInfo(
        "spec_decode_num_draft_tokens_per_pos",
        "counter",
        "Proposed tokens by their position in the draft, from 0",
        ("position",),
    ),
    MetricInfo(
        "spec_decode_num_accepted_tokens_per_pos",
        "counter",
        "Kept tokens by their position in the draft, from 0",
        ("position",),
    ),
    MetricInfo("request_success", "counter", "Choices that ended, by reason", ("finished_reason", "adapter")),
    MetricInfo("iteration_tokens_total", "histogram", "Tokens a step", (), _STEP_TOKENS),
    MetricInfo("time_to_first_token_seconds", "histogram", "Arrival to first token", _ADAPTER, _FIRST_S),
    MetricInfo(
        "inter_token_latency_seconds",
        "histogram",
        "Time between output tokens; each token counts with the mean of its request",
        _ADAPTER,
        _FAST_S,
    ),
    MetricInfo(
        "request_time_per_output_token_seconds",
        "histogram",
        "Mean time between output tokens, once a request",
        _ADAPTER,
        _FAST_S,
    ),
    MetricInfo("e2e_request_latency_seconds", "histogram", "Arrival to last token", _ADAPTER, _REQUEST_S),
    MetricInfo("request_queue_time_seconds", "histogram", "Arrival to first scheduling", _ADAPTER, _REQUEST_S),
    MetricInfo("request_prefill_time_seconds", "histogram", "First scheduling to first token", _ADAPTER, _REQUEST_S),
    MetricInfo("request_decode_time_seconds", "histogram", "First token to last token", _ADAPTER, _REQUEST_S),
    MetricInfo("request_prompt_tokens", "histogram", "Prompt tokens of a request", _ADAPTER, _TOKENS),
    MetricInfo("request_generation_tokens", "histogram", "Output tokens of a request", _ADAPTER, _TOKENS),
    MetricInfo("request_params_n", "histogram", "Choices asked for", _ADAPTER, _CHOICES),
    MetricInfo("request_params_max_tokens", "histogram", "max_tokens of a request", _ADAPTER, _TOKENS),
)
"""Every exported metric; docs/reference/metrics.md is made from it."""

_FROM_STATS: dict[str, Callable[[EngineStats], float]] = {
    "num_requests_running": lambda stats: stats.num_running,
    "num_requests_waiting": lambda stats: stats.num_waiting,
    "kv_cache_usage_perc": lambda stats: stats.num_blocks_in_use / stats.num_blocks if stats.num_blocks else 0.0,
    "prefix_cache_queries": lambda stats: stats.prefix_queries,
    "prefix_cache_hits": lambda stats: stats.prefix_hits,
    "num_preemptions": lambda stats: stats.num_preemptions,
    "prompt_tokens": lambda stats: stats.num_prompt_tokens,
    "generation_tokens": lambda stats: stats.num_generation_tokens,
    "spec_decode_num_draft_tokens": lambda stats: stats.num_drafted,
    "spec_decode_num_accepted_tokens": lambda stats: stats.num_accepted,
}

_BY_POSITION: dict[str, Callable[[EngineStats], tuple[int, ...]]] = {
    "spec_decode_num_draft_tokens_per_pos": lambda stats: stats.drafted_by_position,
    "spec_decode_num_accepted_tokens_per_pos": lambda stats: stats.accepted_by_position,
}


class Histogram:
    """Counts by bucket. A value may stand for several observations."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(float(bound) for bound in bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add `count` observations of a value."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def exposed(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative buckets and the sum, as the exposition format wants them."""
        names = [_bound_name(bound) for bound in self._bounds] + ["+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True)), self._sum


def _bound_name(bound: float) -> str:
    return repr(bound)


class PrometheusObserver(Observer):
    """Counts what finished and keeps the newest statistics. A few microseconds a request, one a step."""

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.successes: dict[tuple[str, str], int] = {}
        self._histograms: dict[tuple[str, str], Histogram] = {}
        self._adapters: dict[str, None] = {}
        self._buckets = {metric.name: metric.buckets for metric in METRICS if metric.kind == "histogram"}
        self._step_tokens = self._histogram("iteration_tokens_total", "")

    def on_stats(self, stats: EngineStats) -> None:
        """State of the engine after a step."""
        if stats.num_steps != self.stats.num_steps and stats.step_tokens:
            self._step_tokens.observe(stats.step_tokens)
        self.stats = stats

    def on_finished(self, finished: FinishedRequest) -> None:
        """A request ended."""
        adapter = finished.adapter or ""
        self._remember(adapter)
        for reason in finished.reasons:
            key = (reason.value, adapter)
            self.successes[key] = self.successes.get(key, 0) + 1
        self._observe("request_prompt_tokens", adapter, finished.usage.prompt_tokens)
        self._observe("request_generation_tokens", adapter, finished.usage.completion_tokens)
        self._observe("request_params_n", adapter, finished.n)
        if finished.max_tokens:
            self._observe("request_params_max_tokens", adapter, finished.max_tokens)
        self._observe_times(finished, adapter)

    def _remember(self, adapter: str) -> None:
        """Adapters come and go while a server runs: only the series of those used last are kept."""
        self._adapters.pop(adapter, None)
        if adapter:
            self._adapters[adapter] = None
        if len(self._adapters) > MAX_ADAPTERS:
            oldest = next(iter(self._adapters))
            del self._adapters[oldest]
            self.successes = {key: count for key, count in self.successes.items() if key[1] != oldest}
            self._histograms = {key: found for key, found in self._histograms.items() if key[1] != oldest}

    def _observe_times(self, finished: FinishedRequest, adapter: str) -> None:
        """Times of the request as its caller sees it: from the first arrival to the last end over its choices."""
        ran = [timings for timings in finished.timings if timings.first_token_s > 0]
        if not ran:
            return
        arrival = min(timings.arrival_s for timings in ran)
        scheduled = min((timings.scheduled_s for timings in ran if timings.scheduled_s > 0), default=None)
        first = min(timings.first_token_s for timings in ran)
        end = max(timings.finished_s for timings in ran)
        if scheduled is not None:
            self._observe("request_queue_time_seconds", adapter, scheduled - arrival)
            self._observe("request_prefill_time_seconds", adapter, first - scheduled)
        self._observe("time_to_first_token_seconds", adapter, first - arrival)
        self._observe("request_decode_time_seconds", adapter, end - first)
        self._observe("e2e_request_latency_seconds", adapter, end - arrival)
        num_gaps = finished.usage.completion_tokens - len(ran)
        if num_gaps > 0:
            mean = sum(timings.finished_s - timings.first_token_s for timings in ran) / num_gaps
            self._observe("request_time_per_output_token_seconds", adapter, mean)
            self._observe("inter_token_latency_seconds", adapter, mean, num_gaps)

    def _observe(self, name: str, adapter: str, value: float, count: int = 1) -> None:
        self._histogram(name, adapter).observe(max(0.0, value), count)

    def _histogram(self, name: str, adapter: str) -> Histogram:
        histogram = self._histograms.get((name, adapter))
        if histogram is None:
            histogram = self._histograms[name, adapter] = Histogram(self._buckets[name])
        return histogram

    def histograms(self, name: str) -> dict[str, Histogram]:
        """A metric's histograms by adapter, "" for the base, which is always there."""
        self._histogram(name, "")
        return {adapter: histogram for (other, adapter), histogram in self._histograms.items() if other == name}


class _Scrape(Collector):
    """One observer's numbers under a prefix and a model name."""

    def __init__(self, observer: PrometheusObserver, ctx: FrontendContext) -> None:
        self._observer = observer
        self._prefix = ctx.server.metrics_prefix
        self._model_name = (ctx.server.served_model_name or (ctx.engine.model,))[0]
        self._cache = _cache_labels(ctx)
        self._client = ctx.client
        self._max_loras = ctx.engine.max_loras

    def collect(self) -> Iterator[Metric]:
        """Every metric of METRICS, in its order."""
        for metric in METRICS:
            labels = ["model_name", *metric.labels]
            name, help_ = f"{self._prefix}:{metric.name}", metric.help
            if metric.kind == "histogram":
                yield self._histogram(metric, HistogramMetricFamily(name, help_, labels=labels))
            elif metric.kind == "counter":
                yield self._fill(metric, CounterMetricFamily(name, help_, labels=labels))
            else:
                yield self._fill(metric, GaugeMetricFamily(name, help_, labels=labels))

    def _fill(self, metric: MetricInfo, family: CounterMetricFamily | GaugeMetricFamily) -> Metric:
        if metric.name == "request_success":
            for (reason, adapter), count in sorted(self._observer.successes.items()):
                family.add_metric([self._model_name, reason, adapter], count)
        elif metric.name == "cache_config_info":
            family.add_metric([self._model_name, *(self._cache_value(label) for label in metric.labels)], 1)
        elif metric.name == "lora_requests_info":
            self._fill_adapters(family)
        elif metric.name in _BY_POSITION:
            for position, count in enumerate(_BY_POSITION[metric.name](self._observer.stats)):
                family.add_metric([self._model_name, str(position)], count)
        else:
            family.add_metric([self._model_name], _FROM_STATS[metric.name](self._observer.stats))
        return family

    def _fill_adapters(self, family: CounterMetricFamily | GaugeMetricFamily) -> None:
        """One sample where an adapter backend serves, none elsewhere."""
        if any(role == Role.ADAPTER for role, *_ in self._client.info.table):
            names = [",".join(sorted(adapters)) for adapters in self._client.open_adapters()]
            family.add_metric([self._model_name, str(self._max_loras), *names], time.time())

    def _cache_value(self, label: str) -> str:
        return str(self._observer.stats.num_blocks) if label == "num_gpu_blocks" else self._cache[label]

    def _histogram(self, metric: MetricInfo, family: HistogramMetricFamily) -> Metric:
        for adapter, histogram in self._observer.histograms(metric.name).items():
            buckets, total = histogram.exposed()
            family.add_metric([self._model_name, adapter][: 1 + len(metric.labels)], buckets, total)
        return family


class PrometheusFrontend(Frontend):
    """GET /metrics in the text or OpenMetrics format, whichever the scraper asks for."""

    def routes(self, ctx: FrontendContext) -> Sequence[BaseRoute]:
        """Raises ConfigError for a prefix that is no metric name, or when no Prometheus observer serves."""
        prefix = ctx.server.metrics_prefix
        if re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", prefix) is None:
            raise ConfigError(f"metrics_prefix {prefix!r} is no metric name; use letters, digits and underscores")
        observers = [observer for observer in ctx.observers if isinstance(observer, PrometheusObserver)]
        if len(observers) != 1:
            raise ConfigError(f"/metrics needs exactly one observer named prometheus; found {len(observers)}")
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Scrape(observers[0], ctx))

        async def metrics(request: Request) -> Response:
            encode, content_type = choose_encoder(request.headers.get("accept", ""))
            return Response(encode(registry), headers={"content-type": content_type})

        return [Route("/metrics", metrics, methods=["GET"])]

    def openapi(self) -> dict[str, Any]:
        """The one route."""
        content = {"text/plain": {"schema": {"type": "string"}}}
        answer = {"200": {"description": "metrics", "content": content}}
        return {"paths": {"/metrics": {"get": {"summary": "Prometheus metrics", "responses": answer}}}}


def _cache_labels(ctx: FrontendContext) -> dict[str, str]:
    engine: EngineConfig = ctx.engine
    return {
        "block_size": str(ctx.client.info.block_size),
        "cache_dtype": engine.kv_cache_dtype,
        "gpu_memory_utilization": str(engine.gpu_memory_utilization),
        "prefix_caching_hash_algo": engine.prefix_caching_hash_algo,
    }


def build_observer(ctx: BuildContext) -> PrometheusObserver:
    """The observer `prometheus`."""
    return PrometheusObserver()


def build_frontend(ctx: BuildContext) -> PrometheusFrontend:
    """The frontend `prometheus`."""
    return PrometheusFrontend()
