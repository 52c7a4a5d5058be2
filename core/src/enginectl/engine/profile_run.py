"""The largest step there is, over a store of one block: run once to see what memory a step takes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from enginectl.context import BuildContext
from enginectl.engine.graphs import MAX_GRAPH_ROWS
from enginectl.engine.rows import IntRows
from enginectl.interfaces.attention import AttentionBackend, AttentionBatch
from enginectl.interfaces.model import ForwardInput, LayerSpec, Model
from enginectl.kv_memory import KVMemory

SAMPLER_COPIES = 4
"""Times the logits that sampling takes beside them, at most: a copy, a mask, weights and sums."""


def measure_kv(ctx: BuildContext, memory: KVMemory) -> int:
    """Bytes for KV beside the model of `ctx` and its largest step.

    A model that keeps state by row has none before the pool is there, so it is not run; the margin is all it leaves.
    """
    config, model = ctx.engine, ctx.model
    assert model is not None, "the model is loaded"
    assert config.max_num_batched_tokens is not None, "resolved"
    if model.reads_rows:
        return memory.measure(lambda: None)
    step = partial(
        run_largest_step,
        model,
        ctx.parts["attention"],
        block_size=config.block_size,
        num_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len or model.spec.max_model_len,
        device=ctx.device,
        dtype=getattr(torch, config.kv_cache_dtype),
    )
    rows = 0 if config.enforce_eager else min(config.max_num_seqs, MAX_GRAPH_ROWS)
    return memory.measure(step, graphs=rows / config.max_num_batched_tokens)


def run_largest_step(
    model: Model,
    attention: AttentionBackend,
    *,
    block_size: int,
    num_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    device: str,
    dtype: torch.dtype,
) -> None:
    """As many tokens in as many rows as a step may have, each row a prompt, and logits for every row.

    Everything is written to and read from the null block. Binds the backend to a store of that block; it is bound again
    when the pool is allocated.
    """
    layers = model.spec.layers
    attention.bind([_null_block(layer, block_size, device, dtype) for layer in layers])
    counts = spread(num_tokens, max_num_seqs, max_model_len)
    batch = null_batch(counts, layers, block_size, device)
    tokens = torch.zeros(batch.num_tokens, dtype=torch.int64, device=device)
    starts = batch.query_start_host
    positions = np.arange(batch.num_tokens) - np.repeat(starts[:-1], counts)
    with torch.inference_mode():
        kept = model.forward(
            ForwardInput(
                token_ids=tokens,
                positions=torch.from_numpy(positions.astype(np.int64)).to(device),
                keep=torch.from_numpy(starts[1:].astype(np.int64) - 1).to(device),
                plan=attention.prepare(batch),
            )
        )
        logits = model.logits(kept)
        work = [torch.empty_like(logits) for _ in range(SAMPLER_COPIES)]
    del kept, logits, work


def spread(num_tokens: int, max_num_seqs: int, max_model_len: int) -> IntRows:
    """Tokens of each row, the fewest first: all rows there may be, none longer than the longest sequence."""
    num_tokens = min(num_tokens, max_num_seqs * max_model_len)
    rows = min(max_num_seqs, num_tokens)
    counts = np.full(rows, num_tokens // rows, np.int32)
    counts[rows - num_tokens % rows :] += 1
    return counts


def null_batch(counts: IntRows, layers: Sequence[LayerSpec], block_size: int, device: str) -> AttentionBatch:
    """Prompts of these lengths, all of whose blocks are the null block."""
    num_seqs, num_tokens, longest = counts.size, int(counts.sum()), int(counts.max())
    groups = max(layer.group for layer in layers) + 1
    starts = np.zeros(num_seqs + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    width = -(-longest // block_size)
    return AttentionBatch(
        num_seqs=num_seqs,
        num_tokens=num_tokens,
        num_decodes=int((counts == 1).sum()),
        max_query_len=longest,
        max_seq_len=longest,
        query_start=torch.from_numpy(starts).to(device),
        seq_lens=torch.from_numpy(counts).to(device),
        block_tables=torch.zeros(groups, num_seqs, width, dtype=torch.int32, device=device),
        slot_mapping=torch.zeros(groups, num_tokens, dtype=torch.int64, device=device),
        query_start_host=starts,
        seq_lens_host=counts,
    )


def _null_block(layer: LayerSpec, block_size: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (1, block_size, layer.num_kv_heads)
    keys = torch.zeros(*shape, layer.head_dim, dtype=dtype, device=device)
    return keys, torch.zeros(*shape, layer.v_head_dim, dtype=dtype, device=device)
