"""Results as Markdown: a table a section, and what was wanted against what was seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

Row = dict[str, Any]
Results = dict[str, dict[str, Any]]
"""Section to its result: ok, dry_run, rows, seconds or, if it did not end, error."""


class Figure(NamedTuple):
    """One that is wanted. seen: None if it was not measured."""

    name: str
    wanted: str
    seen: float | str | None
    met: bool


def table(results: Results, names: Iterable[str]) -> str:
    """All results, a table a section."""
    parts = []
    for name in names:
        if name not in results:
            continue
        result = results[name]
        state = result.get("error") or ("ok" if result["ok"] else "WRONG")
        if "seconds" in result:
            state += f", {result['seconds']} s"
        dry = ", dry run: nothing was measured" if result["dry_run"] else ""
        parts.append(f"## {name}: {state}{dry}\n")
        parts.append(rows_table(result["rows"]))
    return "\n".join(parts)


def rows_table(rows: list[Row]) -> str:
    """With every column that some row has."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if not columns:
        return ""
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(cell(row.get(key)) for key in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def cell(value: object) -> str:
    """Short."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value).replace("|", "/").replace("\n", " ")


def wanted(results: Results) -> str:
    """The last table: each figure, met or not."""
    lines = ["## wanted", "", "| figure | wanted | seen | met |", "|---|---|---|---|"]
    for name, bound, seen, met in figures(results):
        text = "not measured" if seen is None else cell(seen)
        lines.append(f"| {name} | {bound} | {text} | {'yes' if met else 'no'} |")
    return "\n".join(lines) + "\n"


def figures(results: Results) -> Iterator[Figure]:
    """What the GPU path is to reach on an H200."""
    for name in ("kernels", "greedy", "memory", "conformance"):
        result = results.get(name)
        right = bool(result and result["ok"] and not result["dry_run"])
        state = None if result is None or result["dry_run"] else result.get("error") or ("ok" if right else "WRONG")
        yield Figure(f"{name}: right", "ok", state, right)
    backends = ("triton", "flashinfer")
    for backend in backends:
        seen = find(results, "rooflines", "of_copy", backend=backend, what="decode 64 x 4096")
        yield at_least(f"decode attention of 64 x 4096 tokens, {backend}, of the measured copy", 0.85, seen)
    for backend in backends:
        for batch in (1, 64):
            seen = find(results, "steps", "of_floor", model="8B", backend=backend, batch=batch)
            yield at_most(f"8B decode step, batch {batch}, {backend}, of the time to read its bytes", 1.25, seen)
    for shape, batch in (("8B", 1), ("8B", 64), ("0.5B", 1), ("0.5B", 64)):
        seen = find(results, "host_gap", "gap_part", model=shape, batch=batch)
        yield at_most(f"host gap, {shape}, batch {batch}, of the step", 0.05, seen)
    seen = find(results, "graphs", "times", model="0.5B", kind="eager, overlap", batch=1)
    yield at_least("0.5B, batch 1: a step without graphs, of one with", 1.5, seen)


def find(results: Results, section: str, column: str, **where: object) -> float | None:
    """A column of the row with these values."""
    for row in results.get(section, {}).get("rows", ()):
        if all(row.get(key) == value for key, value in where.items()) and isinstance(row.get(column), float):
            return float(row[column])
    return None


def at_least(name: str, bound: float, seen: float | None) -> Figure:
    """The more the better."""
    return _figure(name, f"at least {bound}", seen, lambda value: value >= bound)


def at_most(name: str, bound: float, seen: float | None) -> Figure:
    """The less the better."""
    return _figure(name, f"at most {bound}", seen, lambda value: value <= bound)


def _figure(name: str, bound: str, seen: float | None, is_met: Callable[[float], bool]) -> Figure:
    return Figure(name, bound, seen, seen is not None and is_met(seen))
