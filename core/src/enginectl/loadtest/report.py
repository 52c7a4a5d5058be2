"""The numbers of a load test: percentiles of each repeat, and medians over the repeats."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginectl.loadtest.client import Outcome
from enginectl.loadtest.run import Run

Summary = dict[str, Any]

_QUANTILES = (50, 90, 99)
LATENCIES = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")
_MAX_POINTS = 400


def summarize(run: Run) -> Summary:
    """One repeat. Latencies are of finished requests; what has no value is None.

    ttft_ms: until the first event with text. itl_ms: between such events. tpot_ms: of a request, the mean time of a token after the
    first. e2e_ms: until the end of the answer. late_ms: the client's own lateness. client_cpu: cores it kept busy.
    """
    finished = [outcome for outcome in run.outcomes if not outcome.error]
    output = sum(outcome.output_tokens for outcome in finished)
    prompt = sum(outcome.prompt_tokens for outcome in finished)
    return {
        "level": run.level.name,
        "concurrency": run.level.concurrency,
        "rate": run.level.rate,
        "requests": len(run.outcomes),
        "finished": len(finished),
        "errors": dict(Counter(outcome.error for outcome in run.outcomes if outcome.error)),
        "duration_s": run.duration_s,
        "requests_per_s": len(finished) / run.duration_s,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "output_tokens_per_s": output / run.duration_s,
        "total_tokens_per_s": (prompt + output) / run.duration_s,
        "events": sum(len(outcome.event_s) for outcome in finished),
        **{name: _quantiles(values) for name, values in latencies(run.outcomes).items()},
        "late_ms": _quantiles(np.array([outcome.late_s * 1e3 for outcome in run.outcomes])),
        "client_cpu": run.cpu_s / run.duration_s,
    }


def latencies(outcomes: Sequence[Outcome]) -> dict[str, NDArray[np.float64]]:
    """Every latency of finished requests, in milliseconds."""
    found = [outcome for outcome in outcomes if not outcome.error and outcome.event_s]
    gaps = [np.diff(outcome.event_s) for outcome in found]
    several = [outcome for outcome in found if outcome.output_tokens > 1]
    per_token = [(one.event_s[-1] - one.event_s[0]) / (one.output_tokens - 1) for one in several]
    values = {
        "ttft_ms": np.array([one.event_s[0] - one.start_s for one in found]),
        "itl_ms": np.concatenate(gaps) if gaps else np.empty(0),
        "tpot_ms": np.array(per_token),
        "e2e_ms": np.array([one.end_s - one.start_s for one in found]),
    }
    return {name: one * 1e3 for name, one in values.items()}


def _quantiles(values: NDArray[np.float64]) -> dict[str, float | None]:
    if not values.size:
        return dict.fromkeys(("mean", *(f"p{q}" for q in _QUANTILES)))
    found = np.percentile(values, _QUANTILES).tolist()
    return {"mean": float(values.mean()), **{f"p{q}": value for q, value in zip(_QUANTILES, found, strict=True)}}


def report(levels: Sequence[Sequence[Run]]) -> list[Summary]:
    """For every level, medians over its repeats, with all errors; `repeats` has each repeat's own summary."""
    found = []
    for runs in levels:
        summaries = [summarize(run) for run in runs]
        errors: Counter[str] = Counter()
        for summary in summaries:
            errors.update(summary["errors"])
        found.append({**_median(summaries), "errors": dict(errors), "repeats": summaries})
    return found


def _median(values: Sequence[Any]) -> Any:
    """Medians of numbers at every depth; what is no number is the first's."""
    first = values[0]
    if isinstance(first, dict):
        return {key: _median([value[key] for value in values if key in value]) for key in first if key != "errors"}
    if isinstance(first, str):
        return first
    numbers = [value for value in values if value is not None]
    return statistics.median(numbers) if numbers else None


def first_failures(levels: Sequence[Sequence[Run]]) -> dict[str, str]:
    """For every kind of error, the detail of the first."""
    found: dict[str, str] = {}
    for outcome in (outcome for runs in levels for run in runs for outcome in run.outcomes):
        if outcome.error:
            found.setdefault(outcome.error, outcome.detail)
    return found


def distribution(runs: Sequence[Run], name: str) -> tuple[list[float], list[float]]:
    """A latency's distribution over all repeats: milliseconds, and the share of values up to each."""
    values = latencies([outcome for run in runs for outcome in run.outcomes])[name]
    if not values.size:
        return [], []
    shares = np.linspace(0, 1, min(values.size, _MAX_POINTS))
    return np.quantile(values, shares).tolist(), shares.tolist()


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _pair(name: str) -> Callable[[Summary], str]:
    return lambda one: f"{_number(one[name]['p50'])} / {_number(one[name]['p99'])}"


_LINES: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("requests finished", lambda one: f"{one['finished']:g} of {one['requests']:g}"),
    ("output tokens/s", lambda one: _number(one["output_tokens_per_s"])),
    ("total tokens/s", lambda one: _number(one["total_tokens_per_s"])),
    ("requests/s", lambda one: _number(one["requests_per_s"], 2)),
    ("TTFT p50 / p99 ms", _pair("ttft_ms")),
    ("inter-token p50 / p99 ms", _pair("itl_ms")),
    ("time per token p50 / p99 ms", _pair("tpot_ms")),
    ("end to end p50 / p99 ms", _pair("e2e_ms")),
    ("client: cores busy", lambda one: _number(one["client_cpu"], 2)),
)
_LATE = ("client: late p99 ms", lambda one: _number(one["late_ms"]["p99"]))


def table(summaries: Sequence[Summary]) -> tuple[list[dict[str, str]], list[str]]:
    """Rows and columns of a table with one column a level."""
    lines = [*_LINES, *([_LATE] if any(one["rate"] is not None for one in summaries) else [])]
    rows = [{"": title, **{one["level"]: value(one) for one in summaries}} for title, value in lines]
    for kind in sorted({kind for one in summaries for kind in one["errors"]}):
        rows.append({"": f"error: {kind}", **{one["level"]: str(one["errors"].get(kind, 0)) for one in summaries}})
    return rows, ["", *(one["level"] for one in summaries)]
