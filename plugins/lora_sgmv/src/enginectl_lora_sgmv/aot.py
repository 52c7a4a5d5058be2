"""Compile every kernel ahead of time, without a GPU, and say what it takes: registers, spills, shared memory.

`python -m enginectl_lora_sgmv.aot` prints the table of the README. It needs enginectl-attention-triton, whose tools it
shares, and a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import triton

from enginectl_attention_triton.aot import ITEMSIZES, POINTERS, Spec, table, usage
from enginectl_lora_sgmv.kernels import expand_kernel, shrink_kernel
from enginectl_lora_sgmv.triton_store import expand_tiles, shrink_tiles

ARCHITECTURES = (80, 90, 100)
LINEARS = {
    "qkv 8B": (4096, (4096, 1024, 1024)),
    "gate_up 8B": (4096, (14336, 14336)),
    "down 8B": (14336, (4096,)),
    "qkv 135M": (576, (576, 192, 192)),
}
"""Width of the input and of each part of the output, of Llama 8B and SmolLM2 135M."""

RANKS = (8, 16, 32, 64, 128, 256)
"""Values of --max-lora-rank: what kernels are specialised for."""

TOKENS = (32, 4096)
NUM_SLOTS = 8


def specs(dtypes: Sequence[str], ranks: Sequence[int] = RANKS) -> Iterator[Spec]:
    """Both kernels for decodes and for prompts."""
    for dtype in dtypes:
        for name, (in_size, out_sizes) in LINEARS.items():
            for rank in ranks:
                for num_tokens in TOKENS:
                    yield from _specs(
                        f"{name} rank {rank}, {num_tokens} tokens, {dtype}", dtype, in_size, out_sizes, rank, num_tokens
                    )


def _specs(
    name: str, dtype: str, in_size: int, out_sizes: tuple[int, ...], rank: int, num_tokens: int
) -> Iterator[Spec]:
    kind, width = POINTERS[dtype], rank * len(out_sizes)
    step = {"tokens": "*i32", "starts": "*i32"}
    tiles = shrink_tiles(num_tokens, width, in_size, itemsize=ITEMSIZES[dtype])
    splits = tiles.splits
    common = {"WIDTH": width, "NUM_SLOTS": NUM_SLOTS, "NUM_SPLITS": splits}
    yield Spec(
        f"shrink {name}",
        shrink_kernel,
        {"rows": kind, "down": kind, "ranked": "*fp32", **step},
        ("row_stride", "split_stride"),
        (),
        {
            **common,
            "IN_SIZE": in_size,
            "BLOCK_M": tiles.rows,
            "BLOCK_N": tiles.columns,
            "BLOCK_K": tiles.inputs,
        },
        tiles.num_warps,
    )
    tiles = expand_tiles(num_tokens, rank, itemsize=ITEMSIZES[dtype])
    yield Spec(
        f"expand {name}",
        expand_kernel,
        {"ranked": "*fp32", "up": kind, "out": kind, **step, "bounds": "*i32"},
        ("out_stride", "split_stride"),
        (),
        {
            **common,
            "OUT_SIZE": sum(out_sizes),
            "RANK": rank,
            "BLOCK_M": tiles.rows,
            "BLOCK_N": tiles.columns,
            "BLOCK_R": tiles.inputs,
        },
        tiles.num_warps,
    )


def main() -> None:
    """Print the table, or with --json a list. Status 1 if a kernel takes too much."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--architectures", type=int, nargs="*", default=list(ARCHITECTURES))
    parser.add_argument("--dtypes", nargs="*", default=list(POINTERS), choices=list(POINTERS))
    parser.add_argument("--ranks", type=int, nargs="*", default=list(RANKS))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = [usage(spec, c) for c in args.architectures for spec in specs(args.dtypes, args.ranks)]
    if args.json:
        print(json.dumps([asdict(one) for one in found]))
    else:
        print(f"triton {triton.__version__}; registers / spilled bytes a thread / shared KiB a program\n")
        print(table(found))
    over = [one for one in found if one.shared_bytes > one.shared_limit or one.spill_bytes]
    for one in over:
        print(f"too much: {one}", file=sys.stderr)
    sys.exit(1 if over else 0)


if __name__ == "__main__":
    main()
