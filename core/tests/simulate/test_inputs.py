"""Costs, lengths, traces and the command: what is accepted, and what is said of the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginectl.cli import main
from enginectl.errors import UsageError
from enginectl.simulate.cost import StepCost, fit_cost, parse_cost
from enginectl.simulate.workload import Arrival, Lengths, Traffic, parse_lengths, poisson, read_trace


def test_a_cost_is_found_again_under_noise() -> None:
    random = np.random.default_rng(0)
    rows, tokens = random.integers(1, 64, 200), random.integers(1, 2000, 200)
    steps = -(-tokens // 512)
    seconds = (steps * (8.0 + 0.3 * rows) + 0.05 * tokens) / 1e3 * random.normal(1.0, 0.03, 200)
    cost, explained = fit_cost(steps.tolist(), rows.tolist(), tokens.tolist(), seconds.tolist())
    assert cost.base_ms == pytest.approx(8.0, rel=0.1)
    assert cost.row_ms == pytest.approx(0.3, rel=0.1)
    assert cost.token_ms == pytest.approx(0.05, rel=0.1)
    assert explained > 0.98


def test_no_part_of_a_fitted_cost_is_negative() -> None:
    cost, _ = fit_cost([1] * 4, [1, 2, 3, 4], [1, 2, 3, 4], [0.010, 0.009, 0.008, 0.007])
    assert min(cost.base_ms, cost.row_ms, cost.token_ms) >= 0
    with pytest.raises(UsageError, match="3 are needed"):
        fit_cost([1], [1], [1], [1.0])


def test_costs_are_read_from_text_and_files(tmp_path: Path) -> None:
    assert parse_cost("50.3, 6, 0") == StepCost(50.3, 6.0)
    path = tmp_path / "cost.json"
    path.write_text('{"base_ms": 1, "row_ms": 2, "token_ms": 0.5, "explained": 0.9}')
    assert parse_cost(str(path)) == StepCost(1.0, 2.0, 0.5)
    path.write_text('{"base_ms": 1}')
    for wrong in ("x", "5", "12,0.05", "1,2,3,4", "-1,0,0", "0,0,0", "nan,0,0", str(path), str(tmp_path / "none.json")):
        with pytest.raises(UsageError, match="--cost"):
            parse_cost(wrong)


def test_lengths_have_the_distribution_they_name() -> None:
    drawn = parse_lengths("lognormal:median=260,p95=735", "x").draw(40_000, np.random.default_rng(0))
    assert np.median(drawn) == pytest.approx(260, rel=0.03)
    assert np.percentile(drawn, 95) == pytest.approx(735, rel=0.03)
    assert parse_lengths("7", "x").draw(3, np.random.default_rng(0)).tolist() == [7, 7, 7]
    for total in (70, 1001):
        rescaled = Lengths(median=34, sigma=0.9, total=total).draw(64, np.random.default_rng(1))
        assert rescaled.sum() == total
        assert rescaled.min() >= 1


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "1.5", "lognormal:", "lognormal:median=3", "lognormal:median=9,p95=3", "lognorml:median=3"]
)
def test_wrong_lengths_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--prompt-tokens"):
        parse_lengths(text, "--prompt-tokens")


def test_arrivals_are_poisson_and_those_of_a_tenant_its_own() -> None:
    one = Traffic(rate=10, prompt=Lengths(median=5), output=Lengths(median=5), duration_s=400.0, tenant="a")
    other = Traffic(rate=1, prompt=Lengths(median=5), output=Lengths(median=5), count=50, tenant="b")
    alone = poisson([one], 3)
    both = poisson([one, other], 3)
    assert [arrival for arrival in both if arrival.tenant == "a"] == alone
    gaps = np.diff([arrival.arrival_s for arrival in alone])
    assert gaps.mean() == pytest.approx(0.1, rel=0.05)
    assert gaps.std() == pytest.approx(0.1, rel=0.08)


def test_a_trace_is_read_sorted_and_its_mistakes_have_lines(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"arrival_s": 2, "prompt_tokens": 3, "output_tokens": 4, "tenant": "a"}\n\n'
        '{"arrival_s": 1, "prompt_tokens": 3, "output_tokens": 4}\n'
    )
    assert [arrival.arrival_s for arrival in read_trace(path)] == [1, 2]
    for line, said in (
        ('{"arrival_s": 1, "prompt_tokens": 3}', "output_tokens"),
        ('{"arrival_s": 1, "prompt_tokens": 0, "output_tokens": 1}', "at least 1"),
        ('{"arrival_s": 1, "prompt_tokens": 1, "output_tokens": 1, "lenght": 1}', "lenght"),
    ):
        path.write_text(f'{{"arrival_s": 2, "prompt_tokens": 3, "output_tokens": 4}}\n{line}\n')
        with pytest.raises(UsageError, match=f"line 2.*{said}"):
            read_trace(path)
    path.write_text("")
    with pytest.raises(UsageError, match="no requests"):
        read_trace(path)


# -- the command -------------------------------------------------------------------------------------------------------

COMMON = "simulate --cost 5,0.1,0.01 --rate 20 --num-requests 40 --prompt-tokens 30 --output-tokens 20"


def run(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main(line.split())
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_policies_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(f"{COMMON} --policy fcfs,fair --policy static --tenant a=1,b=3 --fair.output-weight 1", capsys)
    assert status == 0
    assert out.splitlines()[0].split() == ["fcfs", "fair", "static"]
    assert "b: TTFT p99" in out


def test_json_has_every_number_and_deviations_over_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(f"{COMMON} --json --num-seeds 3", capsys)
    assert status == 0
    found: dict[str, Any] = json.loads(out)
    assert found["cost"] == {"base_ms": 5.0, "row_ms": 0.1, "token_ms": 0.01}
    (policy,) = found["policies"]
    assert (policy["policy"], policy["seeds"], policy["requests"]) == ("fcfs", 3, 40)
    assert policy["std"]["duration_s"] > 0


def test_a_plot_is_a_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    assert run(f"{COMMON} --plot {path}", capsys)[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("simulate", "--cost"),
        (f"{COMMON} --policy fcsf", "did you mean 'fcfs'"),
        (f"{COMMON} --fair.outputweight 1 --policy fair", "output_weight"),
        (f"{COMMON} --fiar.output-weight 1", "no plugin"),
        (f"{COMMON} --tenant a", "NAME=SHARE"),
        (f"{COMMON} --kv-tokens 32", "every request was refused"),
        ("simulate --cost 12,0.05", "give BASE,ROW,TOKEN: three numbers"),
        (
            "simulate --cost 12,0.05,0.02 --prompt-tokens 5000",
            "a prompt of 5000 tokens with 128 of output exceeds max_model_len, 4096",
        ),
        (f"{COMMON} --fair.burst many", "--fair.burst"),
        ("simulate --cost 5,0,0 --rate 0 --duration-s 3", "--num-requests"),
        ("simulate --cost 5,0,0 --trace /nowhere.jsonl", "cannot be read"),
        ("bench fit ftp://x", "http://HOST:PORT"),
        ("bench fit http://127.0.0.1:9 --batch-sizes 0", "--batch-sizes"),
    ],
)
def test_mistakes_are_one_message_and_status_2(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(line, capsys)
    assert (status, out) == (2, "")
    assert said in err


def test_an_option_of_a_policy_that_is_not_simulated_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    """It was accepted, and changed nothing."""
    status, _, err = run(f"{COMMON} --fair.output-weight 1", capsys)
    assert status == 0
    assert "warning: --fair.output-weight has no effect: the plugin 'fair' serves nothing here" in err
    assert run(f"{COMMON} --fair.output-weight 1 --policy fair", capsys)[2] == ""


def test_arrivals_know_their_prefix() -> None:
    traffic = Traffic(rate=1, prompt=Lengths(median=5), output=Lengths(median=5), count=2, prefix_tokens=10)
    assert {(a.prompt_tokens, a.prefix, a.prefix_tokens) for a in poisson([traffic], 0)} == {(15, "shared", 10)}
    assert Arrival(arrival_s=0, prompt_tokens=1, output_tokens=1).prefix_tokens == 0
