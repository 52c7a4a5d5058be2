"""Where adapters may add to a native model: copies of its blocks that share everything but the table of linears.

The blocks of steps without adapters stay as they are, so that nothing is added to such steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from enginectl.interfaces.model import LinearSite
from enginectl.interfaces.ops import Block, BlockSpec

Add = Callable[[Tensor, Tensor], Tensor]

QKV, GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"
"""Linears that some checkpoints store fused."""


def sites_of(blocks: Sequence[Block], specs: Sequence[BlockSpec], fused: frozenset[str]) -> list[LinearSite]:
    """A site for each linear of each block. fused: which of QKV and GATE_UP the checkpoint names as one."""
    return [
        LinearSite(
            tuple(f"model.layers.{layer}.{module}" for module in modules), in_size, out_sizes, _connector(block, name)
        )
        for layer, (block, spec) in enumerate(zip(blocks, specs, strict=True))
        for name, (modules, in_size, out_sizes) in _linears(spec, fused).items()
        if name in block.linears
    ]


def _linears(spec: BlockSpec, fused: frozenset[str]) -> dict[str, tuple[tuple[str, ...], int, tuple[int, ...]]]:
    """Name in `Block.linears` to modules below the layer, input width, widths of the outputs."""
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    hidden, intermediate = spec.hidden_size, spec.intermediate_size
    qkv: tuple[tuple[str, ...], tuple[int, ...]] = (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        (q_size, kv_size, kv_size),
    )
    gate_up: tuple[tuple[str, ...], tuple[int, ...]] = (("mlp.gate_proj", "mlp.up_proj"), (intermediate, intermediate))
    if QKV in fused:
        qkv = ((QKV,), (q_size + 2 * kv_size,))
    if GATE_UP in fused:
        gate_up = ((GATE_UP,), (2 * intermediate,))
    return {
        "qkv": (qkv[0], hidden, qkv[1]),
        "output": (("self_attn.o_proj",), q_size, (hidden,)),
        "gate_up": (gate_up[0], hidden, gate_up[1]),
        "down": (("mlp.down_proj",), intermediate, (hidden,)),
    }


def _connector(block: Block, name: str) -> Callable[[Add], None]:
    def connect(add: Add) -> None:
        op = block.linears[name]

        def adapted(rows: Tensor) -> Tensor:
            return add(rows, op(rows))

        block.linears[name] = adapted

    return connect
