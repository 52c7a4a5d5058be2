"""Tiny random models that cannot run packed: some carry a recurrent state, the attention of others never reaches us.

As in `tiny_models`, embeddings are untied and weights wide, so that a lost state or a wrong mask changes tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from enginectl.testing.tiny_models import BOS, EOS, PAD, VOCAB_SIZE, WINDOW, save_byte_tokenizer

_ALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}

_SIZES: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 4, "max_position_embeddings": 256}
_WIDE = _SIZES | {"intermediate_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}
_HEADS = _WIDE | {"head_dim": 16}
_ALTERNATE = {"layer_types": ["linear_attention", "full_attention"] * 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    **_ALTERNATE,
}
_SCAN = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}

STATE_POOL: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "model_type": "qwen3_next",
        **_HEADS,
        **_DELTA,
        **_EXPERTS,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_5": {"model_type": "qwen3_5_text", **_HEADS, **_DELTA},
    "lfm2": {
        "model_type": "lfm2",
        **_HEADS,
        "layer_types": ["conv", "full_attention"] * 2,
        "block_auto_adjust_ff_dim": False,
    },
    "falcon_h1": {"model_type": "falcon_h1", **_HEADS, **_SCAN, "mamba_d_ssm": 96},
    "bamba": {"model_type": "bamba", **_WIDE, **_SCAN, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {
        "model_type": "granitemoehybrid",
        **_WIDE,
        **_SCAN,
        "layer_types": ["mamba", "attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    },
    "mamba2": {
        "model_type": "mamba2",
        **_SIZES,
        "num_heads": 6,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
        "expand": 2,
    },
    "mamba": {"model_type": "mamba", **_SIZES, "state_size": 8, "time_step_rank": 4},
    "jamba": {
        "model_type": "jamba",
        **_WIDE,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
}
"""Name to configuration of models with a recurrent state."""

ONE_SEQUENCE: dict[str, dict[str, Any]] = {
    "falcon": {
        "model_type": "falcon",
        **_SIZES,
        "num_attention_heads": 6,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
    },
    "falcon_alibi": {
        "model_type": "falcon",
        **_SIZES,
        "num_attention_heads": 6,
        "new_decoder_architecture": False,
        "multi_query": False,
        "parallel_attn": False,
        "alibi": True,
    },
    "bloom": {"model_type": "bloom", "hidden_size": 48, "n_layer": 3, "n_head": 6},
    "mpt": {"model_type": "mpt", "d_model": 48, "n_heads": 6, "n_layers": 3, "max_seq_len": 256},
    "gpt_neo": {
        "model_type": "gpt_neo",
        "hidden_size": 48,
        "max_position_embeddings": 256,
        "num_layers": 4,
        "attention_types": [[["global", "local"], 2]],
        "num_heads": 6,
        "window_size": WINDOW,
    },
    "xglm": {
        "model_type": "xglm",
        "d_model": 48,
        "attention_heads": 6,
        "num_layers": 3,
        "ffn_dim": 96,
        "max_position_embeddings": 256,
        "pad_token_id": 1,
    },
    "doge": {"model_type": "doge", **_HEADS, "keep_window_size": 256},
}
"""Name to configuration of models that attend by themselves."""


def route_model(name: str, *, seed: int = 0) -> Any:
    """A tiny random model in fp32, in eval mode."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    values = dict((STATE_POOL | ONE_SEQUENCE)[name])
    config = CONFIG_MAPPING[values.pop("model_type")](**{**_ALL, **values})
    random = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases start at constants, which would hide that one is left out
                parameter += torch.randn(parameter.shape, generator=random) * 0.1
    return model.eval()


def save_route_model(name: str, directory: Path) -> Path:
    """Write it with a byte tokenizer. Returns the directory."""
    route_model(name).save_pretrained(directory)
    save_byte_tokenizer(directory)
    return directory
