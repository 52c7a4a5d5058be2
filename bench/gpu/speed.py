"""Sections that ask how fast: rooflines of the kernels, step times of whole models, the host's gap between steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness import Bench, backends, capabilities, context_for
from random_model import RandomSource, config_of, kv_bytes_per_token, weight_bytes

from enginectl.interfaces.model import LayerSpec
from enginectl.testing.paging import Pages

ROOT = Path(__file__).resolve().parents[2]


def rooflines(bench: Bench) -> None:
    """Decode attention in GB/s against a measured copy, prefill in TFLOP/s against a measured matmul."""
    dtype = bench.sizes(torch.bfloat16, torch.float32)
    copy_gb_s = measure_copy(bench)
    matmul_tflop_s = measure_matmul(bench, dtype)
    bench.add(what="copy", gb_s=copy_gb_s)
    bench.add(what="matmul", tflop_s=matmul_tflop_s)
    dim = bench.sizes(128, 16)
    layer = LayerSpec(
        num_heads=bench.sizes(32, 4), num_kv_heads=bench.sizes(8, 2), head_dim=dim, v_head_dim=dim, scale=dim**-0.5
    )
    decodes = bench.sizes([(1, 4096), (1, 32_768), (8, 4096), (64, 1024), (64, 4096), (256, 1024)], [(2, 30)])
    prefills = bench.sizes([(1, 2048), (1, 8192), (8, 1024)], [(1, 40)])
    for name, build in backends(bench).items():
        if isinstance(build, str):
            bench.add(backend=name, skipped=build)
            continue
        for rows, length in decodes:
            seconds = time_attention(bench, build, layer, rows, length, 1, dtype)
            size = rows * length * layer.num_kv_heads * 2 * dim * dtype.itemsize
            rate = size / seconds / 1e9
            bench.add(
                backend=name,
                what=f"decode {rows} x {length}",
                us=seconds * 1e6,
                gb_s=rate,
                of_copy=rate / copy_gb_s,
            )
        for rows, length in prefills:
            seconds = time_attention(bench, build, layer, rows, length, length, dtype)
            # Two products over half of the square that a causal mask leaves.
            rate = rows * 2 * 2 * layer.num_heads * dim * length * length / 2 / seconds / 1e12
            bench.add(
                backend=name,
                what=f"prefill {rows} x {length}",
                us=seconds * 1e6,
                tflop_s=rate,
                of_matmul=rate / matmul_tflop_s,
            )


def measure_copy(bench: Bench) -> float:
    """GB/s read and written by a device copy."""
    source = torch.zeros(bench.sizes(1 << 30, 1 << 16), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return 2 * source.numel() / bench.seconds(lambda: target.copy_(source)) / 1e9


def measure_matmul(bench: Bench, dtype: torch.dtype) -> float:
    """TFLOP/s of a square product."""
    n = bench.sizes(8192, 64)
    a, b = (torch.randn(n, n, device=bench.device).to(dtype) for _ in range(2))
    return float(2 * n**3 / bench.seconds(lambda: a @ b) / 1e12)


def time_attention(
    bench: Bench, build: Any, layer: LayerSpec, rows: int, length: int, queries: int, dtype: torch.dtype
) -> float:
    """Seconds of one `attend`; the store is larger than the cache."""
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


def steps(bench: Bench) -> None:
    """Decode steps of random-weight models by batch and backend, beside Hugging Face `generate`."""
    dtype = bench.sizes("bfloat16", "float32")
    copy_gb_s = measure_copy(bench)
    for shape in bench.sizes(["0.5B", "1.5B", "8B"], ["tiny"]):
        batches = bench.sizes([1, 8, 64, 256] if shape != "8B" else [1, 64], [1, 3])
        for backend in usable(bench, shape, dtype):
            with engine_for(bench, shape, dtype, backend, max(batches)) as engine:
                for batch in batches:
                    seconds = decode_step_s(bench, engine, batch)
                    floor = (weight_bytes(shape, 2) + batch * 256 * kv_bytes_per_token(shape, 2)) / copy_gb_s / 1e9
                    bench.add(
                        model=shape,
                        backend=backend,
                        batch=batch,
                        step_ms=seconds * 1e3,
                        tokens_s=batch / seconds,
                        of_floor=seconds / floor,
                    )
        if shape != "8B":
            for batch in bench.sizes([1, 64], [2]):
                seconds = transformers_step_s(bench, shape, dtype, batch)
                bench.add(
                    model=shape, backend="transformers", batch=batch, step_ms=seconds * 1e3, tokens_s=batch / seconds
                )


def usable(bench: Bench, shape: str, dtype: str) -> list[str]:
    """Backends that can run this model here. A dry run takes torch, whose engine runs on a CPU."""
    if bench.dry_run:
        return ["torch"]
    if shape != "0.5B":  # core's own is there to be right, and says so on the smallest
        wanted = ("triton", "flashinfer")
    else:
        wanted = ("triton", "flashinfer", "torch")
    dim = config_of(shape)["head_dim"]
    found = []
    for name, build in backends(bench).items():
        can = capabilities(name)
        if (
            name in wanted
            and not isinstance(build, str)
            and (can.head_dims is None or dim in can.head_dims)
            and dtype in can.dtypes
        ):
            found.append(name)
    return found


def engine_for(bench: Bench, shape: str, dtype: str, backend: str, batch: int, **options: Any) -> Any:
    """An engine over random weights; prompts are token ids."""
    from enginectl import Engine

    options = {"max_num_seqs": batch, "max_model_len": bench.sizes(1024, 256), **options}
    if bench.dry_run:
        options["num_gpu_blocks_override"] = 200
    source = RandomSource(shape, dtype, bench.device)
    return Engine(str(ROOT), weights=source, attention=backend, dtype=dtype, device=bench.device, **options)


def decode_step_s(
    bench: Bench, engine: Any, batch: int, *, params: dict[str, Any] | None = None, adapters: Sequence[str] = ()
) -> float:
    """A step of pure decoding: the difference of a long and a short answer, so that prompts cancel out."""
    short, long = bench.sizes((32, 288), (2, 6))
    times = []
    for num_tokens in (short, short, long):  # the first one warms up
        start = time.perf_counter()
        generate(engine, batch, num_tokens, bench.sizes(128, 8), params=params, adapters=adapters)
        times.append(time.perf_counter() - start)
    return max(times[2] - times[1], 1e-9) / (long - short)


def generate(
    engine: Any,
    batch: int,
    num_tokens: int,
    prompt_len: int,
    *,
    params: dict[str, Any] | None = None,
    adapters: Sequence[str] = (),
) -> list[tuple[list[int], tuple[int, ...]]]:
    """Prompts, told apart by their first token, and what came out. adapters: given to the prompts in turn."""
    from enginectl import SamplingParams

    prompts = [[3 + i, *((7 * i + j) % 200 + 3 for j in range(1, prompt_len))] for i in range(batch)]
    wanted = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **(params or {"temperature": 0.0}))
    if not adapters:
        outputs = engine.generate(prompts, wanted)
        return [(prompt, output.outputs[0].token_ids) for prompt, output in zip(prompts, outputs, strict=True)]
    streams = [engine.stream(prompt, wanted, adapter=adapters[i % len(adapters)]) for i, prompt in enumerate(prompts)]
    started = [next(stream).token_ids for stream in streams]  # all run once the last one has its first token
    rest = [[token for chunk in stream for token in chunk.token_ids] for stream in streams]
    return [(prompt, (*first, *more)) for prompt, first, more in zip(prompts, started, rest, strict=True)]


def transformers_step_s(bench: Bench, shape: str, dtype: str, batch: int) -> float:
    """Hugging Face `generate` on the same shape, by the same difference."""
    from transformers import LlamaConfig, LlamaForCausalLM

    values = {key: value for key, value in config_of(shape).items() if key not in ("model_type", "architectures")}
    with torch.device(bench.device):
        model = LlamaForCausalLM(LlamaConfig(**values)).to(getattr(torch, dtype)).eval()
    ids = torch.randint(3, 200, (batch, bench.sizes(128, 8)), device=bench.device)
    short, long = bench.sizes((32, 96), (2, 4))
    times = []
    for num_tokens in (short, short, long):
        start = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        if not bench.dry_run:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return max(times[2] - times[1], 1e-9) / (long - short)


def host_gap(bench: Bench) -> None:
    """The part of a decode step in which the device has nothing to do."""
    dtype = bench.sizes("bfloat16", "float32")
    for shape, batch in bench.sizes([("0.5B", 1), ("0.5B", 64), ("1.5B", 64), ("8B", 64)], [("tiny", 2)]):
        backend = usable(bench, shape, dtype)[0] if bench.dry_run else "triton"
        with engine_for(bench, shape, dtype, backend, batch) as engine:
            prompt_len, num_tokens = bench.sizes((16, 64), (4, 4))
            generate(engine, batch, num_tokens, prompt_len)
            activities = [torch.profiler.ProfilerActivity.CPU]
            if not bench.dry_run:
                activities = [torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities) as profile:
                generate(engine, batch, num_tokens, prompt_len)
            spans = sorted(
                (event.time_range.start, event.time_range.end)
                for event in profile.events()
                if bench.dry_run or event.device_type == torch.autograd.DeviceType.CUDA
            )
            bench.add(model=shape, batch=batch, backend=backend, idle_part=idle_part(spans))


def idle_part(spans: list[tuple[float, float]]) -> float:
    """1 less the union of the spans over their range."""
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return 1.0 - busy / max(reached - spans[0][0], 1e-9)
