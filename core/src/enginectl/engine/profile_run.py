"""The largest step there is, over a store of one block: run once to see what memory a step takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from enginectl.context import BuildContext, LoadedModel
from enginectl.engine.graphs import DecodeGraphs, make_graphs, record_graphs
from enginectl.engine.rows import IntRows
from enginectl.interfaces.adapter import AdapterBackend
from enginectl.interfaces.attention import AttentionBackend, AttentionBatch
from enginectl.interfaces.model import ForwardInput, LayerSpec, Model
from enginectl.kv_memory import KVMemory

SAMPLER_COPIES = 4
"""Times the logits that sampling takes beside them, at most: a copy, a mask, weights and sums."""


@dataclass(frozen=True, slots=True)
class Largest:
    """The most a step may have. num_logits: rows whose next token is chosen, those of drafts included."""

    num_tokens: int
    num_rows: int
    num_logits: int
    max_model_len: int
    block_size: int
    device: str
    dtype: torch.dtype


def measure_kv(ctx: BuildContext, memory: KVMemory, beside: Sequence[LoadedModel] = ()) -> int:
    """Bytes for KV and recurrent state beside the model of `ctx` and those loaded `beside` it, which run in turn, with
    their largest steps and the graphs that will be recorded.
    """
    config, model, adapters = ctx.engine, ctx.model, ctx.parts.get("adapter")
    assert model is not None, "the model is loaded"
    assert config.max_num_batched_tokens is not None, "resolved"
    speculator = ctx.parts.get("speculator")
    max_drafts = 0 if speculator is None else speculator.max_drafts
    attention, num_rows = ctx.parts["attention"], config.max_num_seqs
    largest = Largest(
        num_tokens=config.max_num_batched_tokens,
        num_rows=num_rows,
        num_logits=min(num_rows * (1 + max_drafts), config.max_num_batched_tokens),
        max_model_len=config.max_model_len or model.spec.max_model_len,
        block_size=config.block_size,
        device=ctx.device,
        dtype=getattr(torch, config.kv_cache_dtype),
    )

    def run() -> None:
        run_largest_step(model, attention, largest, adapters)
        for other in beside:
            run_largest_step(other.model, other.attention, largest)

    def record() -> DecodeGraphs | None:
        if config.enforce_eager:
            return None
        width = -(-largest.max_model_len // largest.block_size)
        graphs = make_graphs(
            model,
            attention,
            adapters,
            torch.device(ctx.device),
            num_rows=num_rows,
            table_shape=(num_groups(model.spec.layers), width),
            block_size=largest.block_size,
        )
        return None if graphs is None else record_graphs(graphs, largest_only=True)

    # The pool of states was there while the step ran, and is taken from what is left again.
    return memory.measure(run, record) + num_rows * model.spec.state_bytes_per_row


def run_largest_step(
    model: Model, attention: AttentionBackend, largest: Largest, adapters: AdapterBackend | None = None
) -> None:
    """As many tokens in as many rows as a step may have, each row a prompt, and logits as many.

    Everything is written to and read from the null block. Binds the backend, and a model that reads rows, to a store of
    that block; they are bound again when the pool is allocated.
    """
    layers = model.spec.layers
    kv = [_null_block(layer, largest) for layer in layers]
    attention.bind(kv)
    if not model.reads_rows:
        counts = spread(largest.num_tokens, largest.num_rows, largest.max_model_len)
        _run(model, attention, counts, largest, adapters)
        return
    # Such a model runs long rows one by one, and single tokens together.
    model.bind(kv, largest.num_rows)
    for counts in (
        spread(largest.num_tokens, 1, largest.max_model_len),
        np.ones(min(largest.num_rows, largest.num_tokens), np.int32),
    ):
        _run(model, attention, counts, largest, adapters)
    model.bind(kv, 1)


def _run(
    model: Model, attention: AttentionBackend, counts: IntRows, largest: Largest, adapters: AdapterBackend | None
) -> None:
    device = largest.device
    batch = null_batch(counts, model.spec.layers, largest.block_size, device)
    positions = np.arange(batch.num_tokens) - np.repeat(batch.query_start_host[:-1], counts)
    keep = np.arange(max(0, batch.num_tokens - largest.num_logits), batch.num_tokens)
    slots = None
    if adapters is not None and adapters.graph_capture:  # others want a token that has one
        slots = torch.full((batch.num_tokens,), -1, dtype=torch.int32, device=device)
    with torch.inference_mode():
        if adapters is not None:
            adapters.begin_step(slots)
        kept = model.forward(
            ForwardInput(
                token_ids=torch.zeros(batch.num_tokens, dtype=torch.int64, device=device),
                positions=torch.from_numpy(positions.astype(np.int64)).to(device),
                keep=torch.from_numpy(keep).to(device),
                plan=attention.prepare(batch),
                adapter_slots=slots,
                batch=batch,
                rows=np.arange(counts.size, dtype=np.int32),
                keep_host=keep,
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
    groups = num_groups(layers)
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


def num_groups(layers: Sequence[LayerSpec]) -> int:
    """KV groups, which are counted from 0."""
    return max((layer.group for layer in layers), default=0) + 1


def _null_block(layer: LayerSpec, largest: Largest) -> tuple[Tensor, Tensor]:
    shape = (1, largest.block_size, layer.num_kv_heads)
    keys = torch.zeros(*shape, layer.head_dim, dtype=largest.dtype, device=largest.device)
    return keys, torch.zeros(*shape, layer.v_head_dim, dtype=largest.dtype, device=largest.device)
