"""bench/gpu/check.py without a GPU: every section's host side runs, results are resumed, nothing is measured."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).resolve().parents[1] / "bench" / "gpu" / "check.py"


def run(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CHECK), "--dry-run", "--out", str(out), "--patience", "5", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_sections_are_resumed_and_nothing_is_measured(tmp_path: Path) -> None:
    """A second run keeps what is there; a dry run has no numbers."""
    first = run(tmp_path, "--sections", "rooflines")
    assert first.returncode == 0, first.stdout + first.stderr
    result = json.loads((tmp_path / "rooflines.json").read_text())
    assert result["dry_run"]
    assert {row.get("backend") for row in result["rows"]} >= {"torch", "triton"}
    assert not any(isinstance(value, float) for row in result["rows"] for value in row.values())
    again = run(tmp_path, "--sections", "rooflines")
    assert "== rooflines" not in again.stdout
    assert "dry run: nothing was measured" in again.stdout


def test_an_unknown_section_is_an_error(tmp_path: Path) -> None:
    """With the names there are."""
    found = run(tmp_path, "--sections", "kernles")
    assert found.returncode == 2
    assert "kernels" in found.stderr


@pytest.mark.slow
def test_every_section_runs_without_a_gpu(tmp_path: Path) -> None:
    """All of them, in the order of the table."""
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("dry run: nothing was measured") == 13
    assert not list(tmp_path.glob("*.partial"))


def test_a_budget_leaves_sections_out_and_a_second_run_makes_them_up(tmp_path: Path) -> None:
    """Minutes on a GPU end; what was found is kept."""
    first = run(tmp_path, "--sections", "environment,conformance", "--budget", "1")
    assert first.returncode == 1
    assert first.stdout.count("left out, the budget is used up") == 2
    again = run(tmp_path, "--sections", "environment")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "== environment" in again.stdout


def test_what_a_section_found_before_it_died_is_kept(tmp_path: Path) -> None:
    """Rows are written as they come; a section that takes too long is recorded with them."""
    sys.path.insert(0, str(CHECK.parent))
    try:
        check = importlib.import_module("check")
    finally:
        sys.path.remove(str(CHECK.parent))
    target = tmp_path / "steps.json"
    target.with_suffix(".partial").write_text('{"batch": 1}\n{"batch": 8}\n')
    check.write_result(target, "steps", dry_run=False, ok=False, error="took too long", rows=check.rows_so_far(target))
    assert not check.succeeded(target)
    text = check.table(tmp_path)
    assert "steps: took too long" in text
    assert "| 8 |" in text
    assert not target.with_suffix(".partial").exists()
