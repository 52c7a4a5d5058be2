"""FlashInfer's own wrappers on a CPU: its Python as installed, over compiled modules that are played here.

What it checks, computes and remembers for us is real; a module is known by the name under which FlashInfer would compile
or load it, is called as the compiled one would be, and computes by the reference.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from enginectl.interfaces.model import LayerSpec
from enginectl.testing.attention import reference_attention

NON_CAUSAL, CAUSAL = 0, 1
NHD = 0


class Modules:
    """asked: names of modules, in the order in which they were first needed. plans: what each plan was called with."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.plans: list[dict[str, Any]] = []

    def make(self, uri: Callable[..., str], run: str) -> Callable[..., Any]:
        """Instead of FlashInfer's generator of such modules."""

        def generate(*args: Any) -> Any:
            name = uri(*args)
            module = SimpleNamespace(plan=self._plan, ragged_run=None, **{run: getattr(self, "_" + run)})
            self.asked.append(name)
            return SimpleNamespace(build_and_load=lambda: module)

        return generate

    def _plan(self, workspace: Tensor, ints: Tensor, pinned: Tensor, *args: Any) -> list[int]:
        """Lengths come from the host; a copy of something on the device would wait for it."""
        tensors = [arg for arg in args if isinstance(arg, Tensor) and arg.numel()]
        assert all(tensor.device.type == "cpu" and tensor.dtype == torch.int32 for tensor in tensors)
        assert pinned.numel() == ints.numel()
        self.plans.append({"workspace": workspace, "args": args})
        return [0]

    def _run(self, workspace: Tensor, ints: Tensor, plan: list[int], *args: Any) -> None:
        """Decode without tensor cores."""
        q, k, v, indptr, indices, last, out, _lse, layout, window = args[:10]
        starts = torch.arange(len(indptr))
        soft_cap, scale = args[-4:-2]
        _attend(q, k, v, starts, indptr, indices, last, out, layout, window, soft_cap, scale)

    def _paged_run(self, workspace: Tensor, ints: Tensor, plan: list[int], *args: Any) -> None:
        """Prefill, and decode with tensor cores, whose mask is none: one query sees every key."""
        q, k, v, starts, indptr, indices, last, out, _lse, mask, layout, window = args[:12]
        assert mask == CAUSAL or len(q) == len(indptr) - 1
        soft_cap, scale = args[-5:-3]
        _attend(q, k, v, starts, indptr, indices, last, out, layout, window, soft_cap, scale)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    indptr: Tensor,
    indices: Tensor,
    last: Tensor,
    out: Tensor,
    layout: int,
    window: int,
    soft_cap: float,
    scale: float,
) -> None:
    assert layout == NHD
    assert {x.dtype for x in (indptr, indices, last)} == {torch.int32}
    assert q.stride(-1) == 1
    assert {q.stride(0) % 8, q.stride(1) % 8, q.data_ptr() % 16} == {0}, "loads are of 16 bytes"
    assert out.is_contiguous()
    layer = LayerSpec(
        num_heads=q.shape[1],
        num_kv_heads=k.shape[2],
        head_dim=q.shape[2],
        v_head_dim=v.shape[3],
        scale=scale,
        window=None if window < 0 else window + 1,
        soft_cap=soft_cap or None,
    )
    for i in range(len(indptr) - 1):
        rows, pages = slice(int(starts[i]), int(starts[i + 1])), indices[int(indptr[i]) : int(indptr[i + 1])].long()
        length = (len(pages) - 1) * k.shape[1] + int(last[i])
        assert 1 <= int(last[i]) <= k.shape[1]
        assert rows.stop - rows.start <= length, f"row {i} has more queries than keys"
        keys, values = (x[pages].flatten(0, 1)[:length] for x in (k, v))
        out[rows] = reference_attention(q[rows], keys, values, layer).to(out.dtype)


def real_library(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, Modules]:
    """FlashInfer, if it is installed, and what it will ask for."""
    library = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    names = importlib.import_module("flashinfer.jit.attention.modules")
    modules = Modules()
    plain = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **kind: plain(*size, **kind))
    prefill = modules.make(names.get_batch_prefill_uri, "paged_run")
    decode = modules.make(names.get_batch_decode_uri, "run")
    for part in ("decode", "prefill"):
        module = importlib.import_module(f"flashinfer.{part}")
        monkeypatch.setattr(module, "gen_batch_prefill_module", prefill, raising=False)
        monkeypatch.setattr(module, "gen_batch_decode_module", decode, raising=False)
        for name in ("get_batch_prefill_module", "get_batch_decode_module"):
            made: Any = getattr(module, name, None)
            if made is not None:
                # Uncached: each test has modules of its own.
                monkeypatch.setattr(module, name, _once(inspect.unwrap(made)))
    return library, modules


def _once(make: Callable[..., Any]) -> Callable[..., Any]:
    made: dict[tuple[Any, ...], Any] = {}
    return lambda *args: made[args] if args in made else made.setdefault(args, make(*args))


def real_ops(monkeypatch: pytest.MonkeyPatch, plays: dict[str, Callable[..., Any]]) -> tuple[ModuleType, set[str]]:
    """FlashInfer, if it is installed, and the names of the modules that its ops ask for. plays: what computes, by op."""
    library = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    asked: set[str] = set()

    def norm(name: str, out: Tensor, input: Tensor, weight: Tensor, eps: float, pdl: bool) -> None:
        out.copy_(plays[name](input=input, weight=weight, eps=eps))

    def add_norm(name: str, input: Tensor, residual: Tensor, weight: Tensor, eps: float, pdl: bool) -> None:
        plays[name](input=input, residual=residual, weight=weight, eps=eps)

    def gated(name: str, out: Tensor, input: Tensor, pdl: bool) -> None:
        out.copy_(plays[name](input=input))

    def rope(q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, table: Tensor, rows: Tensor, interleave: bool) -> None:
        assert (q.data_ptr(), k.data_ptr()) == (q_out.data_ptr(), k_out.data_ptr())
        assert {q.stride(-1), k.stride(-1)} == {1}
        plays["apply_rope_with_cos_sin_cache_inplace"](
            positions=rows,
            query=q.flatten(1),
            key=k.flatten(1),
            head_size=q.shape[2],
            cos_sin_cache=table,
            is_neox=not interleave,
        )

    def module(name: str, functions: dict[str, Callable[..., Any]]) -> Any:
        asked.add(name)
        return SimpleNamespace(build_and_load=lambda: SimpleNamespace(**functions))

    norms: dict[str, Callable[..., Any]] = {n: partial(norm, n) for n in ("rmsnorm", "gemma_rmsnorm")}
    norms |= {n: partial(add_norm, n) for n in ("fused_add_rmsnorm", "gemma_fused_add_rmsnorm")}
    parts: dict[str, Callable[..., Any]] = {
        "norm": lambda: module("norm", norms),
        "rope": lambda: module("rope", {"apply_rope_pos_ids_cos_sin_cache": rope}),
        "act_and_mul": lambda act: module(f"{act}_and_mul", {f"{act}_and_mul": partial(gated, f"{act}_and_mul")}),
    }
    for part, home in (("norm", "norm"), ("rope", "rope"), ("act_and_mul", "activation")):
        owner = importlib.import_module(f"flashinfer.{home}")
        monkeypatch.setattr(owner, f"gen_{part}_module", parts[part])
        monkeypatch.setattr(owner, f"get_{part}_module", _once(inspect.unwrap(getattr(owner, f"get_{part}_module"))))
    # Kernels in Python, where the packages for them happen to be installed, are another implementation.
    monkeypatch.setattr(importlib.import_module("flashinfer.norm"), "_USE_CUDA_NORM", True, raising=False)
    return library, asked
