"""Adapters inside a fused block: what separate products add, whatever shares the call."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL

import pytest
import torch
from torch import Tensor

from enginectl.builtin.native.block import PlainBlock
from enginectl.builtin.ops_torch import TorchOpSet
from enginectl.interfaces.ops import BlockSpec, BlockWeights, Op
from enginectl.testing.tolerances import TOLERANCES
from enginectl_attention_cpu.ops import CpuBlock, CpuOpSet

DTYPES = ["float32", "bfloat16", "float16"]
EVEN = BlockSpec(
    hidden_size=96, intermediate_size=160, num_heads=6, num_kv_heads=2, head_dim=16, eps=1e-5, rotary_dim=16
)
ODD = BlockSpec(hidden_size=37, intermediate_size=45, num_heads=3, num_kv_heads=1, head_dim=10, eps=1e-5, rotary_dim=10)
"""Sizes that fill no vector, so that one holds columns of several parts, or of none."""

RANKS: tuple[dict[str, tuple[int, ...]], ...] = (
    {"qkv": (4, 4, 4), "output": (4,), "gate_up": (4, 4), "down": (4,)},
    {"qkv": (16, 0, 7), "output": (0,), "gate_up": (0, 5), "down": (16,)},
    {"qkv": (1, 3, 16), "output": (9,), "gate_up": (0, 0), "down": (0,)},
    {"qkv": (0, 0, 0), "output": (0,), "gate_up": (11, 16), "down": (1,)},
)
"""By slot: the rank of each part of each linear, 0 where the adapter leaves it alone."""

Parts = list[tuple[Tensor, Tensor] | None]


def sizes(spec: BlockSpec) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Linear to width of its input and of its parts."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return {
        "qkv": (spec.hidden_size, (q, kv, kv)),
        "output": (q, (spec.hidden_size,)),
        "gate_up": (spec.hidden_size, (spec.intermediate_size, spec.intermediate_size)),
        "down": (spec.intermediate_size, (spec.hidden_size,)),
    }


def adapters(spec: BlockSpec, dtype: torch.dtype) -> list[dict[str, Parts]]:
    random = torch.Generator().manual_seed(3)

    def part(rank: int, in_size: int, out_size: int) -> tuple[Tensor, Tensor] | None:
        if not rank:
            return None
        down = torch.randn(rank, in_size, generator=random) / in_size**0.5
        return down.to(dtype), (torch.randn(out_size, rank, generator=random) / rank**0.5).to(dtype)

    return [
        {
            name: [part(rank, in_size, out) for rank, out in zip(ranks[name], out_sizes, strict=True)]
            for name, (in_size, out_sizes) in sizes(spec).items()
        }
        for ranks in RANKS
    ]


def weights(spec: BlockSpec, dtype: torch.dtype) -> BlockWeights:
    random = torch.Generator().manual_seed(4)
    matrices = {
        name: (torch.randn(sum(out_sizes), in_size, generator=random) / in_size**0.5).to(dtype)
        for name, (in_size, out_sizes) in sizes(spec).items()
    }
    biases = {
        f"{name}_bias": torch.randn(matrix.shape[0], generator=random).to(dtype) for name, matrix in matrices.items()
    }
    norm = torch.ones(spec.hidden_size, dtype=dtype)
    return BlockWeights(**matrices, **biases, attention_norm=norm, mlp_norm=norm.clone())


def reference(spec: BlockSpec, dtype: torch.dtype, slots: Tensor) -> PlainBlock:
    """Separate operations in fp32 on the same values."""
    wide = {
        name: None if tensor is None else tensor.float()
        for name in BlockWeights.__dataclass_fields__
        if (tensor := getattr(weights(spec, dtype), name)) is not None
    }
    block = PlainBlock(spec, BlockWeights(**wide), TorchOpSet("cpu", torch.float32))
    known = adapters(spec, dtype)

    def adapted(name: str, op: Op) -> Op:
        def call(rows: Tensor) -> Tensor:
            out = op(rows).clone()
            for i, slot in enumerate(slots.tolist()):
                for part, own in zip(
                    known[slot][name] if slot >= 0 else (), torch.split(out[i], sizes(spec)[name][1]), strict=False
                ):
                    if part is not None:
                        own += part[1].float() @ (part[0].float() @ rows[i])
            return out

        return call

    block.linears = {name: adapted(name, op) for name, op in block.linears.items()}
    return block


def fused(library: CDLL, spec: BlockSpec, dtype: torch.dtype, *, num_threads: int = 2) -> CpuBlock:
    """A block whose slots have been used before, by others."""
    block = CpuOpSet(num_threads=num_threads, library=library).block(spec, weights(spec, dtype))
    assert isinstance(block, CpuBlock)
    known = adapters(spec, dtype)
    for name, (_, out_sizes) in sizes(spec).items():
        table = block.low_rank(name, len(known), 16, out_sizes)
        for slot in range(len(known)):
            table.write(slot, table.prepare(known[(slot + 1) % len(known)][name]))
        for slot, own in enumerate(known):
            table.write(slot, table.prepare(own[name]))
    return block


def inputs(spec: BlockSpec, dtype: torch.dtype, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(5)
    hidden = torch.randn(num_rows, spec.hidden_size, generator=random).to(dtype)
    attended = torch.randn(num_rows, spec.num_heads * spec.head_dim, generator=random).to(dtype)
    angle = torch.rand(num_rows, spec.rotary_dim // 2, generator=random).repeat(1, 2)
    return hidden, attended, angle.cos(), angle.sin()


def run(
    block: CpuBlock,
    spec: BlockSpec,
    rows: tuple[Tensor, ...],
    slots: Tensor | None,
    pick: slice | list[int] = slice(None),
) -> list[Tensor]:
    """q, k, v and the rows after the layer, of some of the rows."""
    hidden, attended, cos, sin = (tensor[pick].contiguous() for tensor in rows)
    own = None if slots is None else slots[pick].contiguous()
    found = [tensor.clone() for tensor in block.before(hidden, cos, sin, own)]
    return [*found, block.after(hidden.clone(), attended, own)]


def ragged(num_rows: int) -> Tensor:
    """Runs of 1 to 30 tokens, -1 among them."""
    random = torch.Generator().manual_seed(num_rows)
    runs = torch.randint(-1, len(RANKS), (num_rows,), generator=random)
    counts = torch.randint(1, 31 if num_rows > 40 else 3, (num_rows,), generator=random)
    return torch.repeat_interleave(runs, counts)[:num_rows].to(torch.int32)


@pytest.mark.parametrize("spec", [EVEN, ODD], ids=["even", "odd"])
@pytest.mark.parametrize("num_rows", [1, 9, 120])
@pytest.mark.parametrize("name", DTYPES)
def test_rows_get_their_own_adapter(library: CDLL, spec: BlockSpec, num_rows: int, name: str) -> None:
    dtype = getattr(torch, name)
    rows, slots = inputs(spec, dtype, num_rows), ragged(num_rows)
    found = run(fused(library, spec, dtype), spec, rows, slots)
    hidden, attended, cos, sin = rows
    block = reference(spec, dtype, slots)
    exact = [*block.before(hidden.float(), cos, sin), block.after(hidden.float(), attended.float())]
    for mine, right in zip(found, exact, strict=True):
        atol, rtol = 4 * TOLERANCES[name].atol, 2 * TOLERANCES[name].rtol
        torch.testing.assert_close(mine.float(), right, atol=atol, rtol=rtol)


@pytest.mark.parametrize("spec", [EVEN, ODD], ids=["even", "odd"])
@pytest.mark.parametrize("name", DTYPES)
def test_bits_do_not_depend_on_the_batch(library: CDLL, spec: BlockSpec, name: str) -> None:
    """Alone, reversed, or on one thread; and rows without an adapter have the bits of a step without adapters."""
    dtype = getattr(torch, name)
    rows, slots = inputs(spec, dtype, 120), ragged(120)
    block, single = fused(library, spec, dtype), fused(library, spec, dtype, num_threads=1)
    whole = run(block, spec, rows, slots)
    plain = run(block, spec, rows, None)
    backwards = list(range(119, -1, -1))
    variants: list[tuple[list[Tensor], Callable[[Tensor], Tensor]]] = [
        (run(single, spec, rows, slots), lambda x: x),
        (run(block, spec, rows, slots, backwards), lambda x: x.flip(0)),
    ]
    for found, order in variants:
        assert all(torch.equal(order(mine), right) for mine, right in zip(found, whole, strict=True))
    for i in (0, 50, 119):
        alone = run(block, spec, rows, slots, [i])
        assert all(torch.equal(mine[0], right[i]) for mine, right in zip(alone, whole, strict=True))
    base = slots < 0
    assert base.any()
    assert all(torch.equal(mine[base], right[base]) for mine, right in zip(whole, plain, strict=True))
    assert not torch.equal(whole[3][~base], plain[3][~base])
