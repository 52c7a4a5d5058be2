"""Tiny random models as directories: small enough for a test of seconds, and able to fail it.

Embeddings are untied and weights wide (std 0.2), so that outputs do not repeat; windows are 8 and soft caps bite, so
that a wrong mask or a missing cap changes tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 320
"""Room for the 256 bytes of the tokenizer and its special tokens."""

BOS, EOS, PAD = 256, 257, 258
WINDOW = 8

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}

_RENAMED = frozenset(
    [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    ]
)
"""What GPT-2 calls otherwise, or does not have."""

_MOE: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": WINDOW},
    "qwen2": {"model_type": "qwen2"},
    "qwen2_window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3"},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "gemma": {"model_type": "gemma"},
    "gemma2": {
        "model_type": "gemma2",
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 4.0,
        "query_pre_attn_scalar": 16,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
    },
    "mixtral": {"model_type": "mixtral", **_MOE},
    "olmo2": {"model_type": "olmo2"},
    "phi3": {"model_type": "phi3"},
    "smollm3": {"model_type": "smollm3"},
    "granite": {"model_type": "granite", "logits_scaling": 2.0, "attention_multiplier": 0.3},
    "llama4": {
        "model_type": "llama4_text",
        "attention_chunk_size": WINDOW,
        "intermediate_size_mlp": 96,
        "moe_layers": [1],
        "attn_temperature_tuning": False,
        "no_rope_layers": [1, 0, 1],
        **_MOE,
    },
    "gpt_oss": {"model_type": "gpt_oss", "sliding_window": WINDOW, **_MOE},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 6,
        "n_positions": 256,
        "n_inner": 96,
    },
}
"""Name to what differs from the common configuration."""


def tiny_config(name: str, **changes: Any) -> Any:
    """The configuration object of a tiny model. changes: fields set last."""
    from transformers import CONFIG_MAPPING

    values = dict(CONFIGS[name])
    model_type = values.pop("model_type")
    renamed = _RENAMED if model_type == "gpt2" else frozenset()
    common = {key: value for key, value in _COMMON.items() if key not in renamed}
    return CONFIG_MAPPING[model_type](**{**common, **values, **changes})


def tiny_model(name: str, *, seed: int = 0, **changes: Any) -> Any:
    """A tiny random model in fp32, in eval mode."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = tiny_config(name, **changes)
    random = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases start at constants, which would hide that one is left out
                parameter += torch.randn(parameter.shape, generator=random) * 0.1
    return model.eval()


def save_tiny_model(
    name: str, directory: Path, *, seed: int = 0, dtype: str = "float32", tokenizer: bool = True, **changes: Any
) -> Path:
    """Write config.json, model.safetensors, generation_config.json and a byte tokenizer. Returns the directory."""
    model = tiny_model(name, seed=seed, **changes).to(getattr(torch, dtype))
    model.save_pretrained(directory)
    if tokenizer:
        save_byte_tokenizer(directory)
    return directory


CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def save_byte_tokenizer(directory: Path) -> None:
    """A tokenizer with one token a byte, the specials `<s> </s> <pad>` and a plain chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>", "<pad>")])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(str(directory))
    assert wrapped.convert_tokens_to_ids("</s>") == EOS, json.dumps(wrapped.get_added_vocab())
