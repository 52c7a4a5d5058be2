"""Plain tables on standard output: aligned for people, without a frame so that they can be cut and grepped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def print_json(value: Any) -> None:
    """Indented JSON on standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """A table on standard output; a terminal too narrow wraps inside cells, a pipe never does."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        for line in format_rows(rows, columns):
            print(line)
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(str(row.get(column, "")) for column in columns))
    console.print(table)


def format_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[str]:
    """The lines of an aligned table with a header."""
    cells = [list(columns), *([str(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
