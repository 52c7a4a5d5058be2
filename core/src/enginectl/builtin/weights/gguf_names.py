"""Which GGUF architectures are read, and how their tensors map to those of the Hugging Face classes. Imports no torch.

Sources of the differences: the GGUF specification and llama.cpp's converters. Llama checkpoints interleave the two
halves of each rotary pair in the rows of q and k; Gemma checkpoints store norm weights with one added.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from enginectl.errors import ModelError, nearest

_NORMS = ("input_layernorm", "post_attention_layernorm")
_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@dataclass(frozen=True, slots=True)
class Architecture:
    """One GGUF architecture and its Hugging Face counterpart.

    modules: what every layer holds. biased: those of them that always have a bias. permuted: q and k rows are
    interleaved. norm_offset: what the file adds to norm weights.
    """

    name: str
    model_type: str
    hf_class: str
    enum: Any
    modules: tuple[str, ...]
    biased: tuple[str, ...] = ()
    permuted: bool = False
    norm_offset: float = 0.0


ARCHITECTURES = {
    a.name: a
    for a in (
        Architecture(
            "llama", "llama", "LlamaForCausalLM", gguf.MODEL_ARCH.LLAMA, _NORMS + _ATTENTION + _MLP, permuted=True
        ),
        Architecture(
            "qwen2",
            "qwen2",
            "Qwen2ForCausalLM",
            gguf.MODEL_ARCH.QWEN2,
            _NORMS + _ATTENTION + _MLP,
            biased=_ATTENTION[:3],
        ),
        Architecture(
            "qwen3",
            "qwen3",
            "Qwen3ForCausalLM",
            gguf.MODEL_ARCH.QWEN3,
            (*_NORMS, *_ATTENTION, *_MLP, "self_attn.q_norm", "self_attn.k_norm"),
        ),
        Architecture(
            "gemma2",
            "gemma2",
            "Gemma2ForCausalLM",
            gguf.MODEL_ARCH.GEMMA2,
            (*_NORMS, *_ATTENTION, *_MLP, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
            norm_offset=1.0,
        ),
        Architecture(
            "phi3",
            "phi3",
            "Phi3ForCausalLM",
            gguf.MODEL_ARCH.PHI3,
            (*_NORMS, "self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"),
        ),
    )
}

ROPE_TENSORS = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Tensors that belong to the configuration, not to the model class."""


def architecture(path: Path, name: str) -> Architecture:
    """The architecture of this name, or ModelError naming those that can be read."""
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{path}: GGUF architecture {name!r} cannot be read{nearest(name, ARCHITECTURES)} "
            f"supported: {', '.join(sorted(ARCHITECTURES))}. Use the model's safetensors directory instead"
        )
    return ARCHITECTURES[name]


def tensor_names(path: Path, arch: Architecture, config: dict[str, Any], stored: Collection[str]) -> dict[str, str]:
    """GGUF name to Hugging Face name, for every tensor of the model class.

    Raises ModelError if the class needs a tensor the file lacks, or the file holds one the class has no place for:
    either would give wrong answers in silence.
    """
    num_layers = config["num_hidden_layers"]
    known = gguf.get_tensor_name_map(arch.enum, num_layers)
    names: dict[str, str] = {}
    missing: list[str] = []
    for hf_name in _parameters(arch, config):
        name = known.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert name is not None, f"gguf's name map has no entry for {arch.name} {hf_name}"
        if name in stored:
            names[name] = hf_name
        else:
            missing.append(name)
    if missing:
        raise ModelError(f"{path}: tensor {missing[0]!r} is missing ({len(missing)} in all); the file is not complete")
    extra = sorted(set(stored) - set(names) - ROPE_TENSORS)
    if extra:
        raise ModelError(
            f"{path}: {arch.hf_class} has no place for tensor {extra[0]!r} ({len(extra)} in all): this variant of "
            f"{arch.name!r} is not supported. Use the model's safetensors directory instead"
        )
    return names


def _parameters(arch: Architecture, config: dict[str, Any]) -> list[str]:
    """Names of all parameters that the Hugging Face class has under this configuration."""
    biased = set(arch.biased)
    if config.get("attention_bias"):
        biased.update(_ATTENTION)
    if config.get("mlp_bias"):
        biased.update(_MLP)
    layer = [f"{module}.weight" for module in arch.modules]
    layer += [f"{module}.bias" for module in arch.modules if module in biased]
    parameters = ["model.embed_tokens.weight"]
    parameters += [f"model.layers.{i}.{name}" for i in range(config["num_hidden_layers"]) for name in layer]
    parameters.append("model.norm.weight")
    return parameters if config["tie_word_embeddings"] else [*parameters, "lm_head.weight"]


def permuted_heads(arch: Architecture, config: dict[str, Any], hf_name: str) -> int | None:
    """Number of heads whose rows are interleaved in this tensor, or None if its rows are in order."""
    if not arch.permuted:
        return None
    if ".q_proj." in hf_name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if ".k_proj." in hf_name else None


def undo_permutation(rows: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Put the interleaved rows of each head back in order. Works on quantised rows as on plain ones, and on biases."""
    by_pair = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])  # [heads, dim / 2, 2, …]
    return np.ascontiguousarray(by_pair.swapaxes(1, 2)).reshape(rows.shape)
