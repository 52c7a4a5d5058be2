"""GGUF metadata to a Hugging Face configuration and generation configuration. Imports no torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginectl.builtin.weights.gguf_file import GGUFFile
from enginectl.builtin.weights.gguf_names import Architecture, architecture
from enginectl.errors import ModelError

_TURN_ENDS = frozenset({"<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|eom_id|>"})
"""Control tokens that end an assistant's turn whatever `eos_token_id` says, in the families read here."""

_CONTROL_TOKEN = 3
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_GEMMA2_27B_LAYERS = 46


class _Keys:
    """Metadata under the architecture's prefix, with errors that name the file and key."""

    def __init__(self, file: GGUFFile, arch: str) -> None:
        self._file = file
        self._prefix = arch

    def get(self, key: str, default: Any = None) -> Any:
        return self._file.metadata.get(f"{self._prefix}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            found = "missing" if value is None else f"{value!r}"
            raise ModelError(f"{self._file.path}: {self._prefix}.{key} is {found}; expected one integer")
        return value


def gguf_architecture(file: GGUFFile) -> Architecture:
    """The file's architecture, or ModelError naming those that can be read."""
    return architecture(file.path, str(file.metadata.get("general.architecture", "")))


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """The configuration as a config.json would hold it, without `dtype`."""
    arch = gguf_architecture(file)
    keys = _Keys(file, arch.name)
    if keys.get("expert_count", 0):
        raise ModelError(
            f"{file.path}: a mixture of {keys.get('expert_count')} experts; only dense {arch.name} GGUF files are read"
        )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path}: tensor 'token_embd.weight' is missing; the file is not a language model's")
    num_heads = keys.integer("attention.head_count")
    hidden_size = keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", hidden_size // num_heads)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{file.path}: keys of {head_dim} and values of {keys.get('attention.value_length')} per head")
    config: dict[str, Any] = {
        "architectures": [arch.hf_class],
        "model_type": arch.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": float(keys.get("attention.layer_norm_rms_epsilon", 1e-6)),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_particulars(file, arch, keys, hidden_size, num_heads, head_dim),
        **_special_tokens(file),
    }
    config["rope_parameters"] = _rope(file, keys, config)
    return config


def _particulars(
    file: GGUFFile, arch: Architecture, keys: _Keys, hidden_size: int, num_heads: int, head_dim: int
) -> dict[str, Any]:
    """What only some architectures have."""
    window = keys.get("attention.sliding_window")
    if arch.name == "gemma2":
        is_27b = keys.integer("block_count") == _GEMMA2_27B_LAYERS
        return {
            "hidden_activation": "gelu_pytorch_tanh",
            "attn_logit_softcapping": float(keys.get("attn_logit_softcapping", 50.0)),
            "final_logit_softcapping": float(keys.get("final_logit_softcapping", 30.0)),
            "sliding_window": int(window or 4096),
            "query_pre_attn_scalar": hidden_size // num_heads if is_27b else head_dim,
        }
    if arch.name == "phi3":
        return {"hidden_act": "silu", "sliding_window": int(window) if window else None}
    if window:
        raise ModelError(f"{file.path}: a sliding window of {window} in a {arch.name!r} GGUF file is not supported")
    if arch.name == "qwen2":
        return {"hidden_act": "silu", "use_sliding_window": False}
    found = file.tensors.keys()
    particulars = {"hidden_act": "silu", "attention_bias": "blk.0.attn_q.bias" in found}
    return particulars if arch.name == "qwen3" else {**particulars, "mlp_bias": "blk.0.ffn_up.bias" in found}


def _special_tokens(file: GGUFFile) -> dict[str, Any]:
    ids = {
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
        "eos_token_id": _one_or_many(eos_token_ids(file)),
    }
    return {name: value for name, value in ids.items() if value is not None}


def eos_token_ids(file: GGUFFile) -> list[int]:
    """Every token that ends generation: eos, end of turn, end of message, and control tokens known to end a turn."""
    named = (file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    ids = {int(value) for value in named if value is not None}
    kinds = file.metadata.get("tokenizer.ggml.token_type", [])
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    ids.update(i for i, kind in enumerate(kinds) if kind == _CONTROL_TOKEN and tokens[i] in _TURN_ENDS)
    return sorted(ids)


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """What generation_config.json would say; GGUF files hold no sampling defaults."""
    return _special_tokens(file)


def _one_or_many(ids: list[int]) -> int | list[int] | None:
    if len(ids) > 1:
        return ids
    return ids[0] if ids else None


def _rope(file: GGUFFile, keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(keys.get("rope.freq_base", 10_000.0))}
    head_dim = config["head_dim"]
    rotary_dim = keys.integer("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        if config["model_type"] != "phi3":
            raise ModelError(f"{file.path}: rotary embeddings over {rotary_dim} of {head_dim} dimensions")
        rope["partial_rotary_factor"] = rotary_dim / head_dim
    original = keys.get("rope.scaling.original_context_length")
    if "rope_factors_long.weight" in file.tensors:
        return {**rope, **_longrope(file, keys, config, original)}
    if "rope_freqs.weight" in file.tensors:
        factors = file.raw(file.tensors["rope_freqs.weight"]).astype(np.float64)
        return {**rope, **_llama3(file, factors, rope["rope_theta"], head_dim)}
    kind = keys.get("rope.scaling.type", "none")
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn") or config["model_type"] == "phi3":
        raise ModelError(f"{file.path}: rope scaling {kind!r} for {config['model_type']}; known: linear, yarn")
    factor = float(keys.get("rope.scaling.factor", 1.0))
    rope |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = int(original or config["max_position_embeddings"])
        scale = keys.get("rope.scaling.attn_factor")
        if scale is not None:
            rope["attention_factor"] = float(scale) * (0.1 * math.log(factor) + 1.0)
    return rope


def _longrope(file: GGUFFile, keys: _Keys, config: dict[str, Any], original: int | None) -> dict[str, Any]:
    if original is None or "rope_factors_short.weight" not in file.tensors:
        raise ModelError(f"{file.path}: long-context rotary factors without short ones or their original length")
    config["original_max_position_embeddings"] = int(original)
    rope: dict[str, Any] = {"rope_type": "longrope", "original_max_position_embeddings": int(original)}
    for name in ("long", "short"):
        values = file.raw(file.tensors[f"rope_factors_{name}.weight"])
        rope[f"{name}_factor"] = [float(str(value)) for value in values]
    scale = keys.get("rope.scaling.attn_factor")
    return rope if scale is None else {**rope, "attention_factor": float(scale)}


def _llama3(file: GGUFFile, factors: NDArray[np.float64], theta: float, head_dim: int) -> dict[str, Any]:
    """The file holds one divisor per frequency; find the `llama3` parameters that give exactly these."""
    factor = float(factors.max())
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high, original = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"], 8192
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ModelError(f"{file.path}: rope_freqs.weight holds frequency divisors that are not Llama 3's")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
