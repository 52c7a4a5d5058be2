"""Sections that ask whether results are right: kernels, conformance, sanitizer, greedy tokens, memory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness import Bench, backends, capabilities, context_for
from torch import Tensor

from enginectl.errors import EnginectlError
from enginectl.interfaces.attention import AttentionBatch
from enginectl.interfaces.model import LayerSpec
from enginectl.testing.paging import Pages
from enginectl.testing.tolerances import TOLERANCES

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

# (query heads, KV heads, head size, changes to the layer, block size)
CASES: list[tuple[int, int, int, dict[str, Any], int]] = [
    (32, 8, 128, {}, 16),
    (14, 2, 64, {}, 16),
    (9, 3, 64, {}, 1),
    (8, 8, 128, {}, 32),
    (28, 4, 128, {"window": 500}, 16),
    (8, 4, 256, {"soft_cap": 50.0, "window": 1024}, 64),
    (64, 8, 64, {"sinks": True, "window": 128}, 16),
    (32, 8, 128, {"chunk": 256}, 256),
    (32, 32, 80, {}, 16),
    (128, 8, 128, {}, 16),
]
DRY_CASES = [(4, 1, 128, {}, 16), (7, 1, 64, {}, 16), (3, 1, 64, {}, 1)]
"""The first ones with fewer heads: the interpreter takes time for each."""

WORK = [
    [(0, 1), (1, 1), (2, 1)],
    [(0, 1), (1, 5), (2, 3)],
    [(0, 1), (1, 700), (2, 4), (3, 130)],
]
"""Steps over sequences that already have a context: decodes, drafts, and chunks among both."""


def kernels(bench: Bench) -> None:
    """Every backend on fresh random inputs against fp64, with outputs and unwritten slots poisoned."""
    # Memory that is handed out uninitialised holds NaN: a number nobody wrote shows.
    torch.use_deterministic_algorithms(True, warn_only=True)
    seed = int.from_bytes(os.urandom(4), "little")
    cases = bench.sizes(CASES[:3] if bench.small else CASES, DRY_CASES)
    for dtype in ("bfloat16", "float16", "float32") if not bench.dry_run else ("float32", "float16"):
        for name, build in backends(bench).items():
            worst = 0.0
            num_cases = 0
            if isinstance(build, str):
                bench.add(backend=name, dtype=dtype, skipped=build)
                continue
            for heads, kv_heads, dim, changes, block in cases:
                layer = LayerSpec(
                    num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, v_head_dim=dim, scale=dim**-0.5, **changes
                )
                if not admits(name, layer, dtype):
                    continue
                context = context_for([layer], block_size=block, device=bench.device, dtype=dtype)
                errors = one_case(build(context), layer, block, dtype, bench, seed)
                worst = max(worst, errors)
                num_cases += 1
            bench.add(
                backend=name,
                dtype=dtype,
                cases=num_cases,
                error_of_tolerance=round(worst, 3),
                ok=worst <= 1,
                seed=seed,
            )
    torch.use_deterministic_algorithms(False)


def admits(name: str, layer: LayerSpec, dtype: str) -> bool:
    """Whether the backend claims this case. FlashInfer's windows do not include chunks."""
    can = capabilities(name)
    return not (
        (can.dtypes is not None and dtype not in can.dtypes)
        or (can.head_dims is not None and layer.head_dim not in can.head_dims)
        or (layer.sinks and not can.sinks)
        or (layer.chunk is not None and (name == "flashinfer" or not can.sliding_window))
        or (layer.soft_cap is not None and not can.soft_cap)
    )


def one_case(backend: Any, layer: LayerSpec, block: int, dtype: str, bench: Bench, seed: int) -> float:
    """The largest error over the steps, as a part of the tolerance."""
    device, random = bench.device, torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    few = bench.dry_run or bench.small
    contexts = [20, 40, 3, 1] if few else [37, 2900, 600, 90]
    pages = Pages(block_size=block, num_blocks=1 + sum(-(-(c + 2000) // block) for c in contexts), device=device)
    store = [
        torch.full((pages.num_blocks, block, layer.num_kv_heads, layer.head_dim), float("nan"), dtype=kind)
        for _ in range(2)
    ]
    keys, values = (x.to(device) for x in store)
    backend.bind([(keys, values)])

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(kind).to(device)

    sinks = noise(layer.num_heads) if layer.sinks else None
    worst = 0.0
    steps = [[(i, c) for i, c in enumerate(contexts)], *WORK]
    if few:
        steps = [[(i, min(n, 20)) for i, n in step] for step in steps]
        steps[0].sort(key=lambda pair: pair[1] != 1)
    for work in steps:
        batch = pages.advance(sorted(work, key=lambda pair: pair[1] != 1))
        plan = backend.prepare(batch)
        num_kv, dim = layer.num_kv_heads, layer.head_dim
        backend.write_kv(0, noise(batch.num_tokens, num_kv, dim), noise(batch.num_tokens, num_kv, dim), plan)
        q = noise(batch.num_tokens, layer.num_heads, dim)
        out = backend.attend(0, q, plan, sinks=sinks)
        worst = max(worst, largest_error(q, keys, values, out, batch, layer, block, dtype, sinks))
    return worst


def largest_error(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    batch: AttentionBatch,
    layer: LayerSpec,
    block: int,
    dtype: str,
    sinks: Tensor | None,
) -> float:
    """Against attention in fp64 by definition, row by row; infinity for NaN."""
    tolerance = TOLERANCES[dtype]
    worst = 0.0
    for i in range(batch.num_seqs):
        rows = slice(int(batch.query_start_host[i]), int(batch.query_start_host[i + 1]))
        at = torch.arange(int(batch.seq_lens_host[i]), device=q.device)
        pages = batch.block_tables[0, i, at // block].long()
        exact = exact_attention(q[rows], keys[pages, at % block], values[pages, at % block], layer, sinks)
        error = ((out[rows].double() - exact).abs() / (tolerance.atol + tolerance.rtol * exact.abs())).max().item()
        worst = max(worst, error if error == error else float("inf"))
    return worst


def exact_attention(q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec, sinks: Tensor | None) -> Tensor:
    """One sequence in fp64; q is its last queries."""
    per_kv = layer.num_heads // layer.num_kv_heads
    k, v = (x.double().repeat_interleave(per_kv, dim=1).transpose(0, 1) for x in (k, v))
    scores = q.double().transpose(0, 1) @ k.transpose(1, 2) * layer.scale  # [heads, queries, keys]
    if layer.soft_cap is not None:
        scores = torch.tanh(scores / layer.soft_cap) * layer.soft_cap
    key = torch.arange(k.shape[1], device=q.device)
    query = key[-q.shape[0] :, None]
    hidden = key > query
    if layer.window is not None:
        hidden = hidden | (key <= query - layer.window)
    if layer.chunk is not None:
        hidden = hidden | (key < query // layer.chunk * layer.chunk)
    scores = scores.masked_fill(hidden, float("-inf"))
    total = scores.logsumexp(-1, keepdim=True)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.double()[:, None, None])
    # Keys out of sight may be poisoned, and 0 * NaN is NaN.
    return ((scores - total).exp() @ v.masked_fill(hidden.all(0)[None, :, None], 0.0)).transpose(0, 1)


def conformance(bench: Bench) -> None:
    """The kits, on the GPU. A dry run collects them."""
    found = (path for folder in ("core/tests", "plugins") for path in (ROOT / folder).rglob("test_*.py"))
    files = sorted(str(path) for path in found if "mark.gpu" in path.read_text())  # importing the others takes long
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *files]
    if bench.dry_run:
        command.append("--collect-only")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-300:]
    bench.add(tests=last.strip("= "), ok=done.returncode == 0)
    for line in re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.MULTILINE)[:20]:
        bench.add(failed=line)


def sanitizer(bench: Bench) -> None:
    """compute-sanitizer's memcheck over small cases, where it exists."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        bench.add(skipped="compute-sanitizer is not installed")
        return
    script = [sys.executable, str(HERE / "check.py"), "--run", "kernels", "--small"]
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", *script]
    if bench.dry_run:
        bench.add(command=" ".join(Path(part).name for part in command))
        return
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    bench.add(ok=done.returncode == 0, output=(done.stdout + done.stderr)[-400:] if done.returncode else "no errors")


def greedy(bench: Bench) -> None:
    """The engine's greedy tokens against transformers' `generate`, in fp32, for each backend."""
    from enginectl import Engine, SamplingParams
    from enginectl.testing.tiny_models import save_tiny_model

    torch.backends.cuda.matmul.allow_tf32 = False
    for name in bench.sizes(["llama", "qwen3", "mistral", "gemma2"], ["llama"]):
        with tempfile.TemporaryDirectory() as folder:
            # Heads of 64: the smallest that every backend takes.
            path = save_tiny_model(name, Path(folder) / name, head_dim=64)
            prompts = [list(range(3, 3 + n)) for n in (1, 7, 19, 40)]
            expected = by_transformers(path, prompts, 24, bench.device)
            for backend, build in backends(bench).items():
                if isinstance(build, str) or not admits(backend, plain_layer(64), "float32"):
                    continue
                if bench.dry_run and backend != "torch":
                    continue
                options = {"attention": backend, "dtype": "float32", "device": bench.device, "max_num_seqs": 4}
                with Engine(str(path), num_gpu_blocks_override=200, **options) as engine:
                    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
                    found = [list(out.outputs[0].token_ids) for out in engine.generate(prompts, params)]
                same = sum(a == b for a, b in zip(found, expected, strict=True))
                bench.add(model=name, backend=backend, same=f"{same} of {len(prompts)}", ok=same == len(prompts))


def plain_layer(head_dim: int) -> LayerSpec:
    return LayerSpec(num_heads=2, num_kv_heads=2, head_dim=head_dim, v_head_dim=head_dim, scale=1.0)


def by_transformers(path: Path, prompts: Sequence[Sequence[int]], num_new: int, device: str) -> list[list[int]]:
    """One prompt at a time, so that no padding is involved."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


HOLD = "import sys, torch; x = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device='cuda'); print('held', flush=True); input()"


def memory(bench: Bench) -> None:
    """Two engines on one GPU, and memory that another process holds: an error or a smaller pool, never a crash."""
    from random_model import RandomSource

    from enginectl import Engine

    def start(share: float) -> Any:
        source = RandomSource(bench.sizes("0.5B", "tiny"), bench.sizes("bfloat16", "float32"), bench.device)
        options = {"device": bench.device, "gpu_memory_utilization": share, "max_num_seqs": 8}
        if bench.dry_run:
            options["kv_cache_memory_bytes"] = 1 << 20
        return Engine(str(ROOT), weights=source, **options)

    def attempt(what: str, share: float) -> None:
        try:
            with start(share) as engine:
                bench.add(what=what, share=str(share), blocks=engine.stats().num_blocks, ok=True)
        except EnginectlError as error:
            bench.add(what=what, share=str(share), error=f"{type(error).__name__}: {error}", ok=True)

    attempt("alone", 0.5)
    with start(0.5):
        attempt("beside another engine that took half", 0.9)
        attempt("beside another engine, for less than it took", 0.3)
    if bench.dry_run:
        bench.add(what="beside another process", skipped="no device memory to hold")
        return
    free, _ = torch.cuda.mem_get_info()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(int(free * 0.6))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    try:
        attempt("beside a process that holds 60 %", 0.9)
        attempt("beside a process that holds 60 %", 0.5)
    finally:
        holder.communicate("\n")
