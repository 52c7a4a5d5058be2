"""KV memory arithmetic: from a Hugging Face configuration to bytes a token, blocks and sequences that fit.

What is counted is what the engine stores: every layer keeps keys and values of every token of a running sequence,
sliding-window layers too, and latent-attention models keep their expanded keys and values. Recurrent models keep a state
for each row beside that; what it takes is seen by probing the model, as the engine does, for which torch is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from enginectl.errors import ConfigError, ModelError, unknown
from enginectl.interfaces.weights import Checkpoint
from enginectl.units import format_size, plural

if TYPE_CHECKING:
    from torch import Tensor

    from enginectl.interfaces.model import ModelSpec

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
_LONGEST = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx", "seq_length")
_STATE = ("mamba_", "ssm_", "linear_", "conv_L", "state_size", "layers_block_type", "hybrid_", "attn_layer_")
"""How fields begin that only models with a recurrent state have."""


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

    state_bytes_per_row, max_num_seqs: recurrent state, for so many rows; it is in memory_bytes, and blocks get the rest.
    Without a state max_num_seqs is None. notes: what the reader should know about these numbers.
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
    state_bytes_per_row: int = 0
    max_num_seqs: int | None = None
    notes: tuple[str, ...] = ()


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


class _ConfigOnly(Checkpoint):
    """A checkpoint whose weights nobody reads."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.path = Path("config.json")
        self.config = dict(config)

    @property
    def dtype(self) -> str:
        return kv_dtype(self.config)

    @property
    def num_bytes(self) -> int:
        return 0

    @property
    def generation_config(self) -> dict[str, Any]:
        return {}

    def tokenizer_dir(self) -> Path | None:
        return None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())


def carries_state(config: Mapping[str, Any]) -> bool:
    """Whether fields of the configuration are those of a model with a recurrent state."""
    config = _text(config)
    kinds = config.get("layer_types") or ()
    return any(name.startswith(_STATE) for name in config) or not _NO_KV.isdisjoint(map(str, kinds))


def probed(config: Mapping[str, Any], seq_len: int = 2048) -> ModelSpec:
    """What the engine would find in a model of this configuration. Imports torch. Raises ModelError."""
    from enginectl.builtin.transformers_family.family import TransformersFamily
    from enginectl.config import EngineConfig
    from enginectl.context import BuildContext
    from enginectl.machine import detect_machine

    dtype = kv_dtype(config)
    longest = longest_context(config)
    engine = EngineConfig(model="", dtype=dtype, max_model_len=seq_len if longest is None else None)
    ctx = BuildContext(engine, detect_machine(), dtype=dtype)
    return TransformersFamily().spec(_ConfigOnly(config), ctx)


def capacity(
    config: Mapping[str, Any],
    memory_bytes: int,
    seq_len: int = 2048,
    dtype: str = "auto",
    block_size: int = 16,
    *,
    spec: ModelSpec | None = None,
    max_num_seqs: int = 256,
) -> Capacity:
    """How many blocks, tokens and sequences of seq_len tokens fit in memory_bytes of KV (weights not included).

    spec: of a model that carries a state, as `probed` finds it; max_num_seqs: rows that the engine keeps one for.
    """
    for name, value in (("seq_len", seq_len), ("block_size", block_size), ("max_num_seqs", max_num_seqs)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    if memory_bytes < 0:
        raise ConfigError(f"memory_bytes is {memory_bytes}; it cannot be negative")
    layers = kv_layers(config) if spec is None else tuple(_stored(layer) for layer in spec.layers)
    state = 0 if spec is None else spec.state_bytes_per_row
    if not layers and not state:
        raise ModelError("the model has no attention layers, so it keeps no KV and any number of tokens fits")
    dtype = kv_dtype(config) if dtype == "auto" else dtype
    per_token = bytes_per_token(layers, dtype)
    for_blocks = memory_bytes - state * max_num_seqs if state else memory_bytes
    blocks_each = -(-seq_len // block_size)
    num_blocks = max(0, for_blocks) // (per_token * block_size) if per_token else 0
    num_sequences = num_blocks // blocks_each if per_token else max_num_seqs
    if state:
        num_sequences = min(num_sequences, max_num_seqs) if for_blocks >= 0 else 0
    found = Capacity(
        memory_bytes=memory_bytes,
        dtype=dtype,
        block_size=block_size,
        bytes_per_token=per_token,
        bytes_per_block=per_token * block_size,
        num_blocks=num_blocks,
        num_tokens=num_blocks * block_size,
        seq_len=seq_len,
        num_sequences=num_sequences,
        state_bytes_per_row=state,
        max_num_seqs=max_num_seqs if state else None,
    )
    return msgspec.structs.replace(found, notes=_notes(found, longest_context(config)))


def longest_context(config: Mapping[str, Any]) -> int | None:
    """The most tokens of a sequence that the model was made for, or None if its configuration does not say."""
    return _find(_text(config), _LONGEST)


def _notes(found: Capacity, longest: int | None) -> tuple[str, ...]:
    notes = []
    if longest is not None and found.seq_len > longest:
        notes.append(
            f"--seq-len {found.seq_len} is longer than any sequence of this model: its configuration allows "
            f"{longest} tokens, so give --seq-len {longest} or less."
        )
    state = found.state_bytes_per_row
    if state and found.max_num_seqs is not None and state * found.max_num_seqs > found.memory_bytes:
        notes.append(
            f"{format_size(found.memory_bytes)} do not hold the recurrent state of --max-num-seqs {found.max_num_seqs} "
            f"rows ({format_size(state)} each); they hold that of {found.memory_bytes // state}. Lower it, or give more "
            "--memory."
        )
    elif not found.num_sequences:
        notes.append(
            f"Not one sequence of {found.seq_len} tokens fits, only {found.num_tokens} {plural(found.num_tokens, 'token')}; give a smaller "
            "--seq-len or more --memory."
        )
    return tuple(notes)


def _stored(layer: Any) -> KVLayer:
    return KVLayer(layer.num_kv_heads, layer.head_dim, layer.v_head_dim, layer.window)


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
