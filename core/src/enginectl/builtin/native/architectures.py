"""The architectures the native family knows, as data: what tells one decoder from another.

`keys` is every field that the architecture's configuration reads. A field that is not here stops the model from being
served natively, so that nothing new can run wrong in silence.
"""

from __future__ import annotations

from typing import Any

import msgspec

COMMON_KEYS = frozenset(
    {
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "partial_rotary_factor",
        "hidden_act",
        "layer_types",
    }
)
"""What every architecture here has."""

HARMLESS_KEYS = frozenset(
    {
        "model_type",
        "architectures",
        "auto_map",
        "transformers_version",
        "transformers.js_config",
        "torch_dtype",
        "dtype",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "sep_token_id",
        "use_cache",
        "cache_implementation",
        "initializer_range",
        "pretraining_tp",
        "attention_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "output_router_logits",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "return_dict",
        "chunk_size_feed_forward",
        "id2label",
        "label2id",
        "attn_implementation",
        "is_llama_config",
        "unsloth_version",
        "unsloth_fixed",
        "pad_token",
        "model_name",
    }
)
"""What changes nothing that is computed here: tokens, training, bookkeeping. Names with a leading _ are likewise."""


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """How one `model_type` differs from Llama.

    keys: fields it reads besides COMMON_KEYS. defaults: what a field means that is left out; others are required.
    theta, local_theta: RoPE base, and that of windowed layers where it is another. norm, norm_order, qk_norm: as in
    BlockSpec. qkv_bias, output_bias, mlp_bias: True, False, or the name of the field that says. activation: the field
    that names it. windows: which layers look back over `sliding_window` only, when `layer_types` does not say: none,
    all, even, late (from max_window_layers on), early_even (even ones before max_window_layers), unturned (those
    without RoPE), pattern (all but every sliding_window_pattern-th). num_experts: the field, None for a dense model.
    expert_size: the field with an expert's intermediate size.
    """

    keys: frozenset[str] = frozenset()
    defaults: dict[str, Any] = {}
    theta: float = 10_000.0
    local_theta: float | None = None
    norm: str = "rms"
    norm_order: str = "pre"
    qk_norm: str | None = None
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    activation: str = "hidden_act"
    windows: str = "none"
    scales_embedding: bool = False
    num_experts: str | None = None
    expert_size: str = "intermediate_size"


_SWITCHED = frozenset({"use_sliding_window", "sliding_window", "max_window_layers"})
_GEMMA = frozenset({"attention_bias", "hidden_activation", "use_bidirectional_attention"})
_SWITCHED_DEFAULTS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_CAPS = frozenset({"query_pre_attn_scalar", "sliding_window", "final_logit_softcapping", "attn_logit_softcapping"})
_EXPERT_KEYS = frozenset({"decoder_sparse_step", "mlp_only_layers", "norm_topk_prob", "moe_intermediate_size"})

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        keys=frozenset({"attention_bias", "mlp_bias"}),
        defaults={"num_key_value_heads": None},
        mlp_bias="mlp_bias",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
    ),
    "mistral": Architecture(keys=frozenset({"sliding_window"}), defaults={"sliding_window": 4096}, windows="all"),
    "qwen2": Architecture(keys=_SWITCHED, defaults=_SWITCHED_DEFAULTS, qkv_bias=True, windows="late"),
    "qwen3": Architecture(
        keys=_SWITCHED | {"attention_bias"},
        defaults={**_SWITCHED_DEFAULTS, "head_dim": 128},
        qk_norm="head",
        windows="late",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
    ),
    "smollm3": Architecture(
        keys=_SWITCHED | {"attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval"},
        defaults={"use_sliding_window": False, "no_rope_layer_interval": 4, "tie_word_embeddings": True},
        theta=2_000_000.0,
        mlp_bias="mlp_bias",
        windows="unturned",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
    ),
    "gemma": Architecture(
        keys=_GEMMA,
        defaults={"head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
        norm="rms_plus_one",
        scales_embedding=True,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
    ),
    "gemma2": Architecture(
        keys=_GEMMA | _CAPS,
        defaults={
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        norm="rms_plus_one",
        norm_order="sandwich",
        activation="hidden_activation",
        windows="even",
        scales_embedding=True,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
    ),
    "gemma3_text": Architecture(
        keys=_GEMMA | _CAPS | {"rope_local_base_freq", "sliding_window_pattern"},
        defaults={
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
        },
        theta=1_000_000.0,
        local_theta=10_000.0,
        norm="rms_plus_one",
        norm_order="sandwich",
        qk_norm="head",
        activation="hidden_activation",
        windows="pattern",
        scales_embedding=True,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
    ),
    "phi3": Architecture(
        keys=frozenset({"sliding_window", "original_max_position_embeddings"}),
        defaults={"num_key_value_heads": None, "sliding_window": None, "original_max_position_embeddings": 4096},
        windows="all",
    ),
    "olmo2": Architecture(
        keys=frozenset({"attention_bias"}),
        defaults={"num_key_value_heads": None},
        norm_order="post",
        qk_norm="flat",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
    ),
    "granite": Architecture(
        keys=frozenset(
            {
                "attention_bias",
                "mlp_bias",
                "embedding_multiplier",
                "logits_scaling",
                "residual_multiplier",
                "attention_multiplier",
            }
        ),
        defaults={"num_key_value_heads": None, "attention_multiplier": 1.0},
        mlp_bias="mlp_bias",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
    ),
    "mixtral": Architecture(
        keys=frozenset({"sliding_window", "num_local_experts", "num_experts_per_tok"}),
        defaults={"sliding_window": None},
        theta=1_000_000.0,
        windows="all",
        num_experts="num_local_experts",
    ),
    "qwen2_moe": Architecture(
        keys=_SWITCHED
        | _EXPERT_KEYS
        | {"num_experts", "num_experts_per_tok", "shared_expert_intermediate_size", "qkv_bias"},
        defaults={**_SWITCHED_DEFAULTS, "decoder_sparse_step": 1, "norm_topk_prob": False, "qkv_bias": True},
        qkv_bias="qkv_bias",
        windows="early_even",
        num_experts="num_experts",
        expert_size="moe_intermediate_size",
    ),
    "qwen3_moe": Architecture(
        keys=_SWITCHED | _EXPERT_KEYS | {"attention_bias", "num_experts", "num_local_experts", "num_experts_per_tok"},
        defaults={
            "use_sliding_window": False,
            "sliding_window": 4096,
            "decoder_sparse_step": 1,
            "norm_topk_prob": False,
        },
        qk_norm="head",
        windows="all",
        num_experts="num_experts",
        expert_size="moe_intermediate_size",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
    ),
}
"""By `model_type`."""
