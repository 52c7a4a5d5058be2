"""Dense models, packed."""

from __future__ import annotations

from typing import Any

from enginectl.testing.architectures.kinds import MIXED, WINDOW, Architecture, packed

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

DENSE: dict[str, Architecture] = {
    "llama": packed("llama", "GQA", native=True),
    "llama_bias": packed("llama", "GQA", native=True, attention_bias=True, mlp_bias=True),
    "llama_tied": packed("llama", "GQA", native=True, tie_word_embeddings=True),
    "llama_yarn": packed("llama", "GQA", native=True, rope_parameters=_YARN),
    "mistral": packed("mistral", "GQA", "window", native=True),
    "ministral": packed("ministral", "GQA", "mixed", "window", layer_types=MIXED),
    "ministral3": packed("ministral3", "GQA", "window"),
    "qwen2": packed("qwen2", "GQA", native=True, use_sliding_window=False),
    "qwen2_window": packed(
        "qwen2", "GQA", "mixed", "window", native=True, use_sliding_window=True, max_window_layers=1
    ),
    "qwen3": packed("qwen3", "GQA", native=True),
    "gemma": packed("gemma", "GQA", native=True),
    "gemma2": packed("gemma2", "GQA", "mixed", "soft cap", "window", native=True, query_pre_attn_scalar=16),
    "gemma3": packed(
        "gemma3_text",
        "GQA",
        "mixed",
        "window",
        native=True,
        without="attn_logit_softcapping",
        layer_types=MIXED,
        query_pre_attn_scalar=16,
    ),
    "phi": packed("phi", "GQA"),
    "phi3": packed("phi3", "GQA", "window", native=True),
    "phi3_longrope": packed(
        "phi3",
        "GQA",
        "window",
        native=True,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **_LONG_FACTORS},
        original_max_position_embeddings=64,
    ),
    "olmo": packed("olmo", "GQA", clip_qkv=1.0),
    "olmo2": packed("olmo2", "GQA", native=True),
    "olmo3": packed("olmo3", "GQA", "mixed", "window", layer_types=MIXED),
    "granite": packed("granite", "GQA", native=True, logits_scaling=2.0, attention_multiplier=0.3),
    "granite_swa": packed("granite_swa", "GQA", "mixed", "sinks", "window"),
    "smollm3": packed("smollm3", "GQA", native=True, no_rope_layers=[1, 0, 1]),
    "gpt2": packed("gpt2"),
    "gpt_sw3": packed("gpt-sw3"),
    "gpt_neox": packed("gpt_neox"),
    "gptj": packed("gptj", rotary_dim=4),
    "codegen": packed("codegen", num_attention_heads=4, rotary_dim=4),
    "gpt_bigcode": packed("gpt_bigcode", "GQA"),
    "opt": packed("opt", ffn_dim=96, word_embed_proj_dim=48),
    "biogpt": packed("biogpt"),
    "starcoder2": packed("starcoder2", "GQA", "window"),
    "stablelm": packed("stablelm", "GQA"),
    "persimmon": packed("persimmon"),
    "cohere": packed("cohere", "GQA"),
    "cohere2": packed("cohere2", "GQA", "mixed", "window", layer_types=MIXED),
    "glm": packed("glm", "GQA"),
    "glm4": packed("glm4", "GQA"),
    "nemotron": packed("nemotron", "GQA"),
    "arcee": packed("arcee", "GQA"),
    "seed_oss": packed("seed_oss", "GQA"),
    "helium": packed("helium", "GQA", head_dim=8),
    "apertus": packed("apertus", "GQA"),
    "ernie4_5": packed("ernie4_5", "GQA"),
    "exaone": packed("exaone", "GQA"),
    "exaone4": packed("exaone4", "GQA", "mixed", "window", layer_types=MIXED),
    "hunyuan_dense": packed("hunyuan_v1_dense", "GQA"),
    "internlm3": packed("internlm3", "GQA"),
    "cwm": packed("cwm", "GQA", "mixed", "window", layer_types=MIXED),
    "bitnet": packed("bitnet", "GQA"),
    "diffllama": packed("diffllama", "GQA"),
    "vaultgemma": packed("vaultgemma", "GQA", "mixed", "soft cap", "window"),
    "nanochat": packed("nanochat", "GQA"),
    "hyperclovax": packed("hyperclovax", "GQA"),
    "jais2": packed("jais2", "GQA"),
    "iquestcoder": packed("iquestcoder", "GQA"),
    "modernbert_decoder": packed("modernbert-decoder", "mixed", "window", local_attention=2 * WINDOW),
}
