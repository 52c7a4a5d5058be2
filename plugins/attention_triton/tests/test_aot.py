"""Every kernel compiles for every architecture, without spills and within its shared memory. No GPU is needed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from enginectl.testing.triton_kernels import ARCHITECTURES, compiled_by

MODULE = "enginectl_attention_triton.aot"
KERNELS = ["attend", "join", "write", "rms_norm", "gated", "rope", "argmax_pieces", "argmax_join", "sample"]
ONE_OF_EACH = r"8x4x128 bf|4x7x128 bf|write|rms_norm 4096 \+|gated silu|rope \+|argmax|sample"


def test_one_of_each_kernel_compiles_for_every_architecture() -> None:
    """In bf16, for the shapes of Llama and of Qwen2 with a window, a cap and sinks."""
    found = compiled_by(MODULE, "--dtypes", "bfloat16", "--only", ONE_OF_EACH, "--architectures", "80", "90")
    found += compiled_by(MODULE, "--dtypes", "bfloat16", "--only", "8x4x128|rms", "--architectures", "86", "100")
    assert {one.capability for one in found} == set(ARCHITECTURES)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_every_kernel_compiles_in_every_configuration(capability: int) -> None:
    """All shapes and dtypes of the table in `compiled.md`."""
    assert len(compiled_by(MODULE, "--architectures", str(capability))) > 100


def test_every_kernel_is_in_the_table() -> None:
    """A kernel nobody compiles ahead of time would be checked by nothing but the interpreter."""
    script = "from enginectl_attention_triton import aot; print(*{s.kernel.fn.__name__ for s in aot.specs(90)})"
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {f"{name}_kernel" for name in KERNELS}
