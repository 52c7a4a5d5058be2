"""The CPU kernels alone: bandwidth at one row, FLOP/s at many, paged attention, and whole steps of a model's shape.

    python bench/cpu_kernels.py [--json] [--threads 2] [--op-set cpu|torch] [--only gemm|attention|step]

Shapes are SmolLM2-135M's, weights are random. Every figure is the least of several short runs: on a machine with other
work the least is what says something about the kernel.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from enginectl.builtin.attention_torch import TorchAttention
from enginectl.builtin.native.block import PlainBlock
from enginectl.builtin.native.head import PlainHead
from enginectl.builtin.ops_torch import TorchOpSet
from enginectl.interfaces.attention import AttentionBackend
from enginectl.interfaces.model import LayerSpec
from enginectl.interfaces.ops import Block, BlockSpec, BlockWeights, Head, Op, OpSet
from enginectl.testing.paging import Pages

NUM_LAYERS, VOCAB_SIZE, BLOCK_SIZE = 30, 49_152, 16
SPEC = BlockSpec(
    hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64, eps=1e-5, rotary_dim=64
)
LAYER = LayerSpec(num_heads=9, num_kv_heads=3, head_dim=64, v_head_dim=64, scale=0.125)
DTYPE = torch.bfloat16

Row = dict[str, Any]


def least(run: Callable[[], object], *, seconds: float) -> float:
    """Seconds of the fastest of the runs that fit."""
    run()
    best, deadline = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return best


def noise(*shape: int) -> torch.Tensor:
    """Numbers that keep a deep model's rows near unit size."""
    return torch.randn(shape).mul_(0.05).to(DTYPE)


def call_each(ops: list[Op], x: torch.Tensor) -> None:
    """So many that a cache does not hold their weights."""
    for op in ops:
        op(x)


def op_set(name: str) -> OpSet:
    """By the name of its provider."""
    if name == "torch":
        return TorchOpSet("cpu", DTYPE)
    from enginectl_attention_cpu.ops import CpuOpSet

    return CpuOpSet()


def attention(name: str, layers: list[LayerSpec]) -> AttentionBackend:
    """By the name of its provider."""
    if name == "torch":
        return TorchAttention(layers, block_size=BLOCK_SIZE, device="cpu", dtype=DTYPE)
    from enginectl_attention_cpu.attention import CpuAttention

    return CpuAttention(layers, block_size=BLOCK_SIZE, dtype=DTYPE)


def store(num_layers: int, num_blocks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """An empty KV store."""
    shape = (num_blocks, BLOCK_SIZE, LAYER.num_kv_heads, LAYER.head_dim)
    return [(torch.zeros(shape, dtype=DTYPE), torch.zeros(shape, dtype=DTYPE)) for _ in range(num_layers)]


def bench_gemm(name: str, seconds: float) -> Iterator[Row]:
    """Linears of 576 → 3072, as many as a cache does not hold, and the head."""
    ops, copies = op_set(name), 30
    linears = [ops.linear(noise(3072, 576), None) for _ in range(copies)]
    for rows in (1, 4, 8, 32, 256):
        x = noise(rows, 576)
        spent = least(partial(call_each, linears, x), seconds=seconds) / copies
        yield {
            "what": f"linear 576 → 3072, {rows} rows",
            "us": spent * 1e6,
            "gb_per_s": 3072 * 576 * 2 / spent / 1e9,
            "gflop_per_s": 2 * rows * 3072 * 576 / spent / 1e9,
        }


def bench_attention(name: str, seconds: float) -> Iterator[Row]:
    """One layer: decodes, a long context, a few queries a row, a prompt."""
    for what, before, work in (
        ("decode 8 × 256", 255, [(i, 1) for i in range(8)]),
        ("decode 64 × 256", 255, [(i, 1) for i in range(64)]),
        ("decode 1 × 8192", 8191, [(0, 1)]),
        ("8 × 4 queries over 256", 252, [(i, 4) for i in range(8)]),
        ("prompt of 1024", 0, [(0, 1024)]),
    ):
        backend = attention(name, [LAYER])
        pages = Pages(block_size=BLOCK_SIZE, num_blocks=1200)
        backend.bind(store(1, 1200))
        for sequence, _ in work if before else []:
            batch = pages.advance([(sequence, before)])
            backend.write_kv(0, noise(before, 3, 64), noise(before, 3, 64), backend.prepare(batch))
        plan = backend.prepare(pages.advance(work))
        q = noise(sum(count for _, count in work), 9, 64)
        yield {"what": what, "us": least(partial(backend.attend, 0, q, plan), seconds=seconds) * 1e6}


class Stack:
    """Layers and a head of random weights, run like a native model."""

    def __init__(self, name: str) -> None:
        ops = op_set(name)
        self.blocks = [self._block(ops) for _ in range(NUM_LAYERS)]
        norm, weight = torch.ones(SPEC.hidden_size, dtype=DTYPE), noise(VOCAB_SIZE, SPEC.hidden_size)
        head = ops.head(norm, weight, SPEC)
        self.head: Head = head or PlainHead(norm, weight, SPEC, ops)
        self.backend = attention(name, [LAYER] * NUM_LAYERS)
        self.backend.bind(store(NUM_LAYERS, 2600))

    def _block(self, ops: OpSet) -> Block:
        hidden, middle = SPEC.hidden_size, SPEC.intermediate_size
        ones = torch.ones(hidden, dtype=DTYPE)
        weights = BlockWeights(
            qkv=noise(15 * 64, hidden),
            qkv_bias=None,
            output=noise(hidden, 9 * 64),
            output_bias=None,
            gate_up=noise(2 * middle, hidden),
            down=noise(hidden, middle),
            attention_norm=ones,
            mlp_norm=ones,
        )
        return ops.block(SPEC, weights) or PlainBlock(SPEC, weights, ops)

    def step(self, hidden: torch.Tensor, plan: Any, cos: torch.Tensor, sin: torch.Tensor, keep: torch.Tensor) -> None:
        """What a native model does, and the head's greedy tokens."""
        hidden = hidden.clone()
        for i, block in enumerate(self.blocks):
            q, k, v = block.before(hidden, cos, sin)
            self.backend.write_kv(i, k, v, plan)
            attended = self.backend.attend(i, q, plan).flatten(1)
            if i == NUM_LAYERS - 1:
                hidden, attended = hidden.index_select(0, keep), attended.index_select(0, keep)
            hidden = block.after(hidden, attended)
        self.head.greedy(hidden)


def bench_step(name: str, seconds: float) -> Iterator[Row]:
    """Thirty layers and the head: decodes at 256 tokens of context, and a prompt."""
    stack = Stack(name)
    for what, before, work in (
        ("step, 1 decode", 255, [(0, 1)]),
        ("step, 8 decodes", 255, [(i, 1) for i in range(8)]),
        ("step, 32 decodes", 255, [(i, 1) for i in range(32)]),
        ("step, 64 decodes", 255, [(i, 1) for i in range(64)]),
        ("step, prompt of 1024", 0, [(0, 1024)]),
    ):
        pages = Pages(block_size=BLOCK_SIZE, num_blocks=2600)
        if before:
            pages.advance([(sequence, before) for sequence, _ in work])
        batch = pages.advance(work)
        plan = stack.backend.prepare(batch)
        angles = torch.rand(batch.num_tokens, SPEC.rotary_dim)
        cos, sin, hidden = angles.cos(), angles.sin(), noise(batch.num_tokens, SPEC.hidden_size)
        keep = batch.query_start[1:].long() - 1
        with torch.inference_mode():
            spent = least(partial(stack.step, hidden, plan, cos, sin, keep), seconds=seconds)
        yield {"what": what, "us": spent * 1e6, "tokens_per_s": batch.num_tokens / spent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--op-set", choices=["cpu", "torch"], default="cpu", help="op set and attention backend")
    parser.add_argument("--only", choices=["gemm", "attention", "step"])
    parser.add_argument("--seconds", type=float, default=0.5, help="for each figure")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    parts = {"gemm": bench_gemm, "attention": bench_attention, "step": bench_step}
    rows = []
    for part in [args.only] if args.only else parts:
        for row in parts[part](args.op_set, args.seconds):
            rows.append(row)
            if not args.json:
                print(
                    f"{row['what']:32}",
                    *(f"{key} {value:,.1f}" for key, value in row.items() if key != "what"),
                    sep="  ",
                )
    if args.json:
        print(
            json.dumps({"threads": args.threads, "op_set": args.op_set, "dtype": "bfloat16", "results": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
