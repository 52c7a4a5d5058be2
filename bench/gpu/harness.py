"""What every section is given: the device, sizes for a dry run, timers, and the backends that can run here."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from enginectl.context import BuildContext, Machine
from enginectl.interfaces.attention import AttentionBackend
from enginectl.machine import detect_machine
from enginectl.plugins import PluginHost, unsupported_reason
from enginectl.provider import Role
from enginectl.testing.attention import context_for

Row = dict[str, Any]


@dataclass
class Bench:
    """dry_run: the CPU, tiny sizes, Triton's interpreter; times are taken and thrown away. rows: what was found.
    partial: a file that gets a line for each row at once, in case the section does not end.
    """

    dry_run: bool
    small: bool = False
    partial: Path | None = None
    rows: list[Row] = field(default_factory=list)

    @property
    def device(self) -> str:
        """Where tensors live."""
        return "cpu" if self.dry_run else "cuda"

    def add(self, **row: Any) -> None:
        """A row of the section's result. In a dry run a measured value (a float) is not one, and is dropped."""
        if self.dry_run:
            row = {key: None if isinstance(value, float) else value for key, value in row.items()}
        self.rows.append(row)
        if self.partial is not None:
            with self.partial.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print("  " + "  ".join(f"{key}={show(value)}" for key, value in row.items()), flush=True)

    def sizes(self, real: Any, dry: Any) -> Any:
        """The first on a GPU, the second in a dry run."""
        return dry if self.dry_run else real

    def seconds(self, run: Callable[[], object], *, repeats: int = 20) -> float:
        """Median time of one call, on the device's clock, after warming up."""
        if self.dry_run:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        times = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000)
        return statistics.median(times)


def show(value: object) -> str:
    """Short."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def backends(bench: Bench) -> dict[str, Callable[[BuildContext], AttentionBackend] | str]:
    """Attention backend to what builds it, or to the reason why it cannot run here."""
    machine: Machine = detect_machine()
    found: dict[str, Callable[[BuildContext], AttentionBackend] | str] = {}
    for name, entry in PluginHost().catalogue[Role.ATTENTION].items():
        devices = entry.provider.capabilities.devices
        if devices is not None and "cuda" not in devices:
            continue
        reason = unsupported_reason(entry.provider, machine)
        if bench.dry_run:  # the interpreter stands for Triton's GPU, nothing for FlashInfer's
            reason = None if name in ("torch", "triton") else "nothing stands for a GPU here"
        found[name] = entry.provider.build if reason is None else reason
    return found


def capabilities(name: str) -> Any:
    """What a backend says it can do."""
    return PluginHost().catalogue[Role.ATTENTION][name].provider.capabilities


__all__ = ["Bench", "Row", "backends", "capabilities", "context_for", "show"]
