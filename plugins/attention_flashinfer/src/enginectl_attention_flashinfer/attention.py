"""Paged attention by FlashInfer's wrappers over the shared store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from enginectl.context import BuildContext
from enginectl.errors import UnsupportedError
from enginectl.interfaces.attention import AttentionBackend, AttentionBatch
from enginectl.interfaces.model import LayerSpec
from enginectl_attention_flashinfer.metadata import Pages, make_pages, on_host
from enginectl_attention_flashinfer.modules import load_library
from enginectl_attention_flashinfer.workspace import LEAST_BYTES, captured_bytes, eager_bytes

BACKEND = "fa2"
"""The implementation that has windows, soft caps and paged decode on every architecture."""

VECTOR_BYTES = 16
"""What kernels load at once."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What layers must share to share a wrapper's plan. group: KV group, whose block table they read."""

    group: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    soft_cap: float | None

    @staticmethod
    def of(layer: LayerSpec) -> Shape:
        """The shape of a layer."""
        return Shape(
            layer.group,
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            layer.scale,
            layer.window,
            layer.soft_cap,
        )

    @property
    def use_tensor_cores(self) -> bool:
        """For decode: groups of 4 and more. Of those, the plain kernel has instances for some sizes only."""
        return self.num_heads // self.num_kv_heads >= 4


@dataclass(slots=True)
class FlashInferPlan:
    """One step. cut: tokens of the decode part. A part without rows has no wrapper.

    captured: rows, queries a row and columns of the block table of a plan that is replayed; None for one that serves a
    single step.
    """

    num_tokens: int
    cut: int
    slot_mapping: Tensor
    decode: list[Any] = field(default_factory=list)
    prefill: list[Any] = field(default_factory=list)
    captured: tuple[int, int, int] | None = None


class FlashInferAttention(AttentionBackend):
    """Single queries by the decode wrapper, all others by the prefill wrapper; one of each a shape of layer."""

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        *,
        block_size: int,
        device: str,
        dtype: torch.dtype,
        library: Any,
        num_multiprocessors: int,
        workspace_bytes: int = LEAST_BYTES,
    ) -> None:
        """workspace_bytes: at least."""
        self._layers = tuple(layers)
        self._block_size = block_size
        self._device = device
        self._dtype = dtype
        self._library = library
        self._num_multiprocessors = num_multiprocessors
        self._shapes = tuple(dict.fromkeys(Shape.of(layer) for layer in layers))
        most = (eager_bytes(shape, num_multiprocessors) for shape in self._shapes)
        self._workspace = self._scratch(max(workspace_bytes, *most))
        self._shape_of = [self._shapes.index(Shape.of(layer)) for layer in layers]
        self._decode = [self._decode_wrapper(shape) for shape in self._shapes]
        self._prefill = [self._prefill_wrapper() for _ in self._shapes]
        self._kv: list[tuple[Tensor, Tensor]] = []
        on_gpu = device.startswith("cuda")
        self._planned = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def _scratch(self, num_bytes: int) -> Tensor:
        """For all wrappers: they run one after another. Zeroed, as FlashInfer asks for."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def bind(self, kv: list[tuple[Tensor, Tensor]]) -> None:
        """Keep the store, as pages and as slots."""
        assert len(kv) == len(self._layers), f"store has {len(kv)} layers, the model {len(self._layers)}"
        self._kv = list(kv)

    # -- plans ---------------------------------------------------------------------------------------------------

    def prepare(self, batch: AttentionBatch) -> FlashInferPlan:
        """CSR once a shape, and FlashInfer's own plan for each part that has rows."""
        self._begin_planning()
        cut, rows = batch.num_decodes, batch.num_seqs
        plan = FlashInferPlan(batch.num_tokens, cut, batch.slot_mapping)
        starts, lens = batch.query_start_host[: rows + 1], batch.seq_lens_host[:rows]
        if cut:
            plan.decode = self._decode
            self._plan_decode(self._decode, batch.block_tables[:, :cut], lens[:cut])
        if cut < rows:
            plan.prefill = self._prefill
            self._plan_prefill(self._prefill, batch.block_tables[:, cut:rows], lens[cut:], starts[cut:] - starts[cut])
        self._end_planning()
        return plan

    def _begin_planning(self) -> None:
        """Wrappers keep their plan in pinned memory and send it from there: wait until the last one has left.

        That is behind the step before, which the engine waits for anyway before it prepares the next but one.
        """
        if self._planned is not None:
            self._planned.synchronize()

    def _end_planning(self) -> None:
        if self._planned is not None:
            self._planned.record(torch.cuda.current_stream(self._device))

    def capture(self, batch: AttentionBatch) -> FlashInferPlan:
        """Wrappers of this size over buffers of their own. Every row has as many queries."""
        rows, tokens, width = batch.num_seqs, batch.num_tokens, batch.block_tables.shape[-1]
        assert tokens == rows * batch.max_query_len, "every row of a bucket has as many queries"
        slots = batch.slot_mapping.clone(memory_format=torch.contiguous_format)
        plan = FlashInferPlan(tokens, 0, slots, captured=(rows, batch.max_query_len, width))
        most = rows * width
        self._make_room(rows, batch.max_query_len)
        if batch.max_query_len == 1:
            plan.cut = tokens
            plan.decode = [self._decode_wrapper(shape, rows, most) for shape in self._shapes]
        else:
            plan.prefill = [self._prefill_wrapper(rows, most) for _ in self._shapes]
        self.update(plan, batch)
        return plan

    def _make_room(self, num_rows: int, num_queries: int) -> None:
        """Wrappers made from here on share a larger workspace, if this size needs it; earlier ones keep theirs."""
        sizes = {"num_rows": num_rows, "num_queries": num_queries}
        shapes = [shape for shape in self._shapes if num_queries > 1 or shape.use_tensor_cores]
        needed = (captured_bytes(shape, self._num_multiprocessors, **sizes) for shape in shapes)
        if (num_bytes := max(needed, default=0)) > self._workspace.numel():
            self._workspace = self._scratch(num_bytes)

    def update(self, plan: FlashInferPlan, batch: AttentionBatch) -> None:
        """Plan anew for this step's lengths. Rows the batch lacks read and write the null block."""
        assert plan.captured is not None, "only a captured plan is updated"
        self._begin_planning()
        rows, queries, width = plan.captured
        found, columns = batch.num_seqs, batch.block_tables.shape[-1]
        assert found <= rows, f"{found} rows, captured for {rows}"
        assert batch.num_tokens == found * queries, "as many queries a row as were captured"
        assert columns <= width, f"{columns} blocks, captured for {width}"
        plan.slot_mapping[:, : batch.num_tokens].copy_(batch.slot_mapping[:, : batch.num_tokens], non_blocking=True)
        plan.slot_mapping[:, batch.num_tokens :].zero_()
        lens = np.full(rows, queries, np.int32)
        lens[:found] = batch.seq_lens_host[:found]
        tables = batch.block_tables
        if found < rows:
            tables = tables.new_zeros(tables.shape[0], rows, columns)
            tables[:, :found] = batch.block_tables[:, :found]
        if plan.decode:
            self._plan_decode(plan.decode, tables, lens)
        else:
            self._plan_prefill(plan.prefill, tables, lens, np.arange(rows + 1, dtype=np.int32) * queries)
        self._end_planning()

    def _plan_decode(self, wrappers: Sequence[Any], tables: Tensor, lens: NDArray[np.int32]) -> None:
        cache: dict[tuple[int, int | None], Pages] = {}
        ones = np.ones_like(lens)
        for shape, wrapper in zip(self._shapes, wrappers, strict=True):
            pages = self._pages(cache, shape, tables, lens, ones)
            wrapper.plan(
                indptr=pages.indptr,
                indices=pages.indices,
                last_page_len=pages.last_page_len,
                num_qo_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                page_size=self._block_size,
                window_left=-1 if shape.window is None else shape.window - 1,
                logits_soft_cap=shape.soft_cap,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
                sm_scale=shape.scale,
            )

    def _plan_prefill(
        self, wrappers: Sequence[Any], tables: Tensor, lens: NDArray[np.int32], starts: NDArray[np.int32]
    ) -> None:
        cache: dict[tuple[int, int | None], Pages] = {}
        for shape, wrapper in zip(self._shapes, wrappers, strict=True):
            pages = self._pages(cache, shape, tables, lens, np.diff(starts))
            wrapper.plan(
                qo_indptr=on_host(starts.astype(np.int32), tables.device),
                paged_kv_indptr=pages.indptr,
                paged_kv_indices=pages.indices,
                paged_kv_last_page_len=pages.last_page_len,
                num_qo_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim_qk=shape.head_dim,
                page_size=self._block_size,
                causal=True,
                window_left=-1 if shape.window is None else shape.window - 1,
                logits_soft_cap=shape.soft_cap,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
                sm_scale=shape.scale,
            )

    def _pages(
        self,
        cache: dict[tuple[int, int | None], Pages],
        shape: Shape,
        tables: Tensor,
        lens: NDArray[np.int32],
        num_queries: NDArray[np.int32],
    ) -> Pages:
        """Shapes with the same group and window share one CSR."""
        key = (shape.group, shape.window)
        if key not in cache:
            cache[key] = make_pages(
                tables[shape.group], lens, num_queries, block_size=self._block_size, window=shape.window
            )
        return cache[key]

    def _decode_wrapper(self, shape: Shape, num_rows: int = 0, num_pages: int = 0) -> Any:
        """For any batch, or with num_rows > 0 for the replays of one bucket."""
        buffers = {}
        if num_rows:
            buffers = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": self._ints(num_rows + 1),
                "paged_kv_indices_buffer": self._ints(num_pages),
                "paged_kv_last_page_len_buffer": self._ints(num_rows),
            }
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer=self._workspace,
            kv_layout="NHD",
            use_tensor_cores=shape.use_tensor_cores,
            backend=BACKEND,
            **buffers,
        )

    def _prefill_wrapper(self, num_rows: int = 0, num_pages: int = 0) -> Any:
        buffers = {}
        if num_rows:
            buffers = {
                "use_cuda_graph": True,
                "qo_indptr_buf": self._ints(num_rows + 1),
                "paged_kv_indptr_buf": self._ints(num_rows + 1),
                "paged_kv_indices_buf": self._ints(num_pages),
                "paged_kv_last_page_len_buf": self._ints(num_rows),
            }
        return self._library.BatchPrefillWithPagedKVCacheWrapper(
            float_workspace_buffer=self._workspace, kv_layout="NHD", backend=BACKEND, **buffers
        )

    def _ints(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=self._device)

    # -- layers --------------------------------------------------------------------------------------------------

    def write_kv(self, layer: int, k: Tensor, v: Tensor, plan: FlashInferPlan) -> None:
        """Scatter this step's keys and values to their slots."""
        slots = plan.slot_mapping[self._layers[layer].group]
        for stored, new in zip(self._kv[layer], (k, v), strict=True):
            stored.view(-1, *stored.shape[2:]).index_copy_(0, slots, new.to(stored.dtype))

    def attend(self, layer: int, q: Tensor, plan: FlashInferPlan, *, sinks: Tensor | None = None) -> Tensor:
        """Each part writes its rows of the output."""
        assert sinks is None, "compose refuses models with sinks"
        which, pages = self._shape_of[layer], self._kv[layer]
        q = _loadable(q)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        cut = plan.cut
        if plan.decode:
            plan.decode[which].run(q=q[:cut], paged_kv_cache=pages, out=out[:cut])
        if plan.prefill:
            plan.prefill[which].run(q=q[cut:], paged_kv_cache=pages, out=out[cut:])
        return out


def _loadable(q: Tensor) -> Tensor:
    """The same rows, as they are if kernels can load them: queries are mostly a part of a fused projection's rows."""
    vector = VECTOR_BYTES // q.element_size()
    if q.stride(2) == 1 and not (q.stride(0) % vector or q.stride(1) % vector or q.storage_offset() % vector):
        return q
    return q.clone(memory_format=torch.contiguous_format)


def check_layers(layers: Sequence[LayerSpec]) -> None:
    """Raise UnsupportedError for what capabilities cannot say."""
    for layer in layers:
        if layer.chunk is not None:
            raise UnsupportedError("attention 'flashinfer' has no attention in chunks; use --attention triton or torch")
        if layer.head_dim != layer.v_head_dim:
            raise UnsupportedError(
                f"attention 'flashinfer' needs keys and values of one size, not {layer.head_dim} and "
                f"{layer.v_head_dim}; use --attention triton or torch"
            )


def build(ctx: BuildContext) -> FlashInferAttention:
    """Provider factory: needs ctx.model_spec, ctx.engine.block_size, ctx.device and ctx.dtype."""
    assert ctx.model_spec is not None, "attention is built once the model's layers are known"
    check_layers(ctx.model_spec.layers)
    return FlashInferAttention(
        ctx.model_spec.layers,
        block_size=ctx.engine.block_size,
        device=ctx.device,
        dtype=getattr(torch, ctx.dtype),
        library=load_library("attention", ctx.device, module="batch_*"),
        num_multiprocessors=torch.cuda.get_device_properties(ctx.device).multi_processor_count,
    )
