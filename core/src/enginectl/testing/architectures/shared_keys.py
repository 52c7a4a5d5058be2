"""Models whose keys and values come from a latent vector, or from another layer; packed."""

from __future__ import annotations

from typing import Any

from enginectl.testing.architectures.kinds import LATENT, MIXED, VOCAB_SIZE, Architecture, packed

_LATER_LAYERS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": [*MIXED[:2], *MIXED[:2]],
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 16,
}
"""The last two layers take keys and values from the first two."""

SHARED_KEYS: dict[str, Architecture] = {
    "minicpm3": packed("minicpm3", "narrow values", dim_model_base=24, **LATENT),
    "deepseek_v2": packed("deepseek_v2", "narrow values", topk_method="greedy", **LATENT),
    "deepseek_v3": packed("deepseek_v3", "narrow values", **LATENT),
    "glm4_moe_lite": packed("glm4_moe_lite", "narrow values", **LATENT),
    "youtu": packed("youtu", "narrow values", embedding_initializer_range=0.2, without="head_dim", **LATENT),
    "sarvam_mla": packed("sarvam_mla", "narrow values", **LATENT),
    "longcat_flash": packed("longcat_flash", "narrow values", num_layers=2, zero_expert_num=2, moe_topk=2, **LATENT),
    "gemma3n": packed(
        "gemma3n_text",
        "GQA",
        "mixed",
        "window",
        **_LATER_LAYERS,
        laurel_rank=8,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
    ),
    "gemma4": packed(
        "gemma4_text",
        "GQA",
        "mixed",
        "window",
        **_LATER_LAYERS,
    ),
}
