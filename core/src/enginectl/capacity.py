"""KV memory arithmetic: from a Hugging Face configuration to bytes a token, blocks and sequences that fit.

Imports no torch. What is counted is what the engine stores: every layer keeps keys and values of every token of a
running sequence, sliding-window layers too, and latent-attention models keep their expanded keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from enginectl.errors import ConfigError, ModelError, unknown

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}
"""Bytes a stored KV value takes, by dtype name."""

_LAYER_COUNT = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_QUERY_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "hidden_dim", "model_dim")
_HEAD_DIM = ("head_dim", "kv_channels", "d_head")
_NO_KV = frozenset({"linear_attention", "mamba", "mamba2", "conv", "recurrent", "moe", "mlp"})
"""Kinds of layer without attention, as `layer_types` spells them."""


class KVLayer(msgspec.Struct, frozen=True):
    """What one layer stores for a token. window: tokens it looks back, None for all."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None

    def bytes_per_token(self, dtype: str) -> int:
        """Bytes of one token's key and value."""
        return self.num_kv_heads * (self.head_dim + self.v_head_dim) * dtype_bytes(dtype)


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What fits in `memory_bytes` of KV. num_tokens = num_blocks * block_size. num_sequences: of seq_len tokens each,
    whole blocks counted. The engine adds one more block, the null block, that holds no tokens.
    """

    memory_bytes: int
    dtype: str
    block_size: int
    bytes_per_token: int
    bytes_per_block: int
    num_blocks: int
    num_tokens: int
    seq_len: int
    num_sequences: int


def dtype_bytes(dtype: str) -> int:
    """Bytes one value of a KV dtype takes. Raises ConfigError for an unknown one."""
    if dtype not in DTYPE_BYTES:
        raise ConfigError(unknown("KV dtype", dtype, DTYPE_BYTES))
    return DTYPE_BYTES[dtype]


def kv_dtype(config: Mapping[str, Any]) -> str:
    """The dtype KV takes when none is asked for: the checkpoint's, or bfloat16 where it says nothing usable."""
    name = str(config.get("dtype") or config.get("torch_dtype") or _text(config).get("dtype") or "")
    name = name.removeprefix("torch.")
    return name if name in ("float32", "float16", "bfloat16") else "bfloat16"


def kv_layers(config: Mapping[str, Any]) -> tuple[KVLayer, ...]:
    """The layers that store keys and values, in order. Raises ModelError naming the key that is missing or wrong."""
    config = _text(config)
    num_layers = _count(config, _LAYER_COUNT)
    kinds = _kinds(config, num_layers)
    num_stored = num_layers - int(config.get("num_kv_shared_layers") or 0)
    return tuple(_layer(config, kind) for kind in kinds[:num_stored] if kind not in _NO_KV)


def bytes_per_token(layers: tuple[KVLayer, ...], dtype: str) -> int:
    """Bytes that one token's keys and values take over all layers."""
    return sum(layer.bytes_per_token(dtype) for layer in layers)


def capacity(
    config: Mapping[str, Any], memory_bytes: int, seq_len: int = 2048, dtype: str = "auto", block_size: int = 16
) -> Capacity:
    """How many blocks, tokens and sequences of seq_len tokens fit in memory_bytes of KV (weights not included)."""
    for name, value in (("seq_len", seq_len), ("block_size", block_size)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1 token")
    if memory_bytes < 0:
        raise ConfigError(f"memory_bytes is {memory_bytes}; it cannot be negative")
    layers = kv_layers(config)
    if not layers:
        raise ModelError("the model has no attention layers, so it keeps no KV and any number of tokens fits")
    dtype = kv_dtype(config) if dtype == "auto" else dtype
    per_token = bytes_per_token(layers, dtype)
    num_blocks = memory_bytes // (per_token * block_size)
    return Capacity(
        memory_bytes=memory_bytes,
        dtype=dtype,
        block_size=block_size,
        bytes_per_token=per_token,
        bytes_per_block=per_token * block_size,
        num_blocks=num_blocks,
        num_tokens=num_blocks * block_size,
        seq_len=seq_len,
        num_sequences=num_blocks // -(-seq_len // block_size),
    )


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a multimodal configuration."""
    for key in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(key), Mapping):
            nested: Mapping[str, Any] = config[key]
            return nested
    return config


def _kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    kinds = config.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list | tuple) or len(kinds) != num_layers:
            raise ModelError(f"config: layer_types must list {num_layers} layers; found {kinds!r}")
        return [str(kind) for kind in kinds]
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        return ["sliding_attention"] * num_layers
    return ["full_attention"] * num_layers


def _layer(config: Mapping[str, Any], kind: str) -> KVLayer:
    window = config.get("sliding_window") if kind == "sliding_attention" else None
    num_heads = _count(config, _QUERY_HEADS)
    if _find(config, ("qk_rope_head_dim",)) and _find(config, ("qk_nope_head_dim", "v_head_dim")):
        head_dim = int(config["qk_nope_head_dim"]) + int(config["qk_rope_head_dim"])
        return KVLayer(num_heads, head_dim, int(config["v_head_dim"]), window)
    num_kv_heads = _num_kv_heads(config, num_heads)
    head_dim = _head_dim(config, num_heads)
    if kind == "full_attention" and config.get("global_head_dim"):
        head_dim = int(config["global_head_dim"])
        if config.get("attention_k_eq_v"):
            num_kv_heads = int(config.get("num_global_key_value_heads") or num_kv_heads)
    return KVLayer(num_kv_heads, head_dim, int(config.get("v_head_dim") or head_dim), window)


def _num_kv_heads(config: Mapping[str, Any], num_heads: int) -> int:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    nested = config.get("attn_config")
    for source in (config, nested if isinstance(nested, Mapping) else {}):
        found = _find(source, _KV_HEADS)
        if found is not None:
            return found
    return num_heads


def _head_dim(config: Mapping[str, Any], num_heads: int) -> int:
    found = _find(config, _HEAD_DIM)
    if found is not None:
        return found
    hidden = _count(config, _HIDDEN)
    if hidden % num_heads:
        raise ModelError(f"config: no head_dim, and {hidden} hidden values do not divide over {num_heads} heads")
    return hidden // num_heads


def _count(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    found = _find(config, names)
    if found is None:
        raise ModelError(f"config: has none of {', '.join(names)}; is this a decoder's config.json?")
    return found


def _find(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"config: {name} is {value!r}; expected a positive integer")
        return value
    return None
