"""What adapter_config.json says: which modules, which ranks, which scales; and what cannot be honoured, by name."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import msgspec

from enginectl.errors import RequestError

READ = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
    }
)

IGNORED = frozenset(
    {
        "arrow_config",
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "fan_in_fan_out",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
"""Fields that say how it was made or trained, and nothing about what it computes. `init_lora_weights` is looked at."""

REFUSED = {
    "use_dora": "DoRA scales the base's weights too, which rows of different adapters cannot share",
    "modules_to_save": "whole modules of its own (such as embeddings or the head) cannot differ between rows of a batch",
    "trainable_token_indices": "embeddings of its own cannot differ between rows of a batch",
    "lora_bias": "biases are not served; train with lora_bias=false",
    "target_parameters": "adapters on parameters (such as fused experts) are not served, only on linear modules",
    "layer_replication": "it changes the layers of the base",
    "use_qalora": "QALoRA groups the inputs; only plain LoRA is served",
    "alora_invocation_tokens": "activated LoRA, which starts in the middle of a prompt, is not served",
    "megatron_config": "Megatron's parallel layers are not served",
}

_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Initialisations that subtract something from the base's weights."""


class LoraSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A checked configuration."""

    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    target_modules: list[str] | str
    exclude_modules: list[str] | str
    layers_to_transform: list[int] | None
    layers_pattern: list[str]

    def rank(self, module: str) -> int:
        """What the configuration says of one module."""
        return self.rank_pattern.get(_key(self.rank_pattern, module), self.r)

    def scale(self, module: str) -> float:
        """What B @ A is multiplied by."""
        rank = self.rank(module)
        alpha = self.alpha_pattern.get(_key(self.alpha_pattern, module), self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, module: str) -> bool:
        """Whether the configuration names this module."""
        if _named(self.exclude_modules, module):
            return False
        if isinstance(self.target_modules, str):
            return self.target_modules == "all-linear" or re.fullmatch(self.target_modules, module) is not None
        if module in self.target_modules:
            return True
        return _named(self.target_modules, module) and self._in_layers(module)

    def _in_layers(self, module: str) -> bool:
        if self.layers_to_transform is None:
            return True
        patterns = [rf"(?:^|.*?\.){p}\.(\d+)\." for p in self.layers_pattern] or [r".*?\.[^.]*\.(\d+)\."]
        match = next((found for p in patterns if (found := re.match(p, module))), None)
        return match is not None and int(match[1]) in self.layers_to_transform


def _key(patterns: dict[str, Any], module: str) -> str:
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), module)


def _named(names: list[str] | str, module: str) -> bool:
    if isinstance(names, str):
        return bool(names) and re.fullmatch(names, module) is not None
    return module in names or any(module.endswith(f".{name}") for name in names)


def parse_config(data: bytes) -> LoraSpec:
    """The configuration. Raises RequestError with the field and the reason."""
    try:
        fields = json.loads(data)
    except ValueError as error:
        raise RequestError(f"adapter_config.json is damaged: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError("adapter_config.json is damaged: it is no JSON object")
    _refuse(fields)
    values = {name: fields[name] for name in READ - {"peft_type"} if fields.get(name) is not None}
    for name in ("layers_to_transform", "layers_pattern"):
        if name in values and not isinstance(values[name], list):
            values[name] = [values[name]]
    defaults: dict[str, Any] = {
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "exclude_modules": [],
        "layers_to_transform": None,
        "layers_pattern": [],
    }
    try:
        spec = msgspec.convert(defaults | values, LoraSpec)
        for pattern in (*spec.rank_pattern, *spec.alpha_pattern, *spec.layers_pattern):
            re.compile(pattern)
        for names in (spec.target_modules, spec.exclude_modules):
            if isinstance(names, str):
                re.compile(names)
    except msgspec.ValidationError as error:
        raise RequestError(f"adapter_config.json: {error}") from error
    except re.error as error:
        raise RequestError(f"adapter_config.json: {error.pattern!r} is no regular expression: {error}") from error
    if min(spec.r, *spec.rank_pattern.values(), spec.r) < 1:
        raise RequestError(f"adapter_config.json: ranks must be 1 or more, found r={spec.r} and {spec.rank_pattern}")
    return spec


def _refuse(fields: dict[str, Any]) -> None:
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise RequestError(f"adapter_config.json: peft_type is {kind!r}; only LORA is served")
    for name, why in REFUSED.items():
        if fields.get(name):
            raise RequestError(f"adapter_config.json: {name} is set: {why}")
    if fields.get("bias", "none") != "none":
        raise RequestError(f"adapter_config.json: bias is {fields['bias']!r}: biases are not served; train with 'none'")
    start = fields.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise RequestError(
            f"adapter_config.json: init_lora_weights is {start!r}, which changes the base's weights; save it converted "
            "to plain LoRA (path_initial_model_for_weight_conversion)"
        )
    known = {*READ, *IGNORED, *REFUSED, "bias", "init_lora_weights"}
    if strange := sorted(name for name, value in fields.items() if name not in known and value):
        raise RequestError(f"adapter_config.json: {strange[0]} is set, and its meaning is not known here")
