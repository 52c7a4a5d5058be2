"""Compile every kernel ahead of time, without a GPU, and say what it takes: registers, spills, shared memory.

`python -m enginectl_attention_triton.aot` prints the table of the README. Not in a process with TRITON_INTERPRET set.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from enginectl_attention_triton import attention_kernels, op_kernels, sample_kernels
from enginectl_attention_triton.config import (
    MAX_SPLITS,
    NARROW_QUERIES,
    Shape,
    Tile,
    join_warps,
    narrow_tile,
    padded_dim,
    power_of_two,
    shared_limit,
    wide_tile,
)

ARCHITECTURES = (80, 86, 90, 100)
POINTERS = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16"}
ITEMSIZES = {"float32": 4, "float16": 2, "bfloat16": 2}

SHAPES = (
    Shape(0, 8, 4, 64, 64, 0, 0),
    Shape(0, 3, 3, 64, 64, 0, 0),
    Shape(0, 8, 1, 80, 80, 0, 0),
    Shape(0, 8, 4, 128, 128, 0, 0),
    Shape(0, 4, 7, 128, 128, 4096, 0),
    Shape(0, 8, 8, 128, 128, 0, 8192),
    Shape(0, 4, 2, 256, 256, 1024, 0),
)
"""What real models have: Llama 1B, SmolLM2, Phi-2's odd heads, Llama 8B, Qwen2 with a window, chunks, Gemma."""


@dataclass(frozen=True)
class Spec:
    """One specialisation. pointers, sizes, floats: runtime arguments by kind, pointers with their types."""

    name: str
    kernel: Any
    pointers: dict[str, str]
    sizes: tuple[str, ...]
    floats: tuple[str, ...]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True)
class Usage:
    """What a compiled kernel takes of a program. spill_bytes: local memory a thread; shared_bytes: of a program."""

    name: str
    capability: int
    registers: int | None
    spill_bytes: int | None
    shared_bytes: int
    shared_limit: int


def specs(capability: int, dtypes: Sequence[str] = ("bfloat16", "float16", "float32")) -> Iterator[Spec]:
    """Every kernel in the configurations this architecture launches."""
    for dtype in dtypes:
        for shape in SHAPES:
            yield from _attention_specs(shape, dtype, capability)
        yield _write_spec(dtype)
        yield from _op_specs(dtype)


def _attention_specs(shape: Shape, dtype: str, capability: int) -> Iterator[Spec]:
    size = ITEMSIZES[dtype]
    heads = f"{shape.num_kv_heads}x{shape.heads_per_kv}x{shape.head_dim}"
    decode = narrow_tile(shape, 1, itemsize=size)
    yield _attend_spec(f"decode {heads} {dtype}", shape, dtype, decode, one_query=True, num_splits=8)
    drafts = narrow_tile(shape, NARROW_QUERIES, itemsize=size)
    yield _attend_spec(f"drafts {heads} {dtype}", shape, dtype, drafts, one_query=False, num_splits=8)
    wide = wide_tile(shape, itemsize=size, capability=capability)
    yield _attend_spec(f"prefill {heads} {dtype}", shape, dtype, wide, one_query=False, num_splits=1)
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


def _attend_spec(name: str, shape: Shape, dtype: str, tile: Tile, *, one_query: bool, num_splits: int) -> Spec:
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
            "NUM_SPLITS": num_splits,
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
    from enginectl_attention_triton.op_launch import (
        ARGMAX_BLOCK,
        GATED_BLOCK,
        SAMPLE_BLOCK,
        SAMPLE_WARPS,
        norm_warps,
    )

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
            {"logits": "*fp32", "params": "*fp64", "out": "*i64"},
            ("row_stride", "num_rows"),
            (),
            {"SIZE": 128256, "BITS": 36, "BLOCK": SAMPLE_BLOCK},
            SAMPLE_WARPS,
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


def compile_spec(spec: Spec, capability: int) -> Any:
    """Triton's compiled kernel for one architecture. Pointers and sizes are multiples of 16, as in real launches."""
    names = spec.kernel.arg_names
    signature: dict[str, str] = {}
    for name in names:
        if name in spec.pointers:
            signature[name] = spec.pointers[name]
        elif name in spec.sizes:
            signature[name] = "i32"
        elif name in spec.floats:
            signature[name] = "fp32"
        else:
            signature[name] = "constexpr"
    constants = {(names.index(name),): value for name, value in spec.constants.items()}
    aligned = [name for name in names if name in spec.pointers or "stride" in name]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=spec.kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def usage(spec: Spec, capability: int) -> Usage:
    """Compile and measure."""
    compiled = compile_spec(spec, capability)
    registers, spills = resource_usage(compiled.asm["cubin"])
    limit = shared_limit(capability)
    return Usage(spec.name, capability, registers, spills, compiled.metadata.shared, limit)


def resource_usage(cubin: bytes) -> tuple[int | None, int | None]:
    """(registers, bytes of local memory) a thread, or (None, None) where cubin tools are missing."""
    tool = find_cuobjdump()
    if tool is None:
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    registers = [int(found) for found in re.findall(r"REG:(\d+)", text.stdout)]
    stacks = [int(found) for found in re.findall(r"STACK:(\d+)", text.stdout)]
    locals_ = [int(found) for found in re.findall(r"LOCAL:(\d+)", text.stdout)]
    return (max(registers), max(stacks + locals_)) if registers else (None, None)


def find_cuobjdump() -> str | None:
    """The one in Triton's wheel."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return str(path) if path.exists() else None


def table(usages: Sequence[Usage]) -> str:
    """Markdown: a row a kernel; registers / spilled bytes / shared KiB by architecture."""
    names = dict.fromkeys(found.name for found in usages)
    by_key = {(found.name, found.capability): found for found in usages}
    capabilities = sorted({found.capability for found in usages})

    def cell(one: Usage) -> str:
        return f"{one.registers} / {one.spill_bytes} / {one.shared_bytes / 1024:.1f}"

    lines = ["| kernel | " + " | ".join(f"sm_{c}" for c in capabilities) + " |", "|---" * (len(capabilities) + 1) + "|"]
    for name in names:
        lines.append(f"| {name} | " + " | ".join(cell(by_key[name, c]) for c in capabilities) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print the table, or with --json a list of what each kernel takes. Status 1 if one takes too much."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--architectures", type=int, nargs="*", default=list(ARCHITECTURES))
    parser.add_argument("--dtypes", nargs="*", default=list(POINTERS), choices=list(POINTERS))
    parser.add_argument("--only", default="", help="regular expression: kernels whose name it matches")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = [
        usage(spec, capability)
        for capability in args.architectures
        for spec in specs(capability, args.dtypes)
        if re.search(args.only, spec.name)
    ]
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
