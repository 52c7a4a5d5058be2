"""Both kernels compile for every architecture, without spills and within its shared memory. No GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("enginectl_attention_triton", reason="its tools compile kernels ahead of time")

from enginectl_lora_sgmv.aot import LINEARS, RANKS, TOKENS, specs

LIMITS = {80: 166_912, 90: 232_448, 100: 232_448}
DTYPES = ("bfloat16", "float16", "float32")


def compiled(*arguments: str) -> set[tuple[int, str]]:
    """What was compiled, by architecture and name, all of it within the limits. In a process of its own: this one may
    interpret kernels, and compiling is not for a forked one.
    """
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "error", "-m", "enginectl_lora_sgmv.aot", "--json", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    for one in found:
        assert one["shared_bytes"] <= LIMITS[one["capability"]], one
        assert not one["spill_bytes"], one
        assert one["registers"] is None or 0 < one["registers"] <= 255, one
    return {(one["capability"], one["name"]) for one in found}


def test_kernels_compile_for_every_architecture() -> None:
    """In bf16 at rank 16."""
    found = compiled("--dtypes", "bfloat16", "--ranks", "16")
    assert found == {(c, spec.name) for c in LIMITS for spec in specs(["bfloat16"], [16])}
    assert {name.split()[0] for _, name in found} == {"shrink", "expand"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("capability", LIMITS)
def test_the_whole_table_compiles(capability: int) -> None:
    """Both kernels in every linear, rank specialisation, size of step and dtype."""
    found = compiled("--architectures", str(capability))
    assert found == {(capability, spec.name) for spec in specs(DTYPES)}
    assert len(found) == 2 * len(LINEARS) * len(RANKS) * len(TOKENS) * len(DTYPES)
