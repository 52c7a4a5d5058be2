#!/usr/bin/env python
"""Lists the laws of docs/reference/laws.md and the tests that hold them: those whose docstring begins `Law N: …`.

    python scripts/laws.py

A test counts as run at both overlap depths if it, or a fixture of its file that it takes, has a parameter `depth`.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "laws.md"
PATTERNS = (
    "core/tests/**/test_*.py",
    "plugins/*/tests/**/test_*.py",
    "tests/test_*.py",
    "core/src/enginectl/testing/*.py",
)

_NUMBER = r"\d+[ab]?"
_OPENING = re.compile(rf"Laws? ({_NUMBER}(?:(?:, | and |, and )(?:[Ll]aw )?{_NUMBER})*)\b")
_ROW = re.compile(rf"^\| ({_NUMBER}) \|.*\| (yes|no) \|$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Test:
    """A test function, or a check of a conformance kit. at_depths: it has a parameter `depth`."""

    place: str
    laws: tuple[str, ...]
    at_depths: bool


def laws() -> dict[str, bool]:
    """Number of each law on the page, and whether the overlap depth could matter to it."""
    return {number: matters == "yes" for number, matters in _ROW.findall(PAGE.read_text(encoding="utf-8"))}


def tests() -> Iterator[Test]:
    """Every test that names a law, from the source: nothing is imported."""
    for path in sorted({path for pattern in PATTERNS for path in ROOT.glob(pattern)}):
        yield from _tests_in(path)


def _tests_in(path: Path) -> Iterator[Test]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    whole = _named(ast.get_docstring(tree))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    with_depth = {node.name for node in functions if "depth" in _parameters(node)}
    for node in functions:
        if not node.name.startswith("test_"):
            continue
        named = _named(ast.get_docstring(node)) or whole
        if named:
            at_depths = bool(with_depth & {node.name, *_parameters(node)})
            yield Test(f"{path.relative_to(ROOT)}::{node.name}", named, at_depths)


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {argument.arg for argument in node.args.args}


def _named(docstring: str | None) -> tuple[str, ...]:
    """The laws with which a docstring begins."""
    opening = _OPENING.match(docstring or "")
    return tuple(re.findall(_NUMBER, opening[1])) if opening else ()


def by_law() -> dict[str, list[Test]]:
    """The tests of each law."""
    found: dict[str, list[Test]] = defaultdict(list)
    for test in tests():
        for number in test.laws:
            found[number].append(test)
    return found


def main() -> None:
    """Print them."""
    found = by_law()
    for number in laws():
        print(f"Law {number}")
        for test in found[number]:
            print(f"  {test.place}{'  [depths]' if test.at_depths else ''}")


if __name__ == "__main__":
    main()
