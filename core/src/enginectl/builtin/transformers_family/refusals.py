"""Which configurations cannot run exactly through packed sequences, and why. Reads the configuration only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from enginectl.errors import nearest

_PRIVATE_STATE = "it keeps state of its own between forwards"

REFUSED: dict[str, str] = dict.fromkeys(
    ["deepseek_v32", "deepseek_v4", "glm_moe_dsa", "minimax", "recurrent_gemma", "rwkv", "xlnet", "xlstm"],
    _PRIVATE_STATE,
)
"""Model type to reason. What is not here is judged by the probe and the self-check when it is loaded."""

WHOLE_PROMPTS = frozenset({"falcon_mamba", "jamba", "mamba", "zamba"})
"""Model types whose module code starts a scan of several tokens without the state before them."""

_MODALITIES = ("vision_config", "audio_config", "image_config", "video_config", "speech_config")


def refusal(config: dict[str, Any]) -> str | None:
    """Why this configuration cannot be served by the family, or None."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        return "its config.json names no model_type"
    named = f"model type {model_type!r} ({', '.join(config.get('architectures') or ['no architecture named'])})"
    if "auto_map" in config and model_type not in CONFIG_MAPPING_NAMES:
        return f"{named} needs Python code from the checkpoint, which is not run"
    if model_type not in CONFIG_MAPPING_NAMES:
        return f"{named} is unknown to the installed transformers{nearest(model_type, CONFIG_MAPPING_NAMES)}"
    if config.get("is_encoder_decoder"):
        return f"{named} is an encoder-decoder; only decoders are served"
    if found := [key for key in _MODALITIES if config.get(key)]:
        return f"{named} is multimodal ({found[0]}); only text models are served"
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return f"{named} has no causal language model in transformers"
    if (reason := REFUSED.get(model_type)) is not None:
        return f"{named} cannot be served: {reason}"
    if method := (config.get("quantization_config") or {}).get("quant_method"):
        return f"{named} is quantised with {method!r}, which this family does not load"
    return None


@dataclass(frozen=True, slots=True)
class Limit:
    """Up to `exact` tokens a model computes each token by what is before it. Up to `frozen`, None for no further, it
    does so once its frequencies are frozen. reason: what it does otherwise.
    """

    exact: int
    frozen: int | None
    reason: str


def exact_limit(config: Any) -> Limit | None:
    """Where the module code starts to compute a token by what else is in the batch, or None if it never does.

    config: the configuration object of the text model.
    """
    longest = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    for section in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = section.get("rope_type", "default")
        reason = f"{kind} RoPE takes its frequencies from the longest sequence of a batch"
        if kind == "longrope":
            exact = int(section["original_max_position_embeddings"])
            return Limit(exact, int(longest or exact), reason)
        if "dynamic" in kind and longest is not None:
            return Limit(int(longest), int(longest * section.get("factor", 1.0)), reason)
    if kept := getattr(config, "keep_window_size", None):
        return Limit(int(kept), None, "beyond, what its dynamic mask keeps is not the same with and without a cache")
    if getattr(config, "attn_temperature_tuning", False) and (floor := getattr(config, "floor_scale", None)):
        return Limit(int(floor), None, "attention temperature tuning ignores the positions of packed sequences")
    return None
