"""A Hugging Face configuration to the structure of a decoder, or the reason why it cannot be run exactly."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from enginectl.builtin.native.architectures import ARCHITECTURES, COMMON_KEYS, HARMLESS_KEYS, Architecture
from enginectl.builtin.native.rope import RopeSpec, rope_spec
from enginectl.errors import ModelError, nearest
from enginectl.interfaces.model import LayerSpec
from enginectl.interfaces.ops import BlockSpec

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_NULLABLE = frozenset({"sliding_window", "attn_logit_softcapping", "final_logit_softcapping"})
"""Fields where null means that there is none, whatever the default."""


class Structure(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a decoder but its weights.

    blocks, layers: one a layer. ropes: the distinct ones; rope_of: which of them each layer takes. max_model_len: the
    longest context, limited for the reason in `limit` if that is not empty. embedding_scale multiplies embeddings,
    logits_scale divides logits, which are then capped at soft_cap. qkv_bias …: which linears have biases.
    """

    model_type: str
    architecture: str
    vocab_size: int
    hidden_size: int
    max_model_len: int
    limit: str
    blocks: tuple[BlockSpec, ...]
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    rope_of: tuple[int, ...]
    tied: bool
    embedding_scale: float
    logits_scale: float
    soft_cap: float | None
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool


class Fields:
    """The configuration's values with the architecture's defaults, and errors that name the field."""

    def __init__(self, config: dict[str, Any], arch: Architecture) -> None:
        self._config = config
        self._defaults = arch.defaults

    def get(self, key: str, default: Any = None) -> Any:
        """The value, the architecture's default, or `default`."""
        value = self._config.get(key)
        if value is None and not (key in _NULLABLE and key in self._config):
            value = self._defaults.get(key)
        return default if value is None else value

    def flag(self, key: str) -> bool:
        """A switch; off when left out."""
        return bool(self.get(key, False))

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"{key} is {'missing' if value is None else repr(value)} in its config.json")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(f"{key} is {'missing' if value is None else repr(value)} in its config.json")
        return float(value)


def structure_of(config: dict[str, Any]) -> Structure:
    """Read the configuration. Raises ModelError for one that this family cannot run exactly."""
    model_type = config.get("model_type")
    arch = ARCHITECTURES.get(str(model_type))
    if arch is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(
            f"model type {model_type!r} is not native; native are {known}{nearest(str(model_type), ARCHITECTURES)}"
        )
    _check_keys(config, arch)
    fields = Fields(config, arch)
    num_layers = fields.size("num_hidden_layers")
    windows = _windows(arch, fields, num_layers)
    turned = _turned(fields, num_layers)
    blocks = tuple(_block(arch, fields, i, turned[i]) for i in range(num_layers))
    ropes, rope_of = _ropes(arch, fields, config, windows)
    longest = fields.size("max_position_embeddings")
    limits = [rope.limit for rope in ropes if rope.limit is not None]
    return Structure(
        model_type=str(model_type),
        architecture=str((config.get("architectures") or [model_type])[0]),
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("hidden_size"),
        max_model_len=min([longest, *limits]),
        limit="longrope takes other frequencies for longer sequences" if min([longest, *limits]) < longest else "",
        blocks=blocks,
        layers=tuple(_layer(fields, block, window) for block, window in zip(blocks, windows, strict=True)),
        ropes=ropes,
        rope_of=rope_of,
        tied=fields.flag("tie_word_embeddings"),
        embedding_scale=fields.size("hidden_size") ** 0.5
        if arch.scales_embedding
        else fields.number("embedding_multiplier", 1.0),
        logits_scale=fields.number("logits_scaling", 1.0),
        soft_cap=_optional(fields, "final_logit_softcapping"),
        qkv_bias=_switch(fields, arch.qkv_bias),
        output_bias=_switch(fields, arch.output_bias),
        mlp_bias=_switch(fields, arch.mlp_bias),
    )


def _check_keys(config: dict[str, Any], arch: Architecture) -> None:
    """Every field that is set must be known for this architecture: None and False mean that something is off."""
    known = COMMON_KEYS | HARMLESS_KEYS | arch.keys
    for key, value in config.items():
        if key not in known and not key.startswith("_") and value is not None and value is not False:
            raise ModelError(
                f"its config.json sets {key!r}, which is not known for model type {config['model_type']!r}"
            )
    if config.get("use_bidirectional_attention"):
        raise ModelError("its config.json sets 'use_bidirectional_attention', and only causal decoders are native")
    if config["model_type"] == "gemma3_text" and config.get("attn_logit_softcapping") is not None:
        raise ModelError("its config.json sets 'attn_logit_softcapping', which Gemma 3 does not have")
    for key in {"hidden_act", "hidden_activation"} - {arch.activation}:
        if config.get(key) not in (None, "gelu_pytorch_tanh"):
            raise ModelError(f"its config.json sets {key!r} beside {arch.activation!r}")


def _block(arch: Architecture, fields: Fields, layer: int, turned: bool) -> BlockSpec:
    hidden_size, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    head_dim = fields.size("head_dim", hidden_size // num_heads)
    num_kv_heads = fields.size("num_key_value_heads", num_heads if "num_key_value_heads" in arch.defaults else None)
    if num_heads % num_kv_heads:
        raise ModelError(f"{num_heads} query heads cannot share {num_kv_heads} key heads")
    activation = str(fields.get(arch.activation, ""))
    if activation == "gelu" and arch.scales_embedding and arch.activation == "hidden_act":
        activation = "gelu_pytorch_tanh"  # Gemma's first configurations meant this
    if activation not in _ACTIVATIONS:
        raise ModelError(f"{arch.activation} {activation!r} is not native; native are {', '.join(_ACTIVATIONS)}")
    num_experts = _num_experts(arch, fields, layer)
    return BlockSpec(
        hidden_size=hidden_size,
        intermediate_size=fields.size(arch.expert_size if num_experts else "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        eps=fields.number("rms_norm_eps"),
        norm=arch.norm,
        norm_order=arch.norm_order,
        activation=_ACTIVATIONS[activation],
        rotary_dim=_rotary_dim(fields, head_dim),
        no_rope=not turned,
        qk_norm=arch.qk_norm,
        residual_scale=fields.number("residual_multiplier", 1.0),
        num_experts=num_experts,
        top_k=fields.size("num_experts_per_tok") if num_experts else 0,
        norm_topk=fields.flag("norm_topk_prob") if "norm_topk_prob" in arch.keys else True,
        shared_size=fields.size("shared_expert_intermediate_size")
        if num_experts and "shared_expert_intermediate_size" in arch.keys
        else 0,
    )


def _num_experts(arch: Architecture, fields: Fields, layer: int) -> int:
    """Experts of this layer, 0 where its MLP is dense."""
    if arch.num_experts is None:
        return 0
    key = "num_local_experts" if fields.get(arch.num_experts) is None else arch.num_experts
    if layer in (fields.get("mlp_only_layers") or ()) or (layer + 1) % fields.size("decoder_sparse_step", 1):
        return 0
    num_experts, top_k = fields.size(key), fields.size("num_experts_per_tok")
    if top_k > num_experts:
        raise ModelError(f"num_experts_per_tok {top_k} of {num_experts} experts")
    return num_experts


def _layer(fields: Fields, block: BlockSpec, window: int | None) -> LayerSpec:
    if fields.get("query_pre_attn_scalar") is not None:
        scale = fields.number("query_pre_attn_scalar") ** -0.5
    else:
        scale = fields.number("attention_multiplier", block.head_dim**-0.5)
    return LayerSpec(
        num_heads=block.num_heads,
        num_kv_heads=block.num_kv_heads,
        head_dim=block.head_dim,
        v_head_dim=block.head_dim,
        scale=scale,
        window=window,
        soft_cap=_optional(fields, "attn_logit_softcapping"),
    )


def _turned(fields: Fields, num_layers: int) -> list[bool]:
    """Whether each layer applies RoPE."""
    listed = fields.get("no_rope_layers")
    if listed is None:
        every = fields.get("no_rope_layer_interval")
        return [every is None or (layer + 1) % int(every) != 0 for layer in range(num_layers)]
    if len(listed) != num_layers:
        raise ModelError(f"no_rope_layers has {len(listed)} entries for {num_layers} layers")
    return [bool(value) for value in listed]


def _windows(arch: Architecture, fields: Fields, num_layers: int) -> list[int | None]:
    """How far each layer looks back, None for all."""
    size = fields.get("sliding_window")
    if "use_sliding_window" in arch.keys and not fields.flag("use_sliding_window"):
        size = None
    listed = fields.get("layer_types")
    kinds = _layer_types(arch, fields, num_layers, size) if listed is None else list(listed)
    if len(kinds) != num_layers or not set(kinds) <= {_FULL, _SLIDING}:
        raise ModelError(f"layer_types must name {num_layers} layers as {_FULL!r} or {_SLIDING!r}")
    if _SLIDING in kinds and (size is None or arch.windows == "none"):
        raise ModelError("layer_types names windowed layers, and no window is set")
    if arch.windows == "all" and size is not None and _FULL in kinds:
        raise ModelError("layer_types names layers without a window, where all have one")
    return [int(size) if kind == _SLIDING else None for kind in kinds]


def _layer_types(arch: Architecture, fields: Fields, num_layers: int, size: Any) -> list[str]:
    """What the architecture does when `layer_types` is not given."""
    if size is None or arch.windows == "none":
        return [_FULL] * num_layers
    turned = _turned(fields, num_layers)
    first = fields.get("max_window_layers", 0)
    pattern = fields.get("sliding_window_pattern", 1)
    layers = range(num_layers)
    windowed = {
        "all": [True for _ in layers],
        "even": [layer % 2 == 0 for layer in layers],
        "late": [layer >= first for layer in layers],
        "early_even": [layer % 2 == 0 and layer < first for layer in layers],
        "unturned": [not turned[layer] for layer in layers],
        "pattern": [(layer + 1) % pattern != 0 for layer in layers],
    }[arch.windows]
    return [_SLIDING if is_windowed else _FULL for is_windowed in windowed]


def _rotary_dim(fields: Fields, head_dim: int) -> int:
    rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    return int(head_dim * float(rope.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0))


def _ropes(
    arch: Architecture, fields: Fields, config: dict[str, Any], windows: list[int | None]
) -> tuple[tuple[RopeSpec, ...], tuple[int, ...]]:
    """The distinct RoPEs, and which of them each layer takes."""
    scaling, given = fields.get("rope_scaling"), fields.get("rope_parameters")
    if scaling and given and scaling != given:
        raise ModelError("its config.json has both rope_scaling and rope_parameters, and they differ")
    values = {key: value for key, value in (scaling or given or {}).items() if value is not None}
    head_dim = fields.size("head_dim", fields.size("hidden_size") // fields.size("num_attention_heads"))
    if arch.local_theta is None:
        values.setdefault("rope_theta", fields.get("rope_theta", arch.theta))
        if config["model_type"] == "phi3":
            values = _phi3_rope(values, fields)
        elif _rotary_dim(fields, head_dim) != head_dim:
            raise ModelError("partial rotary embeddings are native for Phi-3 only")
        rope = rope_spec(values, rotary_dim=_rotary_dim(fields, head_dim), longest=_longest(fields))
        return (rope,), (0,) * len(windows)
    nested = values if given and not scaling else {_FULL: values}
    if not set(nested) <= {_FULL, _SLIDING}:
        raise ModelError(f"its rope_parameters must be given for {_FULL!r} and {_SLIDING!r}, found {sorted(nested)}")
    bases = {
        _FULL: fields.get("rope_theta", arch.theta),
        _SLIDING: fields.get("rope_local_base_freq", arch.local_theta),
    }
    ropes = tuple(
        rope_spec({"rope_theta": base, **(nested.get(kind) or {})}, rotary_dim=head_dim, longest=_longest(fields))
        for kind, base in bases.items()
    )
    return ropes, tuple(0 if window is None else 1 for window in windows)


def _phi3_rope(values: dict[str, Any], fields: Fields) -> dict[str, Any]:
    """Phi-3 keeps the original length beside its RoPE parameters, and called longrope otherwise once."""
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind not in ("default", "su", "longrope"):
        raise ModelError(f"RoPE {kind!r} is not known for Phi-3")
    kept = {key: value for key, value in values.items() if key not in ("type", "partial_rotary_factor")}
    if kind == "default":
        return {**kept, "rope_type": kind}
    original = fields.size("original_max_position_embeddings")
    return {**kept, "rope_type": "longrope", "original_max_position_embeddings": original}


def _longest(fields: Fields) -> int:
    return fields.size("max_position_embeddings")


def _optional(fields: Fields, key: str) -> float | None:
    return None if fields.get(key) is None else fields.number(key)


def _switch(fields: Fields, value: bool | str) -> bool:
    return fields.flag(value) if isinstance(value, str) else value
