"""A picture of a load test: throughput by level, and the distributions of latencies. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from enginectl.errors import UsageError
from enginectl.loadtest.report import Summary, distribution
from enginectl.loadtest.run import Run

TITLES = {"ttft_ms": "Time to first token", "itl_ms": "Between tokens", "e2e_ms": "End to end"}


def plot(levels: Sequence[Sequence[Run]], summaries: Sequence[Summary], path: Path) -> None:
    """Write a PNG. Raises UsageError if the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2).ravel()
    names = [summary["level"] for summary in summaries]
    bars = axes[0].bar(names, [summary["output_tokens_per_s"] for summary in summaries])
    axes[0].bar_label(bars, fmt="{:,.0f}")
    axes[0].set(title="Throughput", ylabel="output tokens/s")
    for place, (latency, title) in enumerate(TITLES.items(), 1):
        for name, runs in zip(names, levels, strict=True):
            values, shares = distribution(runs, latency)
            axes[place].plot(values, shares, label=name, linewidth=1)
        axes[place].set(title=title, xlabel="ms", ylabel="share", ylim=(0, 1))
        axes[place].set_xlim(left=0)
        axes[place].grid(alpha=0.3)
        axes[place].legend()
    try:
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        raise UsageError(f"--plot {path}: cannot be written: {error.strerror}") from error
