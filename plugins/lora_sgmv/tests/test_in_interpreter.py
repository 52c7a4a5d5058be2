"""Runs tests/interpreter in a process of its own, because kernels are interpreted or compiled for a process's life."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def test_kernels_equal_the_reference() -> None:
    """The conformance kit and the kernels' edge cases."""
    pytest.importorskip("triton", reason="Triton is not installed")
    environ = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", str(HERE / "interpreter"), "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, env=environ, cwd=HERE.parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
