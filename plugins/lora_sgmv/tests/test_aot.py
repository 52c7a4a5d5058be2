"""Both kernels compile for every architecture, without spills and within its shared memory. No GPU is needed."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from enginectl.testing.triton_kernels import ARCHITECTURES, POINTERS, compiled_by
from enginectl_lora_sgmv.aot import LINEARS, RANKS, TOKENS, specs

MODULE = "enginectl_lora_sgmv.aot"


def test_kernels_compile_for_every_architecture() -> None:
    """In bf16 at rank 16."""
    found = {(one.capability, one.name) for one in compiled_by(MODULE, "--dtypes", "bfloat16", "--only", "rank 16,")}
    wanted = [spec.name for spec in specs(90, ["bfloat16"]) if "rank 16," in spec.name]
    assert found == {(c, name) for c in ARCHITECTURES for name in wanted}
    assert {name.split()[0] for name in wanted} == {"shrink", "expand"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_the_whole_table_compiles(capability: int) -> None:
    """Both kernels in every linear, rank specialisation, size of step and dtype."""
    found = {one.name for one in compiled_by(MODULE, "--architectures", str(capability))}
    assert found == {spec.name for spec in specs(capability)}
    assert len(found) == 2 * len(LINEARS) * len(RANKS) * len(TOKENS) * len(POINTERS)
