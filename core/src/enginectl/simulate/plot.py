"""A picture of a simulation: rows and blocks over time, and the distributions of latencies. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginectl.errors import UsageError
from enginectl.simulate.run import SimResult

_MAX_POINTS = 2000


def require_matplotlib() -> None:
    """Raise UsageError, before anything is simulated, if nothing can be drawn."""
    try:
        import matplotlib as _  # noqa: F401
    except ImportError as error:
        raise UsageError("--plot needs matplotlib; install it with `pip install 'enginectl[plot]'`") from error


def plot(results: Sequence[SimResult], path: Path) -> None:
    """Write a PNG: one curve a policy. Raises UsageError if the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    (rows, blocks), (ttft, latency) = figure.subplots(2, 2)
    for result in results:
        label, steps = result.config.policy, result.steps
        times, mean_rows = thin(steps["end_s"], steps["num_rows"])
        rows.plot(times, mean_rows, label=label, linewidth=1)
        times, mean_blocks = thin(steps["end_s"], steps["num_blocks"] * 100.0 / result.config.num_blocks)
        blocks.plot(times, mean_blocks, label=label, linewidth=1)
        _distribution(ttft, result.requests["first_token_s"] - result.requests["arrival_s"], label)
        _distribution(latency, result.requests["finished_s"] - result.requests["arrival_s"], label)
    rows.set(title="Running rows", xlabel="s", ylabel="rows")
    blocks.set(title="KV blocks in use", xlabel="s", ylabel="% of the pool")
    ttft.set(title="Time to first token", xlabel="s", ylabel="share of requests", xscale="log")
    latency.set(title="Latency", xlabel="s", ylabel="share of requests", xscale="log")
    for axes in (rows, blocks, ttft, latency):
        axes.grid(alpha=0.3)
        axes.legend()
    try:
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        raise UsageError(f"--plot {path}: cannot be written: {error.strerror}") from error


def thin(times: NDArray[Any], values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """At most so many points as can be seen: means over equal numbers of steps."""
    width = -(-times.size // _MAX_POINTS)
    if width <= 1:
        return times, values
    starts = np.arange(0, times.size, width)
    sizes = np.diff(np.append(starts, times.size))
    return times[starts], np.add.reduceat(values, starts) / sizes


def _distribution(axes: Any, values: NDArray[Any], label: str) -> None:
    shown = np.quantile(values, np.linspace(0, 1, min(values.size, 500)))
    axes.plot(np.maximum(shown, 1e-4), np.linspace(0, 1, shown.size), label=label)
