"""Greedy decoding without the engine: several prompts packed, in chunks, over pages. For exactness checks of models
and attention backends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from enginectl.interfaces.attention import AttentionBackend
from enginectl.interfaces.model import ForwardInput, Model, ModelSpec
from enginectl.testing.paging import Pages


def allocate(spec: ModelSpec, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: str) -> list[Any]:
    """A store for every layer, filled with NaN: what is read unwritten shows."""
    shape = (num_blocks, block_size)
    return [
        (
            torch.full((*shape, layer.num_kv_heads, layer.head_dim), float("nan"), dtype=dtype, device=device),
            torch.full((*shape, layer.num_kv_heads, layer.v_head_dim), float("nan"), dtype=dtype, device=device),
        )
        for layer in spec.layers
    ]


def greedy_decode(
    model: Model,
    attention: AttentionBackend,
    prompts: Sequence[Sequence[int]],
    *,
    num_new: int,
    chunk: int | None,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> list[list[int]]:
    """The `num_new` likeliest tokens after each prompt. chunk: prompt tokens a row and step, None for all.

    Prompts start a step apart, so that chunks and single tokens share steps.
    """
    total = sum(-(-(len(prompt) + num_new) // block_size) for prompt in prompts)
    pages = Pages(block_size=block_size, num_blocks=total + 1, device=device)
    store = allocate(model.spec, num_blocks=total + 1, block_size=block_size, dtype=dtype, device=device)
    attention.bind(store)
    model.use_attention(attention)
    model.bind(store, len(prompts))
    tokens = [list(prompt) for prompt in prompts]
    goals = [len(prompt) + num_new for prompt in prompts]
    for step in range(sum(goals) + len(prompts)):
        work = [
            (i, min(chunk or len(known), len(known) - pages.num_tokens(i)))
            for i, known in enumerate(tokens)
            if i <= step and len(known) < goals[i]
        ]
        if not work and step >= len(prompts):
            break
        work.sort(key=lambda item: item[1] > 1)
        for i, token in _step(model, attention, pages, tokens, work, device):
            tokens[i].append(token)
    return [known[len(prompt) :] for known, prompt in zip(tokens, prompts, strict=True)]


def _step(
    model: Model,
    attention: AttentionBackend,
    pages: Pages,
    tokens: list[list[int]],
    work: list[tuple[int, int]],
    device: str,
) -> list[tuple[int, int]]:
    """One packed step. Returns (sequence, next token) for those whose last known token was in it."""
    spans = [(i, pages.num_tokens(i), pages.num_tokens(i) + count) for i, count in work]
    batch = pages.advance(work)
    ends = batch.query_start_host[1:] - 1
    done = [row for row, (i, _, stop) in enumerate(spans) if stop == len(tokens[i])]
    flat: list[int] = [token for i, start, stop in spans for token in tokens[i][start:stop]]
    positions = [position for _, start, stop in spans for position in range(start, stop)]
    with torch.inference_mode():
        kept = model.forward(
            ForwardInput(
                token_ids=torch.tensor(flat, device=device),
                positions=torch.tensor(positions, device=device),
                keep=torch.tensor([int(ends[row]) for row in done], dtype=torch.long, device=device),
                plan=attention.prepare(batch),
                batch=batch,
                rows=np.array([i for i, _, _ in spans], np.int32),
            )
        )
        best: Tensor = model.logits(kept).argmax(-1)
    return [(spans[row][0], int(token)) for row, token in zip(done, best.tolist(), strict=True)]
