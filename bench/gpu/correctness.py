"""Sections that ask whether results are right: kernels, greedy tokens, memory, conformance, sanitizer."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from exact import largest_error
from harness import Bench, backends, capabilities, context_for, describe
from torch import Tensor

from enginectl.errors import EnginectlError
from enginectl.interfaces.model import LayerSpec
from enginectl.testing.paging import Pages

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
DRY_CASES: list[tuple[int, int, int, dict[str, Any], int]] = [
    (4, 1, 128, {}, 16),
    (7, 1, 64, {}, 16),
    (3, 1, 64, {}, 1),
]
"""The first ones with fewer heads: the interpreter takes time for each."""

WORK = [
    [(0, 1), (1, 1), (2, 1)],
    [(0, 1), (1, 5), (2, 3)],
    [(0, 1), (1, 700), (2, 4), (3, 130)],
]
"""Steps over sequences that already have a context: decodes, drafts, and chunks among both."""

MAX_NAMED = 10
"""Failed tests of a file that are named."""

KERNEL_WORKERS, ENGINE_WORKERS, TEST_WORKERS = 8, 4, 8


def kernels(bench: Bench) -> None:
    """Every backend on fresh random inputs against fp64, with outputs and unwritten slots poisoned."""
    seed = int.from_bytes(os.urandom(4), "little")
    dtypes = bench.sizes(("bfloat16", "float16", "float32"), ("float32", "float16"))
    groups: list[tuple[str, str, list[int]]] = []
    for dtype in ("bfloat16",) if bench.small else dtypes:
        for name, build in backends(bench).items():
            if isinstance(build, str):
                bench.add(backend=name, dtype=dtype, skipped=build)
            elif bench.small and name == "torch":
                continue  # torch's own kernels
            elif admitted := [i for i, case in enumerate(cases_of(bench)) if admits(name, layer_of(case), dtype)]:
                groups.append((name, dtype, admitted))
    tasks = [(bench.dry_run, bench.small, name, dtype, i, seed) for name, dtype, found in groups for i in found]
    results = bench.map(one_case, tasks, KERNEL_WORKERS)
    for name, dtype, found in groups:
        errors = [next(results) for _ in found]
        raised = [f"case {i}: {describe(e)}" for i, e in zip(found, errors, strict=True) if isinstance(e, Exception)]
        numbers = [e for e in errors if isinstance(e, float)]
        worst = max(numbers, default=float("nan"))
        row = {"backend": name, "dtype": dtype, "cases": len(found), "error_of_tolerance": round(worst, 3)}
        bench.add(
            **row, ok=worst <= 1 and not raised, seed=seed, **({"error": "; ".join(raised)[:600]} if raised else {})
        )


def cases_of(bench: Bench) -> list[tuple[int, int, int, dict[str, Any], int]]:
    """Those of this run."""
    return DRY_CASES if bench.dry_run else CASES[:3] if bench.small else CASES


def layer_of(case: tuple[int, int, int, dict[str, Any], int]) -> LayerSpec:
    """Its layer."""
    heads, kv_heads, dim, changes, _ = case
    return LayerSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, v_head_dim=dim, scale=dim**-0.5, **changes)


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


def one_case(dry_run: bool, small: bool, name: str, dtype: str, index: int, seed: int) -> float:
    """The largest error over the steps, as a part of the tolerance. In a process that runs several of them."""
    bench = Bench(dry_run=dry_run, small=small)
    case = cases_of(bench)[index]
    layer, block = layer_of(case), case[-1]
    build = backends(bench)[name]
    assert not isinstance(build, str), "asked before"
    with poisoned_memory():
        backend = build(context_for([layer], block_size=block, device=bench.device, dtype=dtype))
        return case_error(backend, layer, block, dtype, bench, seed)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that is handed out uninitialised holds NaN: a number nobody wrote shows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ops that have no deterministic form, which is not what this is for
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def case_error(backend: Any, layer: LayerSpec, block: int, dtype: str, bench: Bench, seed: int) -> float:
    """Of one backend over one store."""
    device, random = bench.device, torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    few = bench.dry_run or bench.small
    contexts = [20, 40, 3, 1] if few else [37, 2900, 600, 90]
    pages = Pages(block_size=block, num_blocks=1 + sum(-(-(c + 2000) // block) for c in contexts), device=device)
    shape = (pages.num_blocks, block, layer.num_kv_heads, layer.head_dim)
    keys, values = (torch.full(shape, float("nan"), dtype=kind, device=device) for _ in range(2))
    backend.bind([(keys, values)])

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(kind).to(device)

    sinks = noise(layer.num_heads) if layer.sinks else None
    worst = 0.0
    steps = [[(i, c) for i, c in enumerate(contexts)], *WORK]
    if few:
        steps = [[(i, min(n, 20)) for i, n in step] for step in steps]
    for work in steps:
        batch = pages.advance(sorted(work, key=lambda pair: pair[1] != 1))
        plan = backend.prepare(batch)
        num_kv, dim = layer.num_kv_heads, layer.head_dim
        backend.write_kv(0, noise(batch.num_tokens, num_kv, dim), noise(batch.num_tokens, num_kv, dim), plan)
        q = noise(batch.num_tokens, layer.num_heads, dim)
        out = backend.attend(0, q, plan, sinks=sinks)
        worst = max(worst, largest_error(q, keys, values, out, batch, layer, block, dtype, sinks))
    return worst


# -- whole engines -----------------------------------------------------------------------------------------------------


def greedy(bench: Bench) -> None:
    """The engine's greedy tokens against transformers' `generate`, for each backend."""
    models = bench.sizes(["llama", "qwen3", "mistral", "gemma2"], ["llama"])
    tasks: list[tuple[bool, str, str, str]] = []
    for backend, build in backends(bench).items():
        if isinstance(build, str) or (bench.dry_run and backend != "torch"):
            continue
        # FlashInfer has no fp32; of its modules, check.py needs those without windows and soft caps anyway.
        dtype = "float32" if admits(backend, plain_layer(64), "float32") else "bfloat16"
        chosen = models if dtype == "float32" else models[:2]
        tasks += [(bench.dry_run, model, backend, dtype) for model in chosen]
    results = bench.map(one_model, tasks, ENGINE_WORKERS)
    for (_, model, backend, dtype), result in zip(tasks, results, strict=True):
        row = {"model": model, "backend": backend, "dtype": dtype}
        if isinstance(result, Exception):
            bench.add(**row, error=describe(result), ok=False)
        else:
            bench.add(**row, **result)


def plain_layer(head_dim: int) -> LayerSpec:
    """Without anything that a backend may lack."""
    return LayerSpec(num_heads=2, num_kv_heads=2, head_dim=head_dim, v_head_dim=head_dim, scale=1.0)


def one_model(dry_run: bool, name: str, backend: str, dtype: str) -> dict[str, Any]:
    """How many answers are the same. Where one begins to differ, its token must be as likely, but for rounding."""
    from enginectl import Engine, SamplingParams
    from enginectl.testing.tiny_models import save_tiny_model

    bench = Bench(dry_run=dry_run)
    with tempfile.TemporaryDirectory() as folder:
        # Heads of 64: the smallest that every backend takes.
        path = save_tiny_model(name, Path(folder) / name, head_dim=64, dtype=dtype)
        prompts = [list(range(3, 3 + n)) for n in (1, 7, 19, 40)]
        expected = by_transformers(path, prompts, 24, bench.device)
        options = {"attention": backend, "dtype": dtype, "device": bench.device, "max_num_seqs": 4}
        with Engine(str(path), num_gpu_blocks_override=200, max_model_len=256, **options) as engine:
            params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
            outputs = engine.generate(prompts, params)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    gaps = [first_gap(tokens, *right) for tokens, right in zip(found, expected, strict=True)]
    bound = 1e-3 if dtype == "float32" else 0.2
    failed = [output.error for output in outputs if output.error]
    row = {"same": f"{sum(gap == 0.0 for gap in gaps)} of {len(prompts)}", "largest_gap": max(gaps)}
    return {**row, "ok": max(gaps) <= bound and not failed, **({"error": failed[0][:300]} if failed else {})}


def first_gap(found: Sequence[int], expected: Sequence[int], logits: Tensor) -> float:
    """0 for equal answers; else by how much the first other token's logit is lower, in standard deviations."""
    if len(found) != len(expected):
        return float("inf")
    for i, (mine, right) in enumerate(zip(found, expected, strict=True)):
        if mine != right:
            # A tie is a difference too.
            return max(float((logits[i, right] - logits[i, mine]) / logits[i].std()), 1e-9)
    return 0.0


def by_transformers(
    path: Path, prompts: Sequence[Sequence[int]], num_new: int, device: str
) -> list[tuple[list[int], Tensor]]:
    """Tokens, and logits [num_new, vocab_size], computed in fp32; one prompt at a time: no padding is involved."""
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
            return_dict_in_generate=True,
            output_logits=True,
        )
        found.append((out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).float().cpu()))
    return found


HOLD = "import sys, torch; x = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device='cuda'); print('held', flush=True); input()"


def memory(bench: Bench) -> None:
    """Two engines on one GPU, and memory that another process holds: an error or a smaller pool, never a crash."""
    attempt(bench, "alone", 0.5)
    attempt(bench, "less than the weights", 0.002)
    with bench.attempt(what="two engines"), start_engine(bench, 0.5):
        attempt(bench, "beside an engine that took half", 0.9)
        attempt(bench, "beside an engine that took more than this", 0.3)
    if bench.dry_run:
        bench.add(what="beside another process", skipped="no device memory to hold")
        return
    gc.collect()
    torch.cuda.empty_cache()
    left = torch.cuda.memory_allocated()
    bench.add(what="after closing", left_mib=left >> 20, ok=left < 1 << 30)
    free, _ = torch.cuda.mem_get_info()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(int(free * 0.6))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None, "a pipe"
    held = holder.stdout.readline().strip() == "held"
    try:
        attempt(bench, "beside a process that holds 60 %", 0.9, ok=held)
        attempt(bench, "beside a process that holds 60 %", 0.3, ok=held)
    finally:
        holder.communicate("\n")


def start_engine(bench: Bench, share: float) -> Any:
    """With a pool as large as it may be: so many long sequences would need more than any GPU has."""
    from random_model import RandomSource

    from enginectl import Engine

    source = RandomSource(bench.sizes("0.5B", "tiny"), bench.sizes("bfloat16", "float32"), bench.device)
    options = {"gpu_memory_utilization": share, "max_num_seqs": 512, "max_num_batched_tokens": 2048}
    if bench.dry_run:
        options |= {"kv_cache_memory_bytes": 1 << 20, "max_num_seqs": 8}
    return Engine(str(ROOT), weights=source, device=bench.device, enforce_eager=True, **options)


def attempt(bench: Bench, what: str, share: float, *, ok: bool = True) -> None:
    """Start, answer, close. A refusal with a reason is as good as a start; anything else is not."""
    from speed import generate

    with bench.attempt(what=what, share=str(share)):
        try:
            with start_engine(bench, share) as engine:
                answers = generate(engine, 4, 4, 8)
                size = engine.info.num_kv_tokens * engine.info.kv_bytes_per_token
                answered = all(len(tokens) == 4 for _, tokens in answers)
                fits = bench.dry_run or size < share * torch.cuda.mem_get_info()[1]  # (free, total)
                bench.add(what=what, share=str(share), pool_mib=size >> 20, ok=ok and answered and fits)
        except EnginectlError as error:
            bench.add(what=what, share=str(share), refused=f"{type(error).__name__}: {error}", ok=ok)


# -- other programs ----------------------------------------------------------------------------------------------------


def conformance(bench: Bench) -> None:
    """The kits of all plugins, on the GPU. A dry run collects them."""
    found = (path for folder in ("core/tests", "plugins") for path in (ROOT / folder).rglob("test_*.py"))
    files = [str(path) for path in found if "mark.gpu" in path.read_text()]  # importing the others takes long
    files.sort(key=lambda path: ("flashinfer" in path, path))  # it may lack modules; the others come first
    # Plugins that happen to be installed stay out, and so do new versions' warnings: this asks about results.
    command = [sys.executable, "-m", "pytest", "-v", "--tb=line", "-W", "default", "-p", "no:cacheprovider"]
    command += ["-p", "pytest_asyncio.plugin", "-p", "pytest_timeout", "-m", "gpu", *files]
    if bench.dry_run:
        command[command.index("-v")] = "-q"
        command.append("--collect-only")
    elif importlib.util.find_spec("xdist") is not None:
        command += ["-p", "xdist.plugin", "-n", str(TEST_WORKERS)]
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    last, failed = "", Counter[str]()
    process = subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None, "a pipe"
    for line in process.stdout:
        print(line, end="", flush=True)
        last = line.strip() or last
        if re.search(r"\b(FAILED|ERROR)\b", line) and "::" in line and "%]" in line:
            test = re.sub(r"\[[^]]*%\]|\[gw\d+\]|FAILED|ERROR", "", line).strip()
            failed[test.partition("::")[0]] += 1
            if failed[test.partition("::")[0]] <= MAX_NAMED:
                bench.add(failed=test)
    for file, count in failed.items():
        bench.add(failed=file, tests=f"{count} failed")
    bench.add(tests=last.strip("= "), ok=process.wait() == 0)


def sanitizer(bench: Bench) -> None:
    """compute-sanitizer's memcheck over small cases, where it exists."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    script = [sys.executable, str(HERE / "check.py"), "--run", "kernels", "--small"]
    command = [tool or "compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", *script]
    if bench.dry_run:
        bench.add(command=" ".join(Path(part).name for part in command))
        return
    if tool is None:
        bench.add(skipped="compute-sanitizer is not installed")
        return
    # One allocation a tensor: in a block that torch shares out, reading past a tensor is no error.
    environ = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    print(output, flush=True)
    if "not supported" in output and "ERROR SUMMARY: 0" not in output:
        bench.add(skipped="compute-sanitizer does not support this device or its driver", output=output[-400:])
        return
    bench.add(ok=done.returncode == 0, output=output[-400:] if done.returncode else "no errors")
