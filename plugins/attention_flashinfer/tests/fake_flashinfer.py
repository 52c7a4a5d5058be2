"""FlashInfer's two wrappers and its ops, slow and obvious, from its documentation: what a CPU can check our calls against.

CSR pages, positions counted from the end, window_left, soft cap; a graph wrapper copies what it is planned with into
its buffers, and reads only those when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from enginectl.interfaces.model import LayerSpec
from enginectl.testing.attention import reference_attention


class Recorder:
    """Every call, by (class, method): keyword arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, dict[str, Any]]] = []

    def library(self) -> Any:
        """Stands for the module."""
        recorder = self

        class Library:
            @staticmethod
            def BatchDecodeWithPagedKVCacheWrapper(**arguments: Any) -> Any:
                return Wrapper(recorder, "BatchDecodeWithPagedKVCacheWrapper", arguments)

            @staticmethod
            def BatchPrefillWithPagedKVCacheWrapper(**arguments: Any) -> Any:
                return Wrapper(recorder, "BatchPrefillWithPagedKVCacheWrapper", arguments)

        for name, function in OPS.items():
            setattr(Library, name, staticmethod(self._recorded(name, function)))
        return Library

    def _recorded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            self.calls.append((name, "", arguments))
            return function(**arguments)

        return call


def norm(plus_one: bool, input: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A new tensor of the input's shape."""
    assert input.dim() == 2
    assert len(input), "a launch for no rows fails"
    assert input.stride(1) == 1
    assert input.dtype == weight.dtype, "the kernel reads both alike"
    wide = input.double()
    out = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + eps) * (weight.double() + plus_one)
    return out.to(input.dtype)


def add_norm(plus_one: bool, input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """Both in place: residual += input, input = norm(residual)."""
    residual.add_(input)
    input.copy_(norm(plus_one, residual, weight, eps))


def gated(activation: str, input: Tensor) -> Tensor:
    """The kernel counts on contiguous rows whose halves are multiples of 16 bytes."""
    assert input.is_contiguous()
    gate, up = input.double().chunk(2, -1)
    assert gate.shape[-1] % 8 == 0
    act = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    return (act * up).to(input.dtype)


def rope(positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool) -> None:
    """In place. cos_sin_cache: [positions, rotary_dim], cosines of the pairs, then sines; pairs are halves apart."""
    assert is_neox
    assert positions.dtype == torch.int32
    assert positions.is_contiguous()
    assert cos_sin_cache.dtype == torch.float32
    assert cos_sin_cache.is_contiguous()
    assert head_size in (64, 128, 256)
    cos, sin = cos_sin_cache[positions.long(), None].double().chunk(2, -1)
    half = cos.shape[-1]
    assert half % 8 == 0
    for rows in (query, key):
        heads = rows.view(len(rows), -1, head_size)
        low, high = heads[..., :half].double(), heads[..., half : 2 * half].double()
        heads[..., :half] = low * cos - high * sin
        heads[..., half : 2 * half] = high * cos + low * sin


OPS: dict[str, Callable[..., Any]] = {
    "rmsnorm": partial(norm, False),
    "gemma_rmsnorm": partial(norm, True),
    "fused_add_rmsnorm": partial(add_norm, False),
    "gemma_fused_add_rmsnorm": partial(add_norm, True),
    "silu_and_mul": partial(gated, "silu"),
    "gelu_tanh_and_mul": partial(gated, "gelu_tanh"),
    "apply_rope_with_cos_sin_cache_inplace": rope,
}


class Wrapper:
    def __init__(self, recorder: Recorder, name: str, arguments: dict[str, Any]) -> None:
        self._recorder, self._name, self._made = recorder, name, arguments
        recorder.calls.append((name, "__init__", arguments))
        assert arguments["kv_layout"] == "NHD"
        assert not arguments["float_workspace_buffer"].any()

    def plan(self, **arguments: Any) -> None:
        self._recorder.calls.append((self._name, "plan", arguments))
        is_decode = "indptr" in arguments
        prefix = "" if is_decode else "paged_kv_"
        self._indptr = self._kept(arguments[prefix + "indptr"], "paged_kv_indptr_buf", is_decode)
        self._indices = self._kept(arguments[prefix + "indices"], "paged_kv_indices_buf", is_decode)
        self._last = self._kept(arguments[prefix + "last_page_len"], "paged_kv_last_page_len_buf", is_decode)
        starts = torch.arange(len(self._indptr), dtype=torch.int32) if is_decode else arguments["qo_indptr"]
        self._starts = starts if is_decode else self._kept(starts, "qo_indptr_buf", False)
        for host in (arguments[prefix + "indptr"], arguments[prefix + "last_page_len"], starts):
            assert host.dtype == torch.int32
            assert host.device.type == "cpu"
        assert arguments[prefix + "indices"].dtype == torch.int32
        size = arguments["page_size"]
        assert bool(((self._last >= 1) & (self._last <= size)).all())
        self._layer = LayerSpec(
            num_heads=arguments["num_qo_heads"],
            num_kv_heads=arguments["num_kv_heads"],
            head_dim=arguments["head_dim" if is_decode else "head_dim_qk"],
            v_head_dim=arguments["head_dim" if is_decode else "head_dim_qk"],
            scale=arguments["sm_scale"],
            window=None if arguments["window_left"] < 0 else arguments["window_left"] + 1,
            soft_cap=arguments["logits_soft_cap"],
        )
        assert is_decode or arguments["causal"]
        self._size = size

    def _kept(self, values: Tensor, buffer: str, is_decode: bool) -> Tensor:
        if not self._made.get("use_cuda_graph"):
            return values.clone()
        kept: Tensor = self._made[buffer + ("fer" if is_decode else "")]
        assert len(values) <= len(kept), f"{buffer} is too small"
        kept[: len(values)] = values
        return kept if buffer.startswith("paged_kv_indices") else kept[: len(values)]

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        self._recorder.calls.append((self._name, "run", {"q": q, "paged_kv_cache": paged_kv_cache, "out": out}))
        assert len(q) == int(self._starts[-1])
        for i in range(len(self._indptr) - 1):
            rows = slice(int(self._starts[i]), int(self._starts[i + 1]))
            pages = self._indices[int(self._indptr[i]) : int(self._indptr[i + 1])].long()
            length = (len(pages) - 1) * self._size + int(self._last[i])
            keys, values = (x[pages].flatten(0, 1)[:length] for x in paged_kv_cache)
            assert rows.stop - rows.start <= length, f"row {i} has more queries than keys"
            out[rows] = reference_attention(q[rows], keys, values, self._layer).to(out.dtype)
        return out
