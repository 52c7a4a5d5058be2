"""Models with a recurrent state."""

from __future__ import annotations

from typing import Any

from enginectl.testing.architectures.kinds import LATENT, Architecture, states

_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_LINEAR = ["linear_attention", "full_attention", "linear_attention"]
_CONV = ["conv", "full_attention", "conv"]
_DELTA_NET: dict[str, Any] = {
    "layer_types": _LINEAR,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

RECURRENT: dict[str, Architecture] = {
    "mamba": states("mamba", "no attention", whole_prompts=True, state_size=8),
    "mamba2": states("mamba2", "no attention", num_heads=6, head_dim=16, state_size=16, n_groups=2, chunk_size=8),
    "falcon_mamba": states("falcon_mamba", "no attention", whole_prompts=True, state_size=8),
    "jamba": states("jamba", "GQA", whole_prompts=True, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8),
    "bamba": states("bamba", "GQA", attn_layer_indices=[1], **_MAMBA),
    "falcon_h1": states("falcon_h1", "GQA", mamba_d_ssm=96, **_MAMBA),
    "granitemoe_hybrid": states("granitemoehybrid", "GQA", layer_types=_LINEAR, shared_intermediate_size=32, **_MAMBA),
    "nemotron_h": states(
        "nemotron_h",
        "GQA",
        layer_types=["linear_attention", "moe", "full_attention", "mlp"],
        num_hidden_layers=4,
        ssm_state_size=16,
        mamba_num_heads=6,
        mamba_head_dim=16,
        n_groups=2,
        chunk_size=8,
        moe_shared_expert_intermediate_size=32,
    ),
    "zamba": states(
        "zamba",
        "GQA",
        whole_prompts=True,
        layers_block_type=["linear_attention", "hybrid", "linear_attention"],
        mamba_d_state=8,
    ),
    "zamba2": states(
        "zamba2",
        "GQA",
        layers_block_type=["linear_attention", "hybrid", "linear_attention"],
        mamba_d_state=16,
        mamba_ngroups=2,
        n_mamba_heads=6,
        chunk_size=8,
    ),
    "lfm2": states("lfm2", "GQA", layer_types=_CONV),
    "lfm2_moe": states("lfm2_moe", "GQA", layer_types=_CONV, num_dense_layers=1),
    "lfm3": states("lfm3", "GQA"),
    "qwen3_next": states("qwen3_next", "GQA", **_DELTA_NET),
    "qwen3_5": states("qwen3_5_text", "GQA", **_DELTA_NET),
    "qwen3_5_moe": states("qwen3_5_moe_text", "GQA", **_DELTA_NET),
    "olmo_hybrid": states("olmo_hybrid", "GQA", **_DELTA_NET),
    "lara_mini": states("lara_mini", "GQA", "window", **{**_DELTA_NET, "layer_types": None}),
    "kimi_linear": states(
        "kimi_linear", "narrow values", layer_types=_LINEAR, linear_head_dim=8, linear_num_heads=6, **LATENT
    ),
}
