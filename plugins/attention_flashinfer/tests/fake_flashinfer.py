"""FlashInfer's two wrappers, slow and obvious, from its documentation: what a CPU can check our calls against.

CSR pages, positions counted from the end, window_left, soft cap; a graph wrapper copies what it is planned with into
its buffers, and reads only those when it runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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

        return Library


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
