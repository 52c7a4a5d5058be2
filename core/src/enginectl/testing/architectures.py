"""Every architecture that the transformers family is checked on: a tiny random model of each, and those it refuses.

The models can fail a test: embeddings untied, weights wide, windows of 8, soft caps that bite, several experts. `traits`
says what a model is there to exercise, and the check compares it with what the loaded model does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from enginectl.testing.tiny_models import BOS, EOS, PAD, VOCAB_SIZE, WINDOW

PACKED, STATES, ONE_BY_ONE = "packed", "state pool", "one sequence per forward"


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """A tiny random model that must come out exact.

    values: fields of its configuration, over those of COMMON that it knows. without: fields of COMMON it goes without.
    route: how the transformers family must serve it. traits: what its attention does, among those `traits_of` sees.
    native: the native family serves it too. whole_prompts: its prompts cannot be read in chunks.
    """

    model_type: str
    values: Mapping[str, Any] = {}
    without: frozenset[str] = frozenset()
    route: str = PACKED
    traits: frozenset[str] = frozenset()
    native: bool = False
    whole_prompts: bool = False


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration that must not load. reason: words of the error that say why."""

    model_type: str
    reason: str
    values: Mapping[str, Any] = {}


COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "init_std": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 4.0,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
"""What every model has of these fields that its configuration knows, unless it says otherwise."""

_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LONG_FACTORS: dict[str, Any] = {
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 64,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_LINEAR = ["linear_attention", "full_attention", "linear_attention"]
_CONV = ["conv", "full_attention", "conv"]
_DELTA_NET: dict[str, Any] = {
    "layer_types": _LINEAR,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def _packed(model_type: str, *traits: str, native: bool = False, without: str = "", **values: Any) -> Architecture:
    return Architecture(
        model_type=model_type,
        values=values,
        without=frozenset(without.split()),
        traits=frozenset(traits),
        native=native,
    )


def _states(model_type: str, *traits: str, whole_prompts: bool = False, **values: Any) -> Architecture:
    return Architecture(
        model_type=model_type, values=values, route=STATES, traits=frozenset(traits), whole_prompts=whole_prompts
    )


def _one_by_one(model_type: str, *traits: str, **values: Any) -> Architecture:
    return Architecture(model_type=model_type, values=values, route=ONE_BY_ONE, traits=frozenset(traits))


ARCHITECTURES: dict[str, Architecture] = {
    # -- dense
    "llama": _packed("llama", "GQA", native=True),
    "llama_bias": _packed("llama", "GQA", native=True, attention_bias=True, mlp_bias=True),
    "llama_tied": _packed("llama", "GQA", native=True, tie_word_embeddings=True),
    "llama_yarn": _packed("llama", "GQA", native=True, rope_parameters=_YARN),
    "mistral": _packed("mistral", "GQA", "window", native=True),
    "ministral": _packed("ministral", "GQA", "mixed", "window", layer_types=_MIXED),
    "ministral3": _packed("ministral3", "GQA", "window"),
    "qwen2": _packed("qwen2", "GQA", native=True, use_sliding_window=False),
    "qwen2_window": _packed(
        "qwen2", "GQA", "mixed", "window", native=True, use_sliding_window=True, max_window_layers=1
    ),
    "qwen3": _packed("qwen3", "GQA", native=True),
    "gemma": _packed("gemma", "GQA", native=True),
    "gemma2": _packed("gemma2", "GQA", "mixed", "soft cap", "window", native=True, query_pre_attn_scalar=16),
    "gemma3": _packed(
        "gemma3_text",
        "GQA",
        "mixed",
        "window",
        native=True,
        without="attn_logit_softcapping",
        layer_types=_MIXED,
        query_pre_attn_scalar=16,
    ),
    "phi": _packed("phi", "GQA"),
    "phi3": _packed("phi3", "GQA", "window", native=True),
    "phi3_longrope": _packed(
        "phi3",
        "GQA",
        "window",
        native=True,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **_LONG_FACTORS},
        original_max_position_embeddings=64,
    ),
    "olmo": _packed("olmo", "GQA", clip_qkv=1.0),
    "olmo2": _packed("olmo2", "GQA", native=True),
    "olmo3": _packed("olmo3", "GQA", "mixed", "window", layer_types=_MIXED),
    "granite": _packed("granite", "GQA", native=True, logits_scaling=2.0, attention_multiplier=0.3),
    "granite_swa": _packed("granite_swa", "GQA", "mixed", "sinks", "window"),
    "smollm3": _packed("smollm3", "GQA", native=True, no_rope_layers=[1, 0, 1]),
    "gpt2": _packed("gpt2"),
    "gpt_sw3": _packed("gpt-sw3"),
    "gpt_neox": _packed("gpt_neox"),
    "gptj": _packed("gptj", rotary_dim=4),
    "codegen": _packed("codegen", num_attention_heads=4, rotary_dim=4),
    "gpt_bigcode": _packed("gpt_bigcode", "GQA"),
    "opt": _packed("opt", ffn_dim=96, word_embed_proj_dim=48),
    "biogpt": _packed("biogpt"),
    "starcoder2": _packed("starcoder2", "GQA", "window"),
    "stablelm": _packed("stablelm", "GQA"),
    "persimmon": _packed("persimmon"),
    "cohere": _packed("cohere", "GQA"),
    "cohere2": _packed("cohere2", "GQA", "mixed", "window", layer_types=_MIXED),
    "glm": _packed("glm", "GQA"),
    "glm4": _packed("glm4", "GQA"),
    "nemotron": _packed("nemotron", "GQA"),
    "arcee": _packed("arcee", "GQA"),
    "seed_oss": _packed("seed_oss", "GQA"),
    "helium": _packed("helium", "GQA", head_dim=8),
    "apertus": _packed("apertus", "GQA"),
    "ernie4_5": _packed("ernie4_5", "GQA"),
    "exaone": _packed("exaone", "GQA"),
    "exaone4": _packed("exaone4", "GQA", "mixed", "window", layer_types=_MIXED),
    "hunyuan_dense": _packed("hunyuan_v1_dense", "GQA"),
    "internlm3": _packed("internlm3", "GQA"),
    "cwm": _packed("cwm", "GQA", "mixed", "window", layer_types=_MIXED),
    "bitnet": _packed("bitnet", "GQA"),
    "diffllama": _packed("diffllama", "GQA"),
    "vaultgemma": _packed("vaultgemma", "GQA", "mixed", "soft cap", "window"),
    "nanochat": _packed("nanochat", "GQA"),
    "hyperclovax": _packed("hyperclovax", "GQA"),
    "jais2": _packed("jais2", "GQA"),
    "iquestcoder": _packed("iquestcoder", "GQA"),
    "modernbert_decoder": _packed("modernbert-decoder", "mixed", "window", local_attention=2 * WINDOW),
    # -- mixtures of experts
    "mixtral": _packed("mixtral", "GQA", "window", native=True),
    "qwen2_moe": _packed(
        "qwen2_moe", "GQA", "mixed", "window", native=True, use_sliding_window=True, max_window_layers=3
    ),
    "qwen3_moe": _packed("qwen3_moe", "GQA", native=True, norm_topk_prob=True),
    "olmoe": _packed("olmoe", "GQA"),
    "flex_olmo": _packed("flex_olmo", "GQA"),
    "granitemoe": _packed("granitemoe", "GQA"),
    "granitemoe_swa": _packed("granitemoe_swa", "GQA", "mixed", "sinks", "window"),
    "granitemoe_shared": _packed("granitemoeshared", "GQA", shared_intermediate_size=32),
    "phimoe": _packed("phimoe", "GQA", "window"),
    "glm4_moe": _packed("glm4_moe", "GQA"),
    "dots1": _packed("dots1", "GQA", "mixed", "window", layer_types=_MIXED),
    "ernie4_5_moe": _packed("ernie4_5_moe", "GQA"),
    "hunyuan_moe": _packed("hunyuan_v1_moe", "GQA"),
    "llama4": _packed(
        "llama4_text",
        "chunks",
        "GQA",
        "mixed",
        intermediate_size_mlp=96,
        moe_layers=[1],
        attn_temperature_tuning=False,
        no_rope_layers=[1, 0, 1],
    ),
    "gpt_oss": _packed("gpt_oss", "GQA", "mixed", "sinks", "window"),
    "minimax_m2": _packed("minimax_m2", "GQA"),
    "aria_text": _packed("aria_text", "GQA"),
    "afmoe": _packed("afmoe", "GQA", "mixed", "window", layer_types=_MIXED),
    "solar_open": _packed("solar_open", "GQA"),
    "mimo_v2_flash": _packed(
        "mimo_v2_flash",
        "GQA",
        "mixed",
        "narrow values",
        "sinks",
        "window",
        layer_types=_MIXED,
        num_attention_heads=8,
        head_dim=24,
        v_head_dim=8,
    ),
    "minimax_m3": _packed("minimax_m3_vl_text", "GQA"),
    "exaone_moe": _packed("exaone_moe", "GQA", "mixed", "window", layer_types=_MIXED),
    "laguna": _packed("laguna", "GQA"),
    "mellum": _packed("mellum", "GQA", "mixed", "window", layer_types=_MIXED),
    "cohere2_moe": _packed("cohere2_moe", "GQA", "mixed", "window", layer_types=_MIXED),
    "sarvam_moe": _packed("sarvam_moe", "GQA"),
    "hy_v3": _packed("hy_v3", "GQA"),
    "jetmoe": _packed("jetmoe"),
    "dbrx": _packed(
        "dbrx",
        "GQA",
        without="hidden_size",  # not passed on to its experts
        d_model=48,
        n_heads=6,
        attn_config={"rope_theta": 10000.0, "clip_qkv": 4.0, "kv_n_heads": 2},
        ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    ),
    # -- latent attention
    "minicpm3": _packed("minicpm3", "narrow values", dim_model_base=24, **_LATENT),
    "deepseek_v2": _packed("deepseek_v2", "narrow values", topk_method="greedy", **_LATENT),
    "deepseek_v3": _packed("deepseek_v3", "narrow values", **_LATENT),
    "glm4_moe_lite": _packed("glm4_moe_lite", "narrow values", **_LATENT),
    "youtu": _packed("youtu", "narrow values", embedding_initializer_range=0.2, without="head_dim", **_LATENT),
    "sarvam_mla": _packed("sarvam_mla", "narrow values", **_LATENT),
    "longcat_flash": _packed("longcat_flash", "narrow values", num_layers=2, zero_expert_num=2, moe_topk=2, **_LATENT),
    # -- layers that share keys and values
    "gemma3n": _packed(
        "gemma3n_text",
        "GQA",
        "mixed",
        "window",
        num_hidden_layers=4,
        layer_types=[*_MIXED[:2], *_MIXED[:2]],
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size_per_layer_input=16,
        laurel_rank=8,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
    ),
    "gemma4": _packed(
        "gemma4_text",
        "GQA",
        "mixed",
        "window",
        num_hidden_layers=4,
        layer_types=[*_MIXED[:2], *_MIXED[:2]],
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size_per_layer_input=16,
    ),
    # -- a recurrent state
    "mamba": _states("mamba", "no attention", whole_prompts=True, state_size=8),
    "mamba2": _states("mamba2", "no attention", num_heads=6, head_dim=16, state_size=16, n_groups=2, chunk_size=8),
    "falcon_mamba": _states("falcon_mamba", "no attention", whole_prompts=True, state_size=8),
    "jamba": _states("jamba", "GQA", whole_prompts=True, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8),
    "bamba": _states("bamba", "GQA", attn_layer_indices=[1], **_MAMBA),
    "falcon_h1": _states("falcon_h1", "GQA", mamba_d_ssm=96, **_MAMBA),
    "granitemoe_hybrid": _states("granitemoehybrid", "GQA", layer_types=_LINEAR, shared_intermediate_size=32, **_MAMBA),
    "nemotron_h": _states(
        "nemotron_h",
        "GQA",
        layer_types=["linear_attention", "moe", "full_attention", "mlp"],
        num_hidden_layers=4,
        ssm_state_size=16,
        mamba_num_heads=6,
        mamba_head_dim=16,
        n_groups=2,
        chunk_size=8,
        moe_shared_expert_intermediate_size=32,
    ),
    "zamba": _states(
        "zamba",
        "GQA",
        whole_prompts=True,
        layers_block_type=["linear_attention", "hybrid", "linear_attention"],
        mamba_d_state=8,
    ),
    "zamba2": _states(
        "zamba2",
        "GQA",
        layers_block_type=["linear_attention", "hybrid", "linear_attention"],
        mamba_d_state=16,
        mamba_ngroups=2,
        n_mamba_heads=6,
        chunk_size=8,
    ),
    "lfm2": _states("lfm2", "GQA", layer_types=_CONV),
    "lfm2_moe": _states("lfm2_moe", "GQA", layer_types=_CONV, num_dense_layers=1),
    "lfm3": _states("lfm3", "GQA"),
    "qwen3_next": _states("qwen3_next", "GQA", **_DELTA_NET),
    "qwen3_5": _states("qwen3_5_text", "GQA", **_DELTA_NET),
    "qwen3_5_moe": _states("qwen3_5_moe_text", "GQA", **_DELTA_NET),
    "olmo_hybrid": _states("olmo_hybrid", "GQA", **_DELTA_NET),
    "lara_mini": _states("lara_mini", "GQA", "window", **{**_DELTA_NET, "layer_types": None}),
    "kimi_linear": _states(
        "kimi_linear", "narrow values", layer_types=_LINEAR, linear_head_dim=8, linear_num_heads=6, **_LATENT
    ),
    # -- attention code of their own
    "falcon": _one_by_one("falcon", "GQA"),
    "falcon_alibi": _one_by_one("falcon", alibi=True, num_kv_heads=2, new_decoder_architecture=True),
    "bloom": _one_by_one("bloom"),
    "mpt": _one_by_one("mpt"),
    "gpt_neo": _one_by_one("gpt_neo", attention_types=[[["local", "global", "local"], 1]], window_size=WINDOW),
    "xglm": _one_by_one("xglm", ffn_dim=96, pad_token_id=1),
    "doge": _one_by_one("doge", "GQA", keep_window_size=64),
    "gpt_neox_japanese": _one_by_one("gpt_neox_japanese", intermediate_multiple_size=2),
}
"""Name to model. A type that is here must be exact; the table of the documentation lists exactly these."""

FAST = (
    "llama", "mistral", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "gpt_neox", "cohere2", "qwen3_moe", "llama4", "gpt_oss",
)  # fmt: skip
"""Those that `make test` checks."""

REFUSALS: dict[str, Refusal] = {
    "openai-gpt": Refusal(model_type="openai-gpt", reason="only 0 of its 12 layers call the attention interface"),
    **{
        name: Refusal(model_type=name, reason="state of its own")
        for name in (
            "recurrent_gemma",
            "minimax",
            "rwkv",
            "deepseek_v32",
            "deepseek_v4",
            "glm_moe_dsa",
            "xlstm",
            "xlnet",
        )
    },
    **{name: Refusal(model_type=name, reason="is an encoder-decoder") for name in ("t5", "bart", "pegasus", "whisper")},
    **{
        f"{name}_multimodal": Refusal(model_type=name, reason="is multimodal (")
        for name in (
            "llava",
            "qwen2_vl",
            "qwen2_5_vl",
            "qwen3_vl",
            "gemma3",
            "llama4",
            "mistral3",
            "paligemma",
        )
    },
    "gemma4_multimodal": Refusal(model_type="gemma4", reason="is multimodal (", values={"vision_config": {}}),
}
"""Name to what is refused before a weight is read."""


def config_of(architecture: Architecture, **changes: Any) -> Any:
    """The configuration object. changes: fields set last."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[architecture.model_type]
    known = {field.name for field in dataclasses.fields(kind)} | kind.attribute_map.keys()
    common = {name: value for name, value in COMMON.items() if name in known - architecture.without}
    return kind(**{**common, **architecture.values, **changes})


def random_model(config: Any, *, seed: int = 0) -> Any:
    """A model of this configuration with random weights, fp32, in eval mode."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    random = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # states last for some tokens, not for one
                parameter -= 3.0
            if parameter.ndim == 1:  # norms and biases start at constants, which would hide that one is left out
                parameter += torch.randn(parameter.shape, generator=random) * 0.1
    return model.eval()


def save_architecture(name: str, directory: Path) -> Path:
    """Write the model, without a tokenizer. Returns the directory."""
    random_model(config_of(ARCHITECTURES[name])).save_pretrained(directory)
    return directory


def save_refusal(name: str, directory: Path) -> Path:
    """Write the configuration that must be refused, and one tensor, since weights are not to be read. Returns the directory."""
    from safetensors.torch import save_file
    from transformers import CONFIG_MAPPING

    refusal = REFUSALS[name]
    CONFIG_MAPPING[refusal.model_type](**refusal.values).save_pretrained(directory)
    save_file({"unread": torch.zeros(1)}, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
