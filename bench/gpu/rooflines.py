"""The section that asks how near the attention kernels are to what the device can do."""

from __future__ import annotations

from typing import Any

import torch
from harness import Bench, backends, context_for

from enginectl.interfaces.model import LayerSpec
from enginectl.testing.paging import Pages


def rooflines(bench: Bench) -> None:
    """Decode attention in GB/s against a measured copy, prefill in TFLOP/s against a measured matmul."""
    dtype = bench.sizes(torch.bfloat16, torch.float32)
    copy_gb_s = measure_copy(bench)
    bench.add(what="copy", gb_s=copy_gb_s)
    dim = bench.sizes(128, 16)
    layer = LayerSpec(
        num_heads=bench.sizes(32, 4), num_kv_heads=bench.sizes(8, 2), head_dim=dim, v_head_dim=dim, scale=dim**-0.5
    )
    decodes = bench.sizes([(64, 4096), (1, 4096), (1, 32_768), (8, 4096), (64, 1024), (256, 1024)], [(2, 30)])
    prefills = bench.sizes([(1, 2048), (1, 8192), (8, 1024)], [(1, 40)])
    able = {}
    for name, build in backends(bench).items():
        if isinstance(build, str):
            bench.add(backend=name, skipped=build)
        else:
            able[name] = build
    for rows, length in decodes:
        size = rows * length * layer.num_kv_heads * 2 * dim * dtype.itemsize
        for name, build in able.items():
            what = {"backend": name, "what": f"decode {rows} x {length}"}
            with bench.attempt(**what):
                seconds = time_attention(bench, build, layer, rows, length, 1, dtype)
                rate = size / seconds / 1e9
                bench.add(**what, us=seconds * 1e6, gb_s=rate, of_copy=rate / copy_gb_s)
    matmul_tflop_s = measure_matmul(bench, dtype)
    bench.add(what="matmul", tflop_s=matmul_tflop_s)
    for rows, length in prefills:
        # Two products over half of the square that a causal mask leaves.
        num_operations = rows * 2 * 2 * layer.num_heads * dim * length * length / 2
        for name, build in able.items():
            what = {"backend": name, "what": f"prefill {rows} x {length}"}
            with bench.attempt(**what):
                seconds = time_attention(bench, build, layer, rows, length, length, dtype)
                rate = num_operations / seconds / 1e12
                bench.add(**what, us=seconds * 1e6, tflop_s=rate, of_matmul=rate / matmul_tflop_s)


def measure_copy(bench: Bench) -> float:
    """GB/s read and written by a device copy. Random numbers: some chips move zeros faster."""
    source = torch.empty(bench.sizes(1 << 29, 1 << 14), dtype=torch.int32, device=bench.device).random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / bench.seconds(lambda: target.copy_(source)) / 1e9


def measure_matmul(bench: Bench, dtype: torch.dtype) -> float:
    """TFLOP/s of a square product."""
    n = bench.sizes(8192, 64)
    a, b = (torch.randn(n, n, device=bench.device).to(dtype) for _ in range(2))
    return float(2 * n**3 / bench.seconds(lambda: a @ b) / 1e12)


def time_attention(
    bench: Bench, build: Any, layer: LayerSpec, rows: int, length: int, queries: int, dtype: torch.dtype
) -> float:
    """Seconds of one `attend`, its plan made before, as every layer of a model but the first finds it."""
    block = 16
    name = str(dtype).removeprefix("torch.")
    backend = build(context_for([layer], block_size=block, device=bench.device, dtype=name))
    pages = Pages(block_size=block, num_blocks=2 + rows * -(-length // block), device=bench.device)
    shape = (pages.num_blocks, block, layer.num_kv_heads, layer.head_dim)
    store = [torch.randn(shape, device=bench.device).to(dtype) for _ in range(2)]
    backend.bind([(store[0], store[1])])
    if length > queries:
        pages.advance([(i, length - queries) for i in range(rows)])
    batch = pages.advance([(i, queries) for i in range(rows)])
    plan = backend.prepare(batch)
    q = torch.randn(batch.num_tokens, layer.num_heads, layer.head_dim, device=bench.device).to(dtype)
    return bench.seconds(lambda: backend.attend(0, q, plan))
