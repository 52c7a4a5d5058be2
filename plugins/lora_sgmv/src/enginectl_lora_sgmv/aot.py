"""Every kernel as it is launched, to be compiled ahead of time, without a GPU: registers, spills, shared memory.

`python -m enginectl_lora_sgmv.aot` prints the table. Not in a process with TRITON_INTERPRET set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from enginectl.testing.triton_kernels import ITEMSIZES, POINTERS, Spec, main
from enginectl_lora_sgmv.kernels import expand_kernel, shrink_kernel
from enginectl_lora_sgmv.triton_store import expand_tiles, shrink_tiles

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


def specs(capability: int, dtypes: Sequence[str] = tuple(POINTERS)) -> Iterator[Spec]:
    """Both kernels for decodes and for prompts, the same ones on every architecture."""
    for dtype in dtypes:
        for name, (in_size, out_sizes) in LINEARS.items():
            for rank in RANKS:
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
        ("num_tokens", "row_stride"),
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
        ("num_tokens", "out_stride"),
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


if __name__ == "__main__":
    main(specs, __doc__)
