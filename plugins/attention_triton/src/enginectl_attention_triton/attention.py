"""Paged attention by our own Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from enginectl.context import BuildContext
from enginectl.errors import UnsupportedError
from enginectl.interfaces.attention import AttentionBackend, AttentionBatch
from enginectl.interfaces.model import LayerSpec
from enginectl_attention_triton.attention_kernels import attend_kernel, join_kernel, write_kernel
from enginectl_attention_triton.config import Shape, fits_a_tile, join_warps, padded_dim, power_of_two
from enginectl_attention_triton.op_launch import turn_heads
from enginectl_attention_triton.plan import Device, Part, TritonPlan, make_plan

WRITE_ROWS = 16
"""(token, head) rows that one program copies."""


class TritonAttention(AttentionBackend):
    """Split-KV decode, tiled prefill and the KV write; windows, chunks, soft caps and sinks; graph capture."""

    def __init__(self, layers: Sequence[LayerSpec], *, block_size: int, device: Device, dtype: torch.dtype) -> None:
        self._layers = tuple(layers)
        self._block_size = block_size
        self._device = device
        self._itemsize = dtype.itemsize
        self._shapes = tuple(dict.fromkeys(Shape.of(layer) for layer in layers))
        self._shape_of = [self._shapes.index(Shape.of(layer)) for layer in layers]
        self._kv: list[tuple[Tensor, Tensor]] = []

    def bind(self, kv: list[tuple[Tensor, Tensor]]) -> None:
        """Keep the store."""
        assert len(kv) == len(self._layers), f"store has {len(kv)} layers, the model {len(self._layers)}"
        assert all(x.is_contiguous() for pair in kv for x in pair), "the kernels address contiguous pages"
        self._kv = list(kv)

    def prepare(self, batch: AttentionBatch) -> TritonPlan:
        """Tiles and splits, once for all layers of a shape."""
        assert batch.block_tables.stride(-1) == 1, "a row of the block table is contiguous"
        return make_plan(batch, self._shapes, itemsize=self._itemsize, device=self._device)

    def capture(self, batch: AttentionBatch) -> TritonPlan:
        """A plan over buffers of its own, of the batch's sizes: rows, queries a row, columns of the block table.

        Splits are chosen for batch.max_seq_len; shorter sequences leave some of them empty.
        """
        plan = self.prepare(batch)
        plan.query_start = batch.query_start.clone()
        plan.seq_lens = batch.seq_lens.clone()
        plan.block_tables = batch.block_tables.clone(memory_format=torch.contiguous_format)
        plan.slot_mapping = batch.slot_mapping.clone(memory_format=torch.contiguous_format)
        return plan

    def update(self, plan: TritonPlan, batch: AttentionBatch) -> None:
        """Copy this step's lengths, tables and slots. Rows the batch lacks attend to nothing and write nothing."""
        rows, tokens = batch.num_seqs, batch.num_tokens
        width = batch.block_tables.shape[-1]
        assert rows <= plan.seq_lens.shape[0], f"{rows} rows, captured for {plan.seq_lens.shape[0]}"
        assert tokens * plan.seq_lens.shape[0] == rows * plan.num_tokens, "as many queries a row as were captured"
        assert width <= plan.block_tables.shape[-1], f"{width} blocks, captured for {plan.block_tables.shape[-1]}"
        plan.seq_lens[:rows].copy_(batch.seq_lens[:rows], non_blocking=True)
        plan.seq_lens[rows:].zero_()
        plan.block_tables[:, :rows, :width].copy_(batch.block_tables[:, :rows], non_blocking=True)
        plan.slot_mapping[:, :tokens].copy_(batch.slot_mapping[:, :tokens], non_blocking=True)
        plan.slot_mapping[:, tokens:].fill_(-1)

    def write_kv(self, layer: int, k: Tensor, v: Tensor, plan: TritonPlan) -> None:
        """One launch for keys and values."""
        spec = self._layers[layer]
        keys, values = self._kv[layer]
        k, v = _dense_heads(k), _dense_heads(v)
        num_rows = k.shape[0] * spec.num_kv_heads
        write_kernel[(triton.cdiv(num_rows, WRITE_ROWS),)](
            k,
            v,
            keys,
            values,
            plan.slot_mapping[spec.group],
            num_rows,
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            NUM_KV_HEADS=spec.num_kv_heads,
            HEAD_DIM=spec.head_dim,
            V_HEAD_DIM=spec.v_head_dim,
            BLOCK_ROWS=WRITE_ROWS,
            BLOCK_D=power_of_two(spec.head_dim),
            BLOCK_DV=power_of_two(spec.v_head_dim),
            enable_fp_fusion=True,
        )

    def rope_and_write_kv(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, plan: TritonPlan
    ) -> None:
        """RoPE and the KV write in one launch, in place of RoPE and `write_kv`.

        q: [num_tokens, num_heads, head_dim], turned in place. k, v: before RoPE, unchanged. cos, sin: [num_tokens,
        rotary_dim] fp32, contiguous. Offered beyond the contract to op sets that know this backend.
        """
        spec = self._layers[layer]
        keys, values = self._kv[layer]
        turn_heads(q, _dense_heads(k), cos, sin, write=(_dense_heads(v), keys, values, plan.slot_mapping[spec.group]))

    def attend(self, layer: int, q: Tensor, plan: TritonPlan, *, sinks: Tensor | None = None) -> Tensor:
        """One launch a part, and one more where keys are split."""
        spec = self._layers[layer]
        q = _dense_heads(q)
        out = q.new_empty(plan.num_tokens, spec.num_heads, spec.v_head_dim)
        for part in plan.parts[self._shape_of[layer]]:
            self._attend_part(layer, spec, q, out, plan, part, sinks)
            if part.num_splits > 1:
                join_splits(spec, out, plan, part)
        return out

    def _attend_part(
        self, layer: int, spec: LayerSpec, q: Tensor, out: Tensor, plan: TritonPlan, part: Part, sinks: Tensor | None
    ) -> None:
        keys, values = self._kv[layer]
        table = plan.block_tables[spec.group]
        attend_kernel[(part.num_tiles, spec.num_kv_heads, part.num_splits)](
            q,
            keys,
            values,
            out,
            part.partial,
            part.partial_lse,
            out if sinks is None else sinks,
            table,
            plan.query_start,
            plan.seq_lens,
            plan.query_start if part.tiles is None else part.tiles,
            q.stride(0),
            q.stride(1),
            table.stride(0),
            NUM_KV_HEADS=spec.num_kv_heads,
            HEADS_PER_KV=spec.num_heads // spec.num_kv_heads,
            HEAD_DIM=spec.head_dim,
            V_HEAD_DIM=spec.v_head_dim,
            BLOCK_SIZE=self._block_size,
            SCALE=spec.scale,
            WINDOW=spec.window or 0,
            CHUNK=spec.chunk or 0,
            SOFT_CAP=spec.soft_cap or 0.0,
            HAS_SINKS=sinks is not None,
            ONE_QUERY=part.tiles is None,
            QUERIES=part.queries,
            IS_SPLIT=part.num_splits > 1,
            BLOCK_M=part.tile.rows,
            BLOCK_N=part.tile.keys,
            BLOCK_D=padded_dim(spec.head_dim),
            BLOCK_DV=padded_dim(spec.v_head_dim),
            num_warps=part.tile.num_warps,
            num_stages=part.tile.num_stages,
            enable_fp_fusion=True,
        )


def join_splits(spec: LayerSpec, out: Tensor, plan: TritonPlan, part: Part) -> None:
    """Combine a part's splits into its tokens of `out`."""
    join_kernel[(part.num_tiles * part.queries, spec.num_heads)](
        part.partial,
        part.partial_lse,
        out,
        plan.query_start,
        plan.query_start if part.tiles is None else part.tiles,
        NUM_HEADS=spec.num_heads,
        V_HEAD_DIM=spec.v_head_dim,
        QUERIES=part.queries,
        ONE_QUERY=part.tiles is None,
        NUM_SPLITS=part.num_splits,
        BLOCK_DV=power_of_two(spec.v_head_dim),
        num_warps=join_warps(part.num_splits, spec.v_head_dim),
        enable_fp_fusion=True,
    )


def _dense_heads(x: Tensor) -> Tensor:
    """x, or a copy where a head's numbers do not follow each other."""
    return x if x.stride(-1) == 1 else x.contiguous()


def find_device(name: str) -> Device:
    """The device's capability and size. On a CPU, which only the interpreter serves, those of the smallest GPU."""
    if name.startswith("cuda"):
        found = torch.cuda.get_device_properties(name)
        return Device(name, found.major * 10 + found.minor, found.multi_processor_count)
    if not triton.knobs.runtime.interpret:
        raise UnsupportedError(
            f"attention 'triton' was asked to run on {name!r}; its kernels need an NVIDIA GPU. Use --attention torch "
            "there (or TRITON_INTERPRET=1 to check the kernels, slowly)"
        )
    return Device(name, 80, 8)


def build(ctx: BuildContext) -> TritonAttention:
    """Provider factory: needs ctx.model_spec, ctx.engine.block_size, ctx.device and ctx.dtype."""
    assert ctx.model_spec is not None, "attention is built once the model's layers are known"
    size = ctx.engine.block_size
    if size.bit_count() != 1 or size > 256:
        raise UnsupportedError(f"attention 'triton' reads blocks of 1, 2, 4 … 256 tokens, not {size}; set --block-size")
    dtype: torch.dtype = getattr(torch, ctx.dtype)
    for layer in ctx.model_spec.layers:
        if not fits_a_tile(Shape.of(layer), itemsize=dtype.itemsize):
            raise UnsupportedError(
                f"attention 'triton' has no tile for {layer.num_heads // layer.num_kv_heads} query heads a KV head of "
                f"{max(layer.head_dim, layer.v_head_dim)} in {ctx.dtype}; use --attention torch"
            )
    return TritonAttention(ctx.model_spec.layers, block_size=size, device=find_device(ctx.device), dtype=dtype)
