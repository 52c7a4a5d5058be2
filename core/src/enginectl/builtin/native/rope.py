"""Rotary position embeddings: frequencies by the configuration's rule, and the table a step reads."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import torch
from torch import Tensor

from enginectl.errors import ModelError

_ALWAYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
    "longrope": frozenset(
        {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"}
    ),
}
"""Kind to the parameters it reads."""


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One RoPE. rotary_dim: elements of a head it turns. original: the length it was trained for, in tokens.

    limit: tokens up to which these frequencies are the right ones, None without one. short: longrope's divisors.
    """

    kind: str
    theta: float
    rotary_dim: int
    factor: float = 1.0
    original: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short: tuple[float, ...] = ()
    limit: int | None = None


def rope_spec(values: dict[str, Any], *, rotary_dim: int, longest: int) -> RopeSpec:
    """Read one RoPE's parameters. Raises ModelError for a kind or a parameter that is not known.

    longest: max_position_embeddings, in tokens.
    """
    kind = str(values.get("rope_type") or values.get("type") or "default")
    if kind not in _KEYS:
        raise ModelError(f"RoPE of kind {kind!r} is not native; native are {', '.join(_KEYS)}")
    unknown = {key for key, value in values.items() if value is not None} - _KEYS[kind] - _ALWAYS
    if unknown:
        raise ModelError(f"RoPE of kind {kind!r} with {', '.join(sorted(unknown))} is not native")
    if rotary_dim < 2 or rotary_dim % 2:
        raise ModelError(f"RoPE over {rotary_dim} elements of a head")
    known = {key: value for key, value in values.items() if value is not None}
    theta = float(known["rope_theta"])
    original = int(known.get("original_max_position_embeddings", longest))
    if kind == "default":
        return RopeSpec(kind=kind, theta=theta, rotary_dim=rotary_dim)
    factor = float(known["factor"]) if "factor" in known else _implied_factor(kind, longest, original)
    spec = RopeSpec(kind=kind, theta=theta, rotary_dim=rotary_dim, factor=factor, original=original)
    if kind == "llama3":
        if "low_freq_factor" not in known or "high_freq_factor" not in known:
            raise ModelError("RoPE of kind 'llama3' needs low_freq_factor and high_freq_factor")
        low, high = float(known["low_freq_factor"]), float(known["high_freq_factor"])
        return msgspec.structs.replace(spec, low_freq_factor=low, high_freq_factor=high)
    if kind == "yarn":
        return msgspec.structs.replace(
            spec,
            beta_fast=float(known.get("beta_fast") or 32.0),
            beta_slow=float(known.get("beta_slow") or 1.0),
            truncate=bool(known.get("truncate", True)),
            attention_factor=_yarn_attention_factor(known, factor),
        )
    return _longrope(spec, known) if kind == "longrope" else spec


def _implied_factor(kind: str, longest: int, original: int) -> float:
    if kind in ("yarn", "longrope"):
        return longest / original
    raise ModelError(f"RoPE of kind {kind!r} needs a factor")


def _yarn_attention_factor(known: dict[str, Any], factor: float) -> float:
    """The temperature of the softmax, folded into cos and sin. Source: Peng et al. 2023, section 3.4."""
    if "attention_factor" in known:
        return float(known["attention_factor"])

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if known.get("mscale") and known.get("mscale_all_dim"):
        return scale(float(known["mscale"])) / scale(float(known["mscale_all_dim"]))
    return scale(1.0)


def _longrope(spec: RopeSpec, known: dict[str, Any]) -> RopeSpec:
    """Sequences up to the original length take the short divisors; longer ones would take others, so that is the end."""
    short = tuple(float(value) for value in known.get("short_factor", ()))
    if len(short) != spec.rotary_dim // 2:
        raise ModelError(f"short_factor has {len(short)} values, RoPE turns {spec.rotary_dim // 2} pairs")
    if "attention_factor" in known:
        scale = float(known["attention_factor"])
    else:
        scale = 1.0 if spec.factor <= 1 else math.sqrt(1 + math.log(spec.factor) / math.log(spec.original))
    return msgspec.structs.replace(spec, short=short, attention_factor=scale, limit=spec.original)


def frequencies(spec: RopeSpec) -> Tensor:
    """Radians a position for each pair, fp32 [rotary_dim / 2]."""
    power = torch.arange(0, spec.rotary_dim, 2).float() / spec.rotary_dim
    base = spec.theta**power
    if spec.kind == "linear":
        return 1.0 / base / spec.factor
    if spec.kind == "llama3":
        return _llama3(spec, 1.0 / base)
    if spec.kind == "yarn":
        return _yarn(spec, base)
    if spec.kind == "longrope":
        return 1.0 / (torch.tensor(spec.short) * base)
    return 1.0 / base


def _llama3(spec: RopeSpec, inverse: Tensor) -> Tensor:
    """Long wavelengths are stretched, short ones kept, those between blended."""
    turns = spec.original * inverse / (2 * math.pi)  # turns of each pair over the original length
    blend = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * inverse / spec.factor + blend * inverse


def _yarn(spec: RopeSpec, base: Tensor) -> Tensor:
    """Pairs that turn often are kept, those that turn little are interpolated, a ramp between. Source: as above."""

    def pair_with(num_turns: float) -> float:
        longest = spec.original / (num_turns * 2 * math.pi)
        return spec.rotary_dim * math.log(longest) / (2 * math.log(spec.theta))

    low, high = pair_with(spec.beta_fast), pair_with(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    width = high - low if high != low else 0.001
    interpolated = ((torch.arange(spec.rotary_dim // 2).float() - low) / width).clamp(0.0, 1.0)
    return interpolated / (spec.factor * base) + (1 - interpolated) / base


class RopeTable:
    """cos and sin of every position, computed once: the same bits whatever shares the step."""

    def __init__(self, spec: RopeSpec, num_positions: int, device: str) -> None:
        angles = torch.arange(num_positions).float().unsqueeze(1) * frequencies(spec)
        both = torch.cat((angles.cos(), angles.sin()), dim=1) * spec.attention_factor
        self._table = both.to(device)  # [num_positions, rotary_dim]: cos, then sin, of the pairs
        self._half = spec.rotary_dim // 2

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin fp32 [num_tokens, rotary_dim]. Called: once per step."""
        both = self._table.index_select(0, positions)
        return both[:, : self._half].repeat(1, 2), both[:, self._half :].repeat(1, 2)
