"""Where adapters may add to a native model: copies of its blocks that share everything but the table of linears.

The blocks of steps without adapters stay as they are, so that nothing is added to such steps.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence

from torch import Tensor

from enginectl.interfaces.model import LinearSite
from enginectl.interfaces.ops import Block, BlockSpec, LowRankBlock, LowRankSlots

Add = Callable[[Tensor, Tensor], Tensor]

QKV, GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"
"""Linears that some checkpoints store fused."""


class StepSlots:
    """The slot of each token of the step that runs."""

    of_tokens: Tensor | None = None


class SlottedBlock(Block):
    """A block that adds low-rank products itself, told whose."""

    def __init__(self, block: LowRankBlock, slots: StepSlots) -> None:
        self.linears = {}
        self.low_rank = block.low_rank
        self._before = block.before
        self._after = block.after
        self._slots = slots

    def before(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """With the slots."""
        return self._before(hidden, cos, sin, self._slots.of_tokens)

    def after(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """With the slots."""
        return self._after(hidden, attended, self._slots.of_tokens)


def adaptable(block: Block, slots: StepSlots) -> Block:
    """A view of a block for steps with adapters."""
    if isinstance(block, LowRankBlock):
        return SlottedBlock(block, slots)
    view = copy.copy(block)
    view.linears = dict(block.linears)
    return view


def sites_of(blocks: Sequence[Block], specs: Sequence[BlockSpec], fused: frozenset[str]) -> list[LinearSite]:
    """A site for each linear of each block. fused: which of QKV and GATE_UP the checkpoint names as one."""
    return [
        LinearSite(
            tuple(f"model.layers.{layer}.{module}" for module in modules),
            in_size,
            out_sizes,
            _connector(block, name),
            functools.partial(_low_rank, block, name, out_sizes) if isinstance(block, SlottedBlock) else None,
        )
        for layer, (block, spec) in enumerate(zip(blocks, specs, strict=True))
        for name, (modules, in_size, out_sizes) in _linears(spec, fused).items()
        if name in block.linears or isinstance(block, SlottedBlock)
    ]


def _low_rank(
    block: SlottedBlock, name: str, out_sizes: tuple[int, ...], num_slots: int, max_rank: int
) -> LowRankSlots:
    return block.low_rank(name, num_slots, max_rank, out_sizes)


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
        assert name in block.linears, "this block adds low-rank products itself"
        op = block.linears[name]

        def adapted(rows: Tensor) -> Tensor:
            return add(rows, op(rows))

        block.linears[name] = adapted

    return connect
