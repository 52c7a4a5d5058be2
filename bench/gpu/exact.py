"""Attention by definition in fp64, on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from enginectl.interfaces.attention import AttentionBatch
from enginectl.interfaces.model import LayerSpec
from enginectl.testing.tolerances import TOLERANCES

MAX_SCORES = 1 << 26
"""Numbers at a time: several processes share the device's memory."""


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
    """As a part of the tolerance, row by row; infinity for NaN."""
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
    """One sequence; q is its last queries, a few at a time."""
    per_kv = layer.num_heads // layer.num_kv_heads
    k, v = (x.double().repeat_interleave(per_kv, dim=1).transpose(0, 1) for x in (k, v))
    position = torch.arange(k.shape[1], device=q.device)[-q.shape[0] :]
    step = max(1, MAX_SCORES // (layer.num_heads * k.shape[1]))
    parts = [
        _attend(part, k, v, at, layer, sinks) for part, at in zip(q.split(step), position.split(step), strict=True)
    ]
    return torch.cat(parts)


def _attend(q: Tensor, k: Tensor, v: Tensor, position: Tensor, layer: LayerSpec, sinks: Tensor | None) -> Tensor:
    """k, v: [heads, keys, …] fp64. position: of each query."""
    scores = q.double().transpose(0, 1) @ k.transpose(1, 2) * layer.scale  # [heads, queries, keys]
    if layer.soft_cap is not None:
        scores = torch.tanh(scores / layer.soft_cap) * layer.soft_cap
    key, query = torch.arange(k.shape[1], device=q.device), position[:, None]
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
