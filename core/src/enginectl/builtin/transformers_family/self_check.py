"""Does the model say the same by its route, over pages, as the library's own forward says?

Architectures that keep state of their own, or ignore positions, are wrong in silence: nothing raises. So two short
sequences run in shared, chunked steps and are compared with one stock forward each.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from enginectl.builtin.attention_torch import TorchAttention
from enginectl.builtin.transformers_family.model import TransformersModel
from enginectl.errors import ModelError
from enginectl.interfaces.model import ForwardInput
from enginectl.testing.paging import Pages

LENGTHS = (9, 14)
STEPS = (((0, 5), (1, 6)), ((0, 1), (1, 3)), ((0, 1), (1, 1)), ((1, 1), (0, 2)), ((1, 3),))
"""(sequence, tokens) of each step: chunks, single tokens, and both together."""

WHOLE_STEPS = (((1, 6),), ((1, 1), (0, 5)), *[((0, 1), (1, 1))] * 4, *[((1, 1),)] * 3)
"""The same for models that read a prompt in one step: then single tokens."""

BLOCK_SIZE = 4
NUM_BLOCKS = 16
MAX_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.5}
"""Largest relative difference of logits. Right models stay below 1e-5 in fp32 and, where a router flips an expert,
below 0.35 in 16 bits; wrong ones start at 0.85."""


def self_check(model: TransformersModel, *, device: str, dtype: torch.dtype) -> float:
    """Compare our logits with stock ones. Returns the relative difference; raises ModelError if it is too large."""
    random = torch.Generator().manual_seed(0)
    prompts = [torch.randint(model.spec.vocab_size, (length,), generator=random) for length in LENGTHS]
    try:
        with torch.inference_mode():
            with model.sites.watching():
                ours = paged_logits(model, prompts, device, dtype)
            stock = stock_logits(model, prompts, device)
    except Exception as error:
        raise ModelError("it raises when it is compared with the library's own forward") from error
    difference = max(
        float((mine - theirs).norm() / theirs.norm().clamp_min(1e-30)) for mine, theirs in zip(ours, stock, strict=True)
    )
    if not difference <= MAX_ERROR[dtype]:
        raise ModelError(
            f"its logits differ by {difference:.2g} (relative) from the library's own forward, at most "
            f"{MAX_ERROR[dtype]:.2g} is allowed"
        )
    return difference


def paged_logits(model: TransformersModel, prompts: list[Tensor], device: str, dtype: torch.dtype) -> list[Tensor]:
    """Every position's logits by the model's route: [length, vocab_size] for each prompt."""
    layers = model.spec.layers
    attention = TorchAttention(layers, block_size=BLOCK_SIZE, device=device, dtype=dtype)
    shape = (NUM_BLOCKS, BLOCK_SIZE)
    store = [
        (
            torch.empty(*shape, layer.num_kv_heads, layer.head_dim, dtype=dtype, device=device),
            torch.empty(*shape, layer.num_kv_heads, layer.v_head_dim, dtype=dtype, device=device),
        )
        for layer in layers
    ]
    attention.bind(store)
    model.use_attention(attention)
    model.bind(store, len(prompts))
    num_groups = 1 + max((layer.group for layer in layers), default=0)
    pages = Pages(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, num_groups=num_groups, device=device)
    parts: list[list[Tensor]] = [[] for _ in prompts]
    for work in STEPS if model.spec.takes_chunks else WHOLE_STEPS:
        spans = [(s, pages.num_tokens(s), pages.num_tokens(s) + count) for s, count in work]
        batch = pages.advance(work)
        step = ForwardInput(
            token_ids=torch.cat([prompts[s][start:stop] for s, start, stop in spans]).to(device),
            positions=torch.cat([torch.arange(start, stop) for _, start, stop in spans]).to(device),
            keep=torch.arange(batch.num_tokens, device=device),
            plan=attention.prepare(batch),
            batch=batch,
            rows=np.array([s for s, _ in work], np.int32),
        )
        logits = model.logits(model.forward(step))
        for (s, _), part in zip(work, torch.split(logits, [count for _, count in work]), strict=True):
            parts[s].append(part)
    return [torch.cat(rows) for rows in parts]


def stock_logits(model: TransformersModel, prompts: list[Tensor], device: str) -> list[Tensor]:
    """The same through the library's eager attention, one sequence a forward."""
    module = model.module
    module.set_attn_implementation(model.stock)
    try:
        return [module(input_ids=ids.to(device).unsqueeze(0), use_cache=False).logits[0].float() for ids in prompts]
    finally:
        module.set_attn_implementation(model.implementation)
