"""Capabilities are intersected before a weight is loaded; an impossible combination names both parts."""

from __future__ import annotations

from collections.abc import Mapping, Set

from enginectl.context import BuildContext
from enginectl.errors import UnsupportedError
from enginectl.interfaces.model import ModelSpec
from enginectl.plugins import Entry
from enginectl.provider import Capabilities, Role


def check_capabilities(chosen: Mapping[Role, Entry], spec: ModelSpec, ctx: BuildContext) -> None:
    """Raise UnsupportedError for the first pair of parts that cannot work together."""
    for role, entry in chosen.items():
        part = f"{role.value} {entry.provider.name!r}"
        caps = entry.provider.capabilities
        _member(part, "device", ctx.device.split(":")[0], caps.devices)
        if role in (Role.ATTENTION, Role.MODEL_FAMILY, Role.OP_SET):
            _member(part, "dtype", ctx.dtype, caps.dtypes)
    attention = chosen.get(Role.ATTENTION)
    if attention is None:
        return
    part, caps = f"attention {attention.provider.name!r}", attention.provider.capabilities
    _check_layers(part, caps, spec)
    _member(part, "block size", ctx.engine.block_size, caps.block_sizes)
    if Role.SPECULATOR in chosen and caps.queries_per_seq == 1:
        speculator = chosen[Role.SPECULATOR].provider.name
        raise UnsupportedError(f"{part} takes one query a sequence, which speculator {speculator!r} cannot use")


def check_state(spec: ModelSpec, served: Set[Role]) -> None:
    """Raise UnsupportedError for a part that needs to share or to roll back what a recurrent model cannot."""
    if not spec.state_bytes_per_row:
        return
    model = f"model {spec.architecture} carries a recurrent state from token to token"
    if Role.PREFIX_INDEX in served:
        raise UnsupportedError(f"{model}, which no cached block holds; serve it with --no-enable-prefix-caching")
    if Role.SPECULATOR in served:
        raise UnsupportedError(f"{model}, which cannot be rolled back to before a rejected draft; serve without one")


def _check_layers(part: str, caps: Capabilities, spec: ModelSpec) -> None:
    model = f"model {spec.architecture}"
    for head_dim in sorted({dim for layer in spec.layers for dim in (layer.head_dim, layer.v_head_dim)}):
        _member(f"{part} with {model}", "head size", head_dim, caps.head_dims)
    wants = {
        "a sliding window": (any(layer.window for layer in spec.layers), caps.sliding_window),
        "attention in chunks": (any(layer.chunk for layer in spec.layers), caps.sliding_window),
        "a soft cap": (any(layer.soft_cap for layer in spec.layers), caps.soft_cap),
        "attention sinks": (any(layer.sinks for layer in spec.layers), caps.sinks),
    }
    for feature, (needed, offered) in wants.items():
        if needed and not offered:
            raise UnsupportedError(f"{model} needs {feature}, which {part} does not offer; choose another --attention")


def _member(part: str, what: str, value: object, allowed: frozenset[str] | frozenset[int] | None) -> None:
    if allowed is not None and value not in allowed:
        raise UnsupportedError(f"{part} does not support {what} {value}; it supports {sorted(allowed)}")
