"""What an architecture of the registry is, and what the tiny models have in common.

The models can fail a test: embeddings untied, weights wide, windows of 8, soft caps that bite, several experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

VOCAB_SIZE = 320
"""Room for the 256 bytes of the tiny tokenizer and its special tokens."""

BOS, EOS, PAD = 256, 257, 258
WINDOW = 8

PACKED, STATES, ONE_BY_ONE = "packed", "state pool", "one sequence per forward"


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """A tiny random model that must come out exact.

    values: fields of its configuration, over those of COMMON that it knows. without: fields of COMMON it goes without.
    route: how the transformers family must serve it. traits: what its attention does, among those `traits_of` sees.
    native: the native family serves it too. whole_prompts: its prompts cannot be read in chunks.
    """

    model_type: str
    values: Mapping[str, Any] = {}
    without: frozenset[str] = frozenset()
    route: str = PACKED
    traits: frozenset[str] = frozenset()
    native: bool = False
    whole_prompts: bool = False


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration that must not load. reason: words of the error that say why."""

    model_type: str
    reason: str
    values: Mapping[str, Any] = {}


COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "init_std": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 4.0,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
"""What every model has of these fields that its configuration knows, unless it says otherwise."""

MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
"""Layers with windows and without."""

LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
}
"""Keys and values from a latent vector, values narrower than keys."""


def packed(model_type: str, *traits: str, native: bool = False, without: str = "", **values: Any) -> Architecture:
    return Architecture(
        model_type=model_type,
        values=values,
        without=frozenset(without.split()),
        traits=frozenset(traits),
        native=native,
    )


def states(model_type: str, *traits: str, whole_prompts: bool = False, **values: Any) -> Architecture:
    return Architecture(
        model_type=model_type, values=values, route=STATES, traits=frozenset(traits), whole_prompts=whole_prompts
    )


def one_by_one(model_type: str, *traits: str, **values: Any) -> Architecture:
    return Architecture(model_type=model_type, values=values, route=ONE_BY_ONE, traits=frozenset(traits))
