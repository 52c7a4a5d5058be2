"""The simulator: published comparisons, what it must repeat, and how fast it is."""

from __future__ import annotations

import time

import numpy as np
import pytest

from enginectl.plugins import PluginHost
from enginectl.simulate.cost import StepCost
from enginectl.simulate.engine import SimConfig
from enginectl.simulate.report import Summary, mean_of, summarize, table_rows
from enginectl.simulate.run import simulate
from enginectl.simulate.workload import Arrival, Lengths, Traffic, parse_lengths, poisson


@pytest.fixture(scope="module")
def host() -> PluginHost:
    return PluginHost()


def batching(policy: str, host: PluginHost, seeds: int = 10) -> Summary:
    """t(B) = 50.3 + 6.0 B ms, 64 arrivals 120 ms apart, 2,926 output tokens, at most 8 rows; see bench/simulate.py."""
    traffic = Traffic(
        rate=1 / 0.12, prompt=Lengths(median=1), output=Lengths(median=34, sigma=0.58, total=2926), count=64
    )
    config = SimConfig(cost=StepCost(50.3, 6.0), policy=policy, max_num_seqs=8, num_blocks=4096)
    return mean_of([summarize(simulate(poisson([traffic], seed), config, host=host)) for seed in range(seeds)])


def test_continuous_batching_takes_as_long_as_published(host: PluginHost) -> None:
    found = batching("fcfs", host)
    assert found["duration_s"] == pytest.approx(40.0, rel=0.05)
    assert found["output_tokens_per_s"] == pytest.approx(73.2, rel=0.05)


def test_the_published_static_run_is_a_likely_one(host: PluginHost) -> None:
    found = batching("static", host, seeds=20)
    for key, published in (("duration_s", 79.0), ("output_tokens_per_s", 37.0)):
        assert abs(found[key] - published) < found["std"][key]
    assert abs(found["latency_s"]["p50"] - 29.4) < 1.1 * found["std"]["latency_s"]["p50"]  # with 100 seeds: 0.95


@pytest.mark.parametrize(("policy", "rows", "wasted"), [("contiguous", 8, 0.83), ("fcfs", 45, 0.022)])
def test_blocks_waste_as_little_as_published(host: PluginHost, policy: str, rows: int, wasted: float) -> None:
    """500 lengths (median 260, p95 735), max_len 2048, memory for 8 contiguous requests."""
    lengths = parse_lengths("lognormal:median=260,p95=735,most=2047", "lengths")
    config = SimConfig(
        cost=StepCost(1.0), policy=policy, max_num_seqs=512, max_num_batched_tokens=1 << 20, max_model_len=2048,
        num_blocks=1024,
    )  # fmt: skip
    traffic = Traffic(rate=0, prompt=lengths, output=Lengths(median=1), count=500)
    found = mean_of([summarize(simulate(poisson([traffic], seed), config, host=host)) for seed in range(4)])
    assert found["rows"] == pytest.approx(rows, rel=0.15)
    assert found["wasted_share"] == pytest.approx(wasted, rel=0.15)


def test_an_hour_is_simulated_in_less_than_a_minute(host: PluginHost) -> None:
    """A hundredth of it here: 10 requests a second, 150 output tokens each."""
    traffic = Traffic(
        rate=10, prompt=parse_lengths("lognormal:median=300,p95=1500,most=3000", ""), output=Lengths(median=150),
        duration_s=36.0,
    )  # fmt: skip
    begin = time.process_time()
    result = simulate(poisson([traffic], 0), SimConfig(cost=StepCost(12.0, 0.05, 0.02)), host=host)
    assert (time.process_time() - begin) * 100 < 60
    assert result.requests["arrival_s"].size > 300


def test_the_light_tenant_hardly_notices_a_flood(host: PluginHost) -> None:
    """Under `fair`; under `fcfs` it waits as long as everybody. See bench/fairness.py."""
    prompt, output = parse_lengths("lognormal:median=400,p95=1200,most=2000", ""), Lengths(median=100)
    light = Traffic(rate=0.7, prompt=prompt, output=output, duration_s=30.0, tenant="light")
    heavy = Traffic(rate=35.0, prompt=prompt, output=output, duration_s=30.0, tenant="heavy")

    def p99(policy: str, *traffic: Traffic) -> float:
        config = SimConfig(
            cost=StepCost(15.0, 0.05, 0.02), policy=policy, max_num_batched_tokens=2048,
            long_prefill_token_threshold=512,
        )  # fmt: skip
        summary = summarize(simulate(poisson(traffic, 1), config, host=host))
        return float(summary["tenants"]["light"]["ttft_s"]["p99"] if len(traffic) > 1 else summary["ttft_s"]["p99"])

    assert p99("fair", light, heavy) < 2 * p99("fair", light)
    assert p99("fcfs", light, heavy) > 10 * p99("fcfs", light)


def test_reading_slowly_keeps_tokens_coming(host: PluginHost) -> None:
    """Long prompts stretch the time between others' tokens, unless their share of a step is limited."""
    arrivals = [Arrival(arrival_s=0.0, prompt_tokens=8, output_tokens=600) for _ in range(8)]
    arrivals += [Arrival(arrival_s=0.5 + 0.3 * i, prompt_tokens=3500, output_tokens=4) for i in range(10)]
    p99, p50 = {}, {}
    for threshold in (None, 256):
        config = SimConfig(cost=StepCost(10.0, 0.0, 0.05), long_prefill_token_threshold=threshold)
        found = summarize(simulate(arrivals, config, host=host))
        p99[threshold], p50[threshold] = found["itl_s"]["p99"], found["itl_s"]["p50"]
    assert p99[None] > 0.15
    assert p99[256] < 0.025


def test_a_prefix_index_saves_reading(host: PluginHost) -> None:
    pytest.importorskip("enginectl_prefix_cache")
    traffic = Traffic(
        rate=20, prompt=Lengths(median=50), output=Lengths(median=8), count=60, prefix_tokens=1000, tenant="a"
    )
    found = {
        on: summarize(simulate(poisson([traffic], 0), SimConfig(cost=StepCost(5, 0, 0.05), prefix_cache=on), host=host))
        for on in (False, True)
    }
    assert found[False]["cached_share"] == 0
    assert found[True]["cached_share"] > 0.8
    assert found[True]["ttft_s"]["p50"] < found[False]["ttft_s"]["p50"] / 3


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "static", "contiguous"])
def test_a_seed_gives_the_same_run_and_everybody_is_served(host: PluginHost, policy: str) -> None:
    lengths = parse_lengths("lognormal:median=60,p95=200,most=400", "")
    config = SimConfig(cost=StepCost(5, 0.1, 0.01), policy=policy, max_num_seqs=16, max_model_len=1024, num_blocks=256)
    runs = []
    for _ in range(2):
        arrivals = poisson([Traffic(rate=20, prompt=lengths, output=lengths, count=80, tenant=t) for t in "ab"], 5)
        result = simulate(arrivals, config, host=host)
        runs.append(summarize(result))
        requests = result.requests
        assert requests["arrival_s"].size == 160
        assert (np.diff(requests["arrival_s"]) >= 0).all()
        assert (requests["scheduled_s"] >= requests["arrival_s"]).all()
        assert (requests["first_token_s"] > requests["scheduled_s"]).all()
        assert (requests["finished_s"] >= requests["first_token_s"]).all()
    assert runs[0] == runs[1]
    assert len(table_rows(runs[:1])) == 15 + 2 * 2


def test_small_pools_preempt_and_what_never_fits_is_refused(host: PluginHost) -> None:
    arrivals = [Arrival(arrival_s=0.01 * i, prompt_tokens=30, output_tokens=60) for i in range(20)]
    arrivals.append(Arrival(arrival_s=0.5, prompt_tokens=900, output_tokens=60))
    found = simulate(arrivals, SimConfig(cost=StepCost(5.0), num_blocks=40), host=host)
    summary = summarize(found)
    assert summary["preemptions"] > 0
    assert (summary["requests"], summary["refused"]) == (20, 1)
    assert "KV blocks" in found.first_refusal


def test_what_is_longer_than_the_context_is_refused_as_a_server_would(host: PluginHost) -> None:
    """A row has room for max_model_len tokens: more of them was an internal error of numpy's."""
    lengths = [(4000, 96), (4000, 97), (5000, 1)]
    arrivals = [Arrival(arrival_s=0.0, prompt_tokens=prompt, output_tokens=output) for prompt, output in lengths]
    found = simulate(arrivals, SimConfig(cost=StepCost(5.0)), host=host)
    assert (found.requests["num_output"].tolist(), found.num_refused) == ([96], 2)
    assert "max_model_len, 4096" in found.first_refusal


def test_a_lone_request_takes_what_its_steps_cost(host: PluginHost) -> None:
    """100 prompt tokens in steps of 64 and 36, then 4 more tokens."""
    arrivals = [Arrival(arrival_s=2.0, prompt_tokens=100, output_tokens=5)]
    found = simulate(arrivals, SimConfig(cost=StepCost(10.0, 1.0, 0.1), max_num_batched_tokens=64), host=host)
    assert found.requests["first_token_s"][0] == pytest.approx(2.0 + 2 * 0.011 + 0.010)
    assert found.requests["finished_s"][0] == pytest.approx(2.0 + 2 * 0.011 + 0.010 + 4 * 0.0111)
