"""Every law has tests that hold it, at both overlap depths where that could matter."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).resolve().parents[1] / "scripts" / "laws.py"))
LAWS = SCRIPT["laws"]()
TESTS = SCRIPT["by_law"]()


def test_the_page_has_the_laws() -> None:
    assert list(LAWS) == [*map(str, range(1, 15)), "14a", "14b", *map(str, range(15, 25))]


@pytest.mark.parametrize("number", LAWS)
def test_every_law_has_a_test(number: str) -> None:
    assert [test for test in TESTS[number] if "/src/" not in test.place], f"no test's docstring begins 'Law {number}:'"


@pytest.mark.parametrize("number", [number for number, depth_matters in LAWS.items() if depth_matters])
def test_laws_that_depend_on_it_are_held_at_both_overlap_depths(number: str) -> None:
    assert [test for test in TESTS[number] if test.at_depths], f"no test of law {number} has a parameter `depth`"


def test_no_test_names_a_law_that_is_not_on_the_page() -> None:
    assert set(TESTS) <= set(LAWS)


def test_openings_are_read() -> None:
    read = {
        "Law 7: text.": ("7",),
        "Laws 2, 4, 22: all.": ("2", "4", "22"),
        "Laws 14, 14a and 15.": ("14", "14a", "15"),
        "Law 1 and law 19's ground: x.": ("1", "19"),
        "The law 7 in the middle.": (),
    }
    assert {text: SCRIPT["_named"](text) for text in read} == read
