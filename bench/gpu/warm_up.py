"""The section that fills Triton's cache: later ones measure, and do not wait for compilers."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from adapters import save_adapters
from engines import engine_for, generate
from harness import Bench, describe

TASKS: list[tuple[str, dict[str, Any]]] = [
    ("8B", {}),
    ("0.5B", {}),
    ("1.5B", {}),
    ("0.5B", {"params": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 1}}),
    ("0.5B", {"adapters": 8}),
]
"""Shape, and what else is served. Only the first layer: the others have the same kernels."""


def first_start(bench: Bench) -> None:
    """Engines with one layer of each model below, started at the same time with an empty cache."""
    tasks = [
        (bench.dry_run, *task)
        for task in bench.sizes(TASKS, [("tiny", {"adapters": 2, "params": {"temperature": 0.8}})])
    ]
    for (_, shape, more), result in zip(tasks, bench.map(start_once, tasks, len(tasks)), strict=True):
        row = {"model": shape, "with": ", ".join(more)}
        if isinstance(result, Exception):
            bench.add(**row, error=describe(result), ok=False)
        else:
            bench.add(**row, seconds=result)


def start_once(dry_run: bool, shape: str, more: dict[str, Any]) -> float:
    """Seconds until it has served every batch size."""
    bench = Bench(dry_run=dry_run)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        options = save_adapters(Path(folder), shape, more["adapters"], num_layers=1) if "adapters" in more else {}
        names = list(options.get("lora_modules", ()))
        backend = bench.sizes("triton", "torch")
        with engine_for(bench, shape, backend, bench.sizes(256, 2), num_layers=1, **options) as engine:
            for batch in bench.sizes((1, 8, 64, 256), (1, 2)):
                generate(engine, batch, 4, bench.sizes(128, 8), params=more.get("params"), adapters=names)
    return time.perf_counter() - started
