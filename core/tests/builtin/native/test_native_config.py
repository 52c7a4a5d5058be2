"""What the configuration becomes, and what is refused because it is not known to be exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from enginectl.builtin.native.architectures import ARCHITECTURES, COMMON_KEYS, HARMLESS_KEYS
from enginectl.builtin.native.config import structure_of
from enginectl.builtin.native.family import NativeFamily
from enginectl.errors import ModelError

Checkpoints = Callable[..., Any]
Contexts = Callable[..., Any]
ABSENT = "absent"


def test_specification_is_that_of_the_transformers_family(
    case: str, checkpoint: Checkpoints, context: Contexts
) -> None:
    """Law 5: shapes, scales, windows, soft caps, sizes and longest context, by two independent ways."""
    from enginectl.builtin.transformers_family.family import TransformersFamily

    opened, ctx = checkpoint(case), context()
    assert NativeFamily().spec(opened, ctx) == TransformersFamily().spec(opened, ctx)


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_every_field_of_the_library_s_configuration_is_known(model_type: str) -> None:
    """A field that a new version of transformers adds must be looked at before models that set it run natively."""
    import dataclasses

    from transformers import CONFIG_MAPPING, PreTrainedConfig

    known = COMMON_KEYS | HARMLESS_KEYS | ARCHITECTURES[model_type].keys
    cls = CONFIG_MAPPING[model_type]
    fields = {field.name for field in dataclasses.fields(cls)} - {f.name for f in dataclasses.fields(PreTrainedConfig)}
    assert {name for name in fields if not name.startswith("_")} <= known


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_defaults_are_the_library_s(model_type: str) -> None:
    """A field that is left out means what it means there."""
    from transformers import CONFIG_MAPPING

    default, arch = CONFIG_MAPPING[model_type](), ARCHITECTURES[model_type]
    for key, value in arch.defaults.items():
        if key in ("num_key_value_heads", "sliding_window_pattern"):
            continue
        expected = getattr(default, key)
        if key == "sliding_window" and not arch.defaults.get("use_sliding_window", True):
            continue  # the library clears it when the switch is off
        assert value == expected, key
    rope = default.rope_parameters
    bases = [rope.get(kind, rope)["rope_theta"] for kind in ("full_attention", "sliding_attention")]
    assert bases == [arch.theta, arch.local_theta or arch.theta]
    assert default.tie_word_embeddings == arch.defaults.get("tie_word_embeddings", False)


@pytest.mark.parametrize(
    ("case", "old"),
    [
        ("llama", {"rope_theta": 10000.0}),
        ("llama_linear", {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 3.0}}),
        (
            "llama_llama3",
            {
                "rope_theta": 10000.0,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            },
        ),
        (
            "gemma3_linear",
            {
                "rope_theta": 1e6,
                "rope_local_base_freq": 10000.0,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "layer_types": ABSENT,
                "sliding_window_pattern": 2,
            },
        ),
        ("qwen2_window", {"layer_types": ABSENT, "rope_theta": 10000.0}),
        ("smollm3", {"layer_types": ABSENT, "rope_theta": 2e6, "rope_scaling": None}),
    ],
)
def test_old_and_new_configurations_mean_the_same(case: str, old: dict[str, Any], checkpoint: Checkpoints) -> None:
    """transformers 4 wrote rope_theta and rope_scaling, and no layer_types."""
    new = structure_of(checkpoint(case).config)
    assert structure_of(checkpoint(case, rope_parameters=ABSENT, **old).config) == new


@pytest.mark.parametrize(
    ("case", "changes", "reason"),
    [
        ("llama", {"model_type": "lama"}, "did you mean 'llama'"),
        ("llama", {"model_type": "gpt2"}, "is not native"),
        ("llama", {"clip_qkv": 8.0}, "sets 'clip_qkv'"),
        ("llama", {"sliding_window": 8}, "sets 'sliding_window'"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "sets 'quantization_config'"),
        ("llama", {"hidden_act": "relu"}, "hidden_act 'relu'"),
        ("llama", {"hidden_size": ABSENT}, "hidden_size is missing"),
        ("llama", {"rms_norm_eps": ABSENT}, "rms_norm_eps is missing"),
        ("llama", {"num_key_value_heads": 4}, "cannot share"),
        ("llama", {"layer_types": ["sliding_attention"] * 3}, "no window is set"),
        ("llama", {"layer_types": ["full_attention"] * 2}, "must name 3 layers"),
        ("llama", {"partial_rotary_factor": 0.5}, "native for Phi-3 only"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "kind 'dynamic'"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "needs a factor"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "needs low_freq_factor"),
        ("llama", {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2]}}, "with mrope_section"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "they differ"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "where all have one"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "no window is set"),
        ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 8}}, "sets 'dual_chunk_attention_config'"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"use_bidirectional_attention": True}, "only causal"),
        ("gemma3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "must be given for"),
        ("gemma2", {"hidden_act": "relu"}, "sets 'hidden_act' beside"),
        ("phi3", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "'yarn' is not known for Phi-3"),
        ("phi3_longrope", {"num_attention_heads": 4}, "short_factor has 8 values"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers has 1"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "9 of 4 experts"),
    ],
)
def test_refused_with_the_reason(case: str, changes: dict[str, Any], reason: str, checkpoint: Checkpoints) -> None:
    """What would not be exact is left to another family."""
    if case == "phi3_longrope":
        changes = {**changes, "head_dim": 20, "num_key_value_heads": 1}
    found = NativeFamily().refuses(checkpoint(case, **changes))
    assert found is not None
    assert reason in found


def test_a_switch_that_is_off_is_no_reason(checkpoint: Checkpoints) -> None:
    """Null and false say that something unknown is not used."""
    assert (
        NativeFamily().refuses(checkpoint("llama", use_mrope=False, sliding_window=None, rope_interleaved=False))
        is None
    )


def test_longrope_ends_where_its_frequencies_change(checkpoint: Checkpoints, context: Contexts) -> None:
    """Longer sequences would take other divisors for all their tokens."""
    opened = checkpoint("phi3_longrope")
    assert NativeFamily().spec(opened, context()).max_model_len == 96
    with pytest.raises(ModelError, match=r"--max-model-len 96 or less"):
        NativeFamily().spec(opened, context(max_model_len=97))
