"""The attention backend: one call into C++ to write keys and values, one to attend."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from ctypes import CDLL, addressof
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from enginectl.context import BuildContext
from enginectl.errors import ConfigError, UnsupportedError
from enginectl.interfaces.attention import AttentionBackend, AttentionBatch
from enginectl.interfaces.model import LayerSpec
from enginectl_attention_cpu.library import DTYPES, Layer, Step, check, load_library, made

MAX_HEAD_DIM = 1024


@dataclass(slots=True)
class CpuPlan:
    """One step: what the kernels read of it, and the arrays that keep that alive."""

    num_tokens: int
    step: Step
    address: int
    arrays: tuple[object, ...]


class CpuAttention(AttentionBackend):
    """Attends in place over the pages.

    A row's bits depend on its own position and context only: not on the batch, on how its prompt is cut into chunks, or
    on the number of threads.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        *,
        block_size: int,
        dtype: torch.dtype,
        num_threads: int | None = None,
        library: CDLL | None = None,
    ) -> None:
        library = self._library = library or load_library()
        self._layers = tuple(layers)
        self._block_size = block_size
        self._dtype = dtype
        self._code = DTYPES[dtype]
        self._write = library.ectl_write_kv
        self._attend = library.ectl_attend
        self._state = made(library.ectl_attention(num_threads or torch.get_num_threads()), "attention")
        weakref.finalize(self, library.ectl_attention_free, self._state)
        self._kv: list[tuple[Tensor, Tensor]] = []
        self._structs: list[Layer] = []
        self._addresses: list[int] = []
        self._out_shapes = [(layer.num_heads, layer.v_head_dim) for layer in layers]

    def bind(self, kv: list[tuple[Tensor, Tensor]]) -> None:
        """Keep the store, and describe each layer to the kernels."""
        assert len(kv) == len(self._layers), f"store has {len(kv)} layers, the model {len(self._layers)}"
        for keys, values in kv:
            assert keys.is_contiguous(), "the kernels index keys by slot"
            assert values.is_contiguous(), "the kernels index values by slot"
            assert keys.dtype == values.dtype == self._dtype, f"the store is {keys.dtype}, not {self._dtype}"
            for tensor in (keys, values):
                self._library.ectl_prefer_huge_pages(tensor.data_ptr(), tensor.nbytes)
        self._kv = kv
        self._structs = [self._described(layer, *pair) for layer, pair in zip(self._layers, kv, strict=True)]
        self._addresses = [addressof(struct) for struct in self._structs]
        for struct, following in zip(self._structs, self._addresses[1:], strict=False):
            struct.next = following

    def _described(self, layer: LayerSpec, keys: Tensor, values: Tensor) -> Layer:
        return Layer(
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            v_head_dim=layer.v_head_dim,
            block_size=self._block_size,
            group=layer.group,
            window=layer.window or 0,
            chunk=layer.chunk or 0,
            scale=layer.scale,
            soft_cap=layer.soft_cap or 0.0,
            keys=keys.data_ptr(),
            values=values.data_ptr(),
        )

    def prepare(self, batch: AttentionBatch) -> CpuPlan:
        """Addresses of the step's arrays; the kernels work from these for every layer."""
        starts = np.ascontiguousarray(batch.query_start_host, dtype=np.int32)
        lengths = np.ascontiguousarray(batch.seq_lens_host, dtype=np.int32)
        tables, slots = batch.block_tables.contiguous(), batch.slot_mapping.contiguous()
        step = Step(
            num_seqs=batch.num_seqs,
            num_tokens=batch.num_tokens,
            query_start=starts.ctypes.data,
            seq_lens=lengths.ctypes.data,
            block_tables=tables.data_ptr(),
            slots=slots.data_ptr(),
            table_group=tables.stride(0),
            table_row=tables.stride(1),
            slot_group=slots.stride(0),
        )
        return CpuPlan(batch.num_tokens, step, addressof(step), (starts, lengths, tables, slots))

    def write_kv(self, layer: int, k: Tensor, v: Tensor, plan: CpuPlan) -> None:
        """Copy this step's keys and values to their slots."""
        k, v = self._rows(k), self._rows(v)
        k_token, k_head, _ = k.stride()
        v_token, v_head, _ = v.stride()
        self._write(
            self._state,
            self._addresses[layer],
            plan.address,
            self._code,
            k.data_ptr(),
            k_token,
            k_head,
            v.data_ptr(),
            v_token,
            v_head,
        )

    def attend(self, layer: int, q: Tensor, plan: CpuPlan, *, sinks: Tensor | None = None) -> Tensor:
        """One call for all rows of the step."""
        q = self._rows(q)
        out = torch.empty((plan.num_tokens, *self._out_shapes[layer]), dtype=self._dtype)
        token, head, _ = q.stride()
        wide = None if sinks is None else sinks.float().contiguous()
        status = self._attend(
            self._state,
            self._addresses[layer],
            plan.address,
            self._code,
            q.data_ptr(),
            token,
            head,
            None if wide is None else wide.data_ptr(),
            out.data_ptr(),
        )
        if status:
            check(status)
        return out

    def _rows(self, x: Tensor) -> Tensor:
        """As the kernels read it: this dtype, elements of a head side by side."""
        if x.dtype is not self._dtype:
            x = x.to(self._dtype)
        return x if x.stride(2) == 1 else x.contiguous()


def build(ctx: BuildContext) -> CpuAttention:
    """The factory: needs ctx.model_spec, ctx.engine.block_size and ctx.dtype."""
    assert ctx.model_spec is not None, "attention is built once the model's layers are known"
    dtype = getattr(torch, ctx.dtype, None)
    if dtype not in DTYPES:
        raise ConfigError(f"attention 'cpu' cannot compute in {ctx.dtype!r}; use float32, bfloat16 or float16")
    widest = max(max(layer.head_dim, layer.v_head_dim) for layer in ctx.model_spec.layers)
    if widest > MAX_HEAD_DIM:
        raise UnsupportedError(
            f"attention 'cpu' reads heads of up to {MAX_HEAD_DIM} elements, and {ctx.model_spec.architecture} has "
            f"{widest}; use --attention torch"
        )
    return CpuAttention(ctx.model_spec.layers, block_size=ctx.engine.block_size, dtype=dtype)
