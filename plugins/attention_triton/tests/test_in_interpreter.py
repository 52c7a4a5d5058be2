"""Runs tests/interpreter in a process of its own, because kernels are interpreted or compiled for a process's life."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


SLOW = [path.name for path in sorted((HERE / "interpreter").glob("test_*.py")) if "mark.slow" in path.read_text()]


def run_pytest(marker: str, name: str = "") -> None:
    environ = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    where = str(HERE / "interpreter" / name)
    command = [sys.executable, "-m", "pytest", where, "-q", "-p", "no:cacheprovider", "-m", marker]
    done = subprocess.run(command, env=environ, cwd=HERE.parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_kernels_equal_the_reference() -> None:
    """The conformance kit, the kernels' edge cases and the op set."""
    run_pytest("not slow and not gpu")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SLOW)
def test_kernels_equal_the_reference_in_every_combination(name: str) -> None:
    """What the test above leaves out, a file at a time."""
    run_pytest("slow and not gpu", name)
