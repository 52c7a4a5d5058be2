"""Every kernel as it is launched, to be compiled ahead of time, without a GPU: registers, spills, shared memory.

`python -m enginectl_attention_triton.aot` prints the table of `compiled.md`. Not in a process with TRITON_INTERPRET set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from enginectl.testing.triton_kernels import ITEMSIZES, POINTERS, Spec, main
from enginectl_attention_triton import attention_kernels, op_kernels, sample_kernels
from enginectl_attention_triton.config import (
    MAX_SPLITS,
    NARROW_QUERIES,
    Shape,
    Tile,
    fits_a_tile,
    join_warps,
    narrow_tile,
    padded_dim,
    power_of_two,
    wide_tile,
)
from enginectl_attention_triton.op_launch import ARGMAX_BLOCK, GATED_BLOCK, SAMPLE_BLOCK, SAMPLE_WARPS, norm_warps

SHAPES = (
    Shape(0, 8, 4, 64, 64, 0, 0),
    Shape(0, 3, 3, 64, 64, 0, 0),
    Shape(0, 8, 1, 80, 80, 0, 0),
    Shape(0, 8, 4, 128, 128, 0, 0),
    Shape(0, 4, 7, 128, 128, 4096, 0),
    Shape(0, 8, 8, 128, 128, 0, 8192),
    Shape(0, 4, 2, 256, 256, 1024, 0),
    Shape(0, 1, 71, 64, 64, 0, 0),
    Shape(0, 1, 16, 256, 256, 0, 0),
    Shape(0, 1, 128, 128, 128, 0, 0),
)
"""What real models have: Llama 1B, SmolLM2, Phi-2's odd heads, Llama 8B, Qwen2 with a window, chunks, Gemma, Falcon's
one KV head; then the largest groups there are tiles for.
"""


def specs(capability: int, dtypes: Sequence[str] = tuple(POINTERS)) -> Iterator[Spec]:
    """Every kernel in the configurations this architecture launches."""
    for dtype in dtypes:
        for shape in SHAPES:
            if not fits_a_tile(shape, itemsize=ITEMSIZES[dtype]):
                continue
            yield from _attention_specs(shape, dtype, capability)
        yield _write_spec(dtype)
        yield from _op_specs(dtype)


def _attention_specs(shape: Shape, dtype: str, capability: int) -> Iterator[Spec]:
    size = ITEMSIZES[dtype]
    heads = f"{shape.num_kv_heads}x{shape.heads_per_kv}x{shape.head_dim}"
    decode = narrow_tile(shape, 1, itemsize=size)
    yield _attend_spec(f"decode {heads} {dtype}", shape, dtype, decode, one_query=True, is_split=True)
    drafts = narrow_tile(shape, NARROW_QUERIES, itemsize=size)
    yield _attend_spec(f"drafts {heads} {dtype}", shape, dtype, drafts, one_query=False, is_split=True)
    wide = wide_tile(shape, itemsize=size, capability=capability)
    yield _attend_spec(f"prefill {heads} {dtype}", shape, dtype, wide, one_query=False, is_split=False)
    yield Spec(
        f"join {heads} {dtype}",
        attention_kernels.join_kernel,
        {"partial": "*fp32", "partial_lse": "*fp32", "out": POINTERS[dtype], "query_start": "*i32", "tiles": "*i32"},
        (),
        (),
        {
            "NUM_HEADS": shape.num_kv_heads * shape.heads_per_kv,
            "V_HEAD_DIM": shape.v_head_dim,
            "QUERIES": 1,
            "ONE_QUERY": True,
            "NUM_SPLITS": MAX_SPLITS,
            "BLOCK_DV": power_of_two(shape.v_head_dim),
        },
        join_warps(MAX_SPLITS, shape.v_head_dim),
    )


def _attend_spec(name: str, shape: Shape, dtype: str, tile: Tile, *, one_query: bool, is_split: bool) -> Spec:
    data = dict.fromkeys(("q", "keys", "values", "out", "sinks"), POINTERS[dtype])
    scratch = dict.fromkeys(("partial", "partial_lse"), "*fp32")
    tables = dict.fromkeys(("block_table", "query_start", "seq_lens", "tiles"), "*i32")
    return Spec(
        name,
        attention_kernels.attend_kernel,
        data | scratch | tables,
        ("q_stride_token", "q_stride_head", "table_stride"),
        (),
        {
            "NUM_KV_HEADS": shape.num_kv_heads,
            "HEADS_PER_KV": shape.heads_per_kv,
            "HEAD_DIM": shape.head_dim,
            "V_HEAD_DIM": shape.v_head_dim,
            "BLOCK_SIZE": 16,
            "SCALE": shape.head_dim**-0.5,
            "WINDOW": shape.window,
            "CHUNK": shape.chunk,
            # The shape with windows stands for models that also cap their scores and have sinks.
            "SOFT_CAP": 50.0 if shape.window else 0.0,
            "HAS_SINKS": bool(shape.window),
            "ONE_QUERY": one_query,
            "QUERIES": 1 if one_query else tile.rows // shape.heads_per_kv,
            "IS_SPLIT": is_split,
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.keys,
            "BLOCK_D": padded_dim(shape.head_dim),
            "BLOCK_DV": padded_dim(shape.v_head_dim),
        },
        tile.num_warps,
        tile.num_stages,
    )


def _write_spec(dtype: str) -> Spec:
    return Spec(
        f"write 8x128 {dtype}",
        attention_kernels.write_kernel,
        dict.fromkeys(("k", "v", "keys", "values"), POINTERS[dtype]) | {"slots": "*i64"},
        ("num_rows", "k_stride_token", "k_stride_head", "v_stride_token", "v_stride_head"),
        (),
        {"NUM_KV_HEADS": 8, "HEAD_DIM": 128, "V_HEAD_DIM": 128, "BLOCK_ROWS": 16, "BLOCK_D": 128, "BLOCK_DV": 128},
    )


def _op_specs(dtype: str) -> Iterator[Spec]:
    kind = POINTERS[dtype]
    for size, add in ((4096, False), (4096, True), (16384, True)):
        block = power_of_two(size)
        yield Spec(
            f"rms_norm {size}{' + residual' if add else ''} {dtype}",
            op_kernels.rms_norm_kernel,
            dict.fromkeys(("x", "residual", "weight", "out"), kind),
            ("x_stride", "residual_stride"),
            ("eps",),
            {"SIZE": size, "PLUS_ONE": False, "ADD": add, "SCALE": 1.0, "BLOCK": block},
            norm_warps(block),
        )
    for activation in ("silu", "gelu_tanh"):
        yield Spec(
            f"gated {activation} {dtype}",
            op_kernels.gated_kernel,
            {"gate_up": kind, "out": kind},
            ("row_stride",),
            (),
            {"SIZE": 14336, "ACTIVATION": activation, "BLOCK": GATED_BLOCK},
        )
    for norm, write in ((False, False), (True, False), (False, True)):
        yield _rope_spec(dtype, norm=norm, write=write)
    if dtype == "float32":
        yield Spec(
            "argmax pieces",
            op_kernels.argmax_pieces_kernel,
            {"logits": "*fp32", "best": "*fp32", "best_id": "*i32"},
            ("row_stride", "num_pieces"),
            (),
            {"SIZE": 128256, "BLOCK": ARGMAX_BLOCK},
        )
        yield Spec(
            "argmax join",
            op_kernels.argmax_join_kernel,
            {"best": "*fp32", "best_id": "*i32", "out": "*i64"},
            ("num_pieces",),
            (),
            {"BLOCK": 32},
        )
        yield Spec(
            "sample",
            sample_kernels.sample_kernel,
            {"logits": "*fp32", "row_params": "*fp64", "out": "*i64"},
            ("row_stride", "num_rows"),
            (),
            {"SIZE": 128256, "BITS": 36, "BLOCK": SAMPLE_BLOCK},
            SAMPLE_WARPS,
            enable_fp_fusion=False,
        )


def _rope_spec(dtype: str, *, norm: bool, write: bool) -> Spec:
    data = dict.fromkeys(("q", "k", "v", "q_weight", "k_weight", "keys", "values"), POINTERS[dtype])
    strides = ("q_stride_token", "q_stride_head", "k_stride_token", "k_stride_head", "v_stride_token", "v_stride_head")
    return Spec(
        f"rope{' + norm' if norm else ''}{' + write' if write else ''} 32+8x128 {dtype}",
        op_kernels.rope_kernel,
        data | {"cos": "*fp32", "sin": "*fp32", "slots": "*i64"},
        ("num_rows", *strides),
        ("eps",),
        {
            "NUM_HEADS": 32,
            "NUM_KV_HEADS": 8,
            "HEAD_DIM": 128,
            "V_HEAD_DIM": 128,
            "ROTARY_DIM": 128,
            "NORM": norm,
            "PLUS_ONE": False,
            "WRITE": write,
            "BLOCK_ROWS": 16,
            "BLOCK_HALF": 64,
            "BLOCK_REST": 1,
            "BLOCK_DV": 128,
        },
    )


if __name__ == "__main__":
    main(specs, __doc__)
