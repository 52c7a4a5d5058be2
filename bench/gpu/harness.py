"""What every section is given: the device, sizes for a dry run, timers, workers, and the backends that can run here."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from enginectl.context import BuildContext
from enginectl.interfaces.attention import AttentionBackend
from enginectl.machine import detect_machine
from enginectl.plugins import PluginHost, unsupported_reason
from enginectl.provider import Role
from enginectl.testing.attention import context_for

Row = dict[str, Any]

WARM_UP_S = 0.1
"""Before anything is timed: kernels are loaded, and the clocks of an idle GPU rise."""

EVICT_BYTES = 1 << 30
"""Read between timed calls: many times the largest cache. Longer, too, than the host takes to queue a call."""


@dataclass
class Bench:
    """dry_run: the CPU, tiny sizes, Triton's interpreter; times are taken and thrown away. rows: what was found.
    file: gets a line of JSON for each row at once, in case the section does not end.
    """

    dry_run: bool
    small: bool = False
    file: Path | None = None
    rows: list[Row] = field(default_factory=list)
    _evict: Tensor | None = None

    @property
    def device(self) -> str:
        """Where tensors live."""
        return "cpu" if self.dry_run else "cuda"

    def add(self, **row: Any) -> None:
        """A row of the section's result. In a dry run a measured value (a float) is not one, and is dropped."""
        if self.dry_run:
            row = {key: None if isinstance(value, float) else value for key, value in row.items()}
        self.rows.append(row)
        self.write(row)
        print("  " + "  ".join(f"{key}={show(value)}" for key, value in row.items()), flush=True)

    def write(self, row: Row) -> None:
        """A line of the file. JSON has no NaN and no infinity: they become text."""
        if self.file is not None:
            plain = {key: value if is_json(value) else str(value) for key, value in row.items()}
            with self.file.open("a") as file:
                file.write(json.dumps(plain, allow_nan=False) + "\n")

    @contextmanager
    def attempt(self, **what: Any) -> Iterator[None]:
        """An error becomes a row that says so, and the section goes on with what does not need it."""
        try:
            yield
        except Exception as error:
            self.add(**what, error=describe(error), ok=False)

    def sizes(self, real: Any, dry: Any) -> Any:
        """The first on a GPU, the second in a dry run."""
        return dry if self.dry_run else real

    def seconds(self, run: Callable[[], object], *, repeats: int = 20) -> float:
        """Median time of one call on the device's clock, warm, but with nothing of its data in the cache.

        All calls are queued at once: while the cache is filled with other data, the host queues the next call, so that
        no time of the host is counted.
        """
        if self.dry_run:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        self._warm_up(run)
        pairs = []
        for _ in range(repeats):
            self._fill_cache()
            start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start_event.record()
            run()
            end_event.record()
            pairs.append((start_event, end_event))
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in pairs) / 1000  # events count milliseconds

    def _warm_up(self, run: Callable[[], object]) -> None:
        end = time.perf_counter() + WARM_UP_S
        calls = 0
        while calls < 3 or time.perf_counter() < end:
            run()
            torch.cuda.synchronize()
            calls += 1

    def _fill_cache(self) -> None:
        """By reading: lines that were written would have to leave the cache again while the next call is timed."""
        if self._evict is None:
            self._evict = torch.zeros(EVICT_BYTES // 4, dtype=torch.float32, device=self.device)
        self._evict.sum()

    def map(self, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], workers: int) -> Iterator[Any]:
        """function(*task) of each task, in order, or the error it raised; by several processes on a GPU, whose kernels
        take longer to compile than to run. function: a module's own.
        """
        if self.dry_run or self.small:
            yield from (caught(function, *task) for task in tasks)
            return
        with ProcessPoolExecutor(min(workers, len(tasks)), mp_context=get_context("spawn")) as pool:
            futures = [pool.submit(function, *task) for task in tasks]
            yield from (caught(future.result) for future in futures)


def caught(function: Callable[..., Any], *arguments: Any) -> Any:
    """What it returns, or the error it raises."""
    try:
        return function(*arguments)
    except Exception as error:
        return error


def describe(error: Exception) -> str:
    """Short, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def is_json(value: object) -> bool:
    """Whether JSON has this number. Everything but floats passes."""
    return not isinstance(value, float) or value - value == 0.0


def show(value: object) -> str:
    """Short."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def backends(bench: Bench) -> dict[str, Callable[[BuildContext], AttentionBackend] | str]:
    """Attention backend to what builds it, or to the reason why it cannot run here; the one that serves unasked first."""
    found: dict[str, Callable[[BuildContext], AttentionBackend] | str] = {}
    machine = detect_machine()
    entries = sorted(PluginHost().catalogue[Role.ATTENTION].items(), key=lambda item: -item[1].provider.rank)
    for name, entry in entries:
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


__all__ = ["Bench", "Row", "backends", "capabilities", "context_for", "describe", "show"]
