"""Numbers that say how a simulated run went, their means over seeds, and the table that compares policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginectl.simulate.run import SimResult

Summary = dict[str, Any]

_QUANTILES = (50, 90, 99)


def summarize(result: SimResult) -> Summary:
    """One run as plain numbers. Times are in seconds, from a request's arrival; shares are from 0 to 1.

    rows and blocks are means over time while something ran. wasted: slots of blocks in use that held no token.
    saturated_rows: mean rows of the steps in which requests waited.
    """
    requests, steps = result.requests, result.steps
    if not requests["arrival_s"].size:
        return {"policy": result.config.policy, "requests": 0, "refused": result.num_refused}
    duration_s = float(requests["finished_s"].max() - requests["arrival_s"].min())
    num_output = int(requests["num_output"].sum())
    summary: Summary = {
        "policy": result.config.policy,
        "requests": int(requests["arrival_s"].size),
        "refused": result.num_refused,
        "steps": int(steps["end_s"].size),
        "duration_s": duration_s,
        "output_tokens_per_s": num_output / duration_s,
        **_latencies(requests),
        "itl_s": _weighted_quantiles(steps["duration_s"], steps["num_decodes"]),
        **_occupancy(result),
        "preemptions": int(requests["num_preemptions"].sum()),
        "cached_share": float(requests["num_cached"].sum() / max(1, result.num_prompt_tokens)),
    }
    if len(result.tenants) > 1:
        summary["tenants"] = {name: _of_tenant(result, place) for place, name in enumerate(result.tenants)}
    return summary


def _latencies(requests: Mapping[str, NDArray[Any]]) -> Summary:
    arrival_s = requests["arrival_s"]
    return {
        "ttft_s": _quantiles(requests["first_token_s"] - arrival_s),
        "queue_s": _quantiles(requests["scheduled_s"] - arrival_s),
        "latency_s": _quantiles(requests["finished_s"] - arrival_s),
    }


def _of_tenant(result: SimResult, place: int) -> Summary:
    mine = result.requests["tenant"] == place
    requests = {name: values[mine] for name, values in result.requests.items()}
    return {"requests": int(mine.sum()), **(_latencies(requests) if mine.any() else {})}


def _occupancy(result: SimResult) -> Summary:
    steps, config = result.steps, result.config
    seconds = steps["duration_s"]
    weights = seconds if seconds.sum() > 0 else np.ones(seconds.size)
    waited = steps["num_waiting"] > 0
    slots = float((steps["num_blocks"] * weights).sum()) * config.block_size
    held = float((np.minimum(steps["num_held"], steps["num_blocks"] * config.block_size) * weights).sum())
    return {
        "rows": float(np.average(steps["num_rows"], weights=weights)),
        "max_rows": int(steps["num_rows"].max()),
        "saturated_rows": float(steps["num_rows"][waited].mean()) if waited.any() else 0.0,
        "blocks_share": float(np.average(steps["num_blocks"], weights=weights)) / config.num_blocks,
        "max_blocks_share": int(steps["num_blocks"].max()) / config.num_blocks,
        "wasted_share": 1.0 - held / slots,
    }


def _quantiles(values: NDArray[Any]) -> dict[str, float]:
    found = np.percentile(values, _QUANTILES).tolist()
    return {"mean": float(values.mean()), **{f"p{q}": value for q, value in zip(_QUANTILES, found, strict=True)}}


def _weighted_quantiles(values: NDArray[Any], weights: NDArray[Any]) -> dict[str, float]:
    """Of a step's length as its decoding rows see it: each row that decodes in it waits so long for its token."""
    total = int(weights.sum())
    if total == 0:
        return dict.fromkeys(("mean", *(f"p{q}" for q in _QUANTILES)), 0.0)
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    at = [values[order[np.searchsorted(reached, total * q / 100)]] for q in _QUANTILES]
    mean = float((values * weights).sum() / total)
    return {"mean": mean, **{f"p{q}": float(value) for q, value in zip(_QUANTILES, at, strict=True)}}


def mean_of(summaries: Sequence[Summary]) -> Summary:
    """Means over seeds of every number, at every depth; with several seeds, `std` holds their standard deviations."""
    if len(summaries) == 1:
        return summaries[0]
    return {**_reduce(summaries, np.mean), "seeds": len(summaries), "std": _reduce(summaries, _deviation)}


def _deviation(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1))


def _reduce(values: Sequence[Any], function: Any) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return {key: _reduce([value[key] for value in values if key in value], function) for key in first}
    return float(function(values)) if isinstance(first, int | float) else first


def table_rows(summaries: Sequence[Summary]) -> list[dict[str, str]]:
    """The lines of the comparison: one number a line, one column a policy."""
    lines = (
        ("requests served", lambda s: f"{s['requests']:,.0f}"),
        ("requests refused", lambda s: f"{s['refused']:,.0f}"),
        ("duration", lambda s: f"{s['duration_s']:,.1f} s"),
        ("output", lambda s: f"{s['output_tokens_per_s']:,.1f} tok/s"),
        *((f"TTFT p{q}", _seconds("ttft_s", q)) for q in (50, 99)),
        *((f"inter-token p{q}", _seconds("itl_s", q)) for q in (50, 99)),
        *((f"latency p{q}", _seconds("latency_s", q)) for q in (50, 99)),
        ("rows, mean and most", lambda s: f"{s['rows']:,.1f} {s['max_rows']:,.0f}"),
        ("blocks, mean and most", lambda s: f"{s['blocks_share']:.1%} {s['max_blocks_share']:.1%}"),
        ("wasted in blocks", lambda s: f"{s['wasted_share']:.1%}"),
        ("preemptions", lambda s: f"{s['preemptions']:,.0f}"),
        ("prompt tokens cached", lambda s: f"{s['cached_share']:.1%}"),
    )
    served = [summary for summary in summaries if summary["requests"]]
    rows = [{"": name, **{s["policy"]: show(s) for s in served}} for name, show in lines]
    for tenant in served[0].get("tenants", ()) if served else ():
        for q in (50, 99):
            show = _seconds("ttft_s", q)
            rows.append({"": f"{tenant}: TTFT p{q}", **{s["policy"]: show(s["tenants"][tenant]) for s in served}})
    return rows


def _seconds(key: str, quantile: int) -> Any:
    def show(summary: Summary) -> str:
        if key not in summary:
            return "-"
        value = summary[key][f"p{quantile}"]
        return f"{value * 1e3:,.1f} ms" if value < 1 else f"{value:,.2f} s"

    return show
