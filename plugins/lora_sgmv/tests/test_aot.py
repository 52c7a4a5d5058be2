"""Both kernels compile for every architecture, without spills and within its shared memory. No GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("enginectl_attention_triton", reason="its tools compile kernels ahead of time")


def check(*arguments: str) -> int:
    """In a process of its own: this one may interpret kernels, and compiling is not for a forked one."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "error", "-m", "enginectl_lora_sgmv.aot", "--json", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    limits = {80: 166_912, 90: 232_448, 100: 232_448}
    for one in found:
        assert one["shared_bytes"] <= limits[one["capability"]], one
        assert not one["spill_bytes"], one
        assert one["registers"] is None or 0 < one["registers"] <= 255, one
    assert {one["name"].split()[0] for one in found} == {"shrink", "expand"}
    return len({one["capability"] for one in found})


def test_kernels_compile_for_every_architecture() -> None:
    """In bf16 at rank 16."""
    assert check("--dtypes", "bfloat16", "--ranks", "16") == 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_compile_in_every_configuration(capability: int) -> None:
    """Every linear, rank and dtype of the table."""
    assert check("--architectures", str(capability)) == 1
