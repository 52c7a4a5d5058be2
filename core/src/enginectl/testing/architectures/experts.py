"""Mixtures of experts, packed."""

from __future__ import annotations

from enginectl.testing.architectures.kinds import MIXED, Architecture, packed

EXPERTS: dict[str, Architecture] = {
    "mixtral": packed("mixtral", "GQA", "window", native=True),
    "qwen2_moe": packed(
        "qwen2_moe", "GQA", "mixed", "window", native=True, use_sliding_window=True, max_window_layers=3
    ),
    "qwen3_moe": packed("qwen3_moe", "GQA", native=True, norm_topk_prob=True),
    "olmoe": packed("olmoe", "GQA"),
    "flex_olmo": packed("flex_olmo", "GQA"),
    "granitemoe": packed("granitemoe", "GQA"),
    "granitemoe_swa": packed("granitemoe_swa", "GQA", "mixed", "sinks", "window"),
    "granitemoe_shared": packed("granitemoeshared", "GQA", shared_intermediate_size=32),
    "phimoe": packed("phimoe", "GQA", "window"),
    "glm4_moe": packed("glm4_moe", "GQA"),
    "dots1": packed("dots1", "GQA", "mixed", "window", layer_types=MIXED),
    "ernie4_5_moe": packed("ernie4_5_moe", "GQA"),
    "hunyuan_moe": packed("hunyuan_v1_moe", "GQA"),
    "llama4": packed(
        "llama4_text",
        "chunks",
        "GQA",
        "mixed",
        intermediate_size_mlp=96,
        moe_layers=[1],
        attn_temperature_tuning=False,
        no_rope_layers=[1, 0, 1],
    ),
    "gpt_oss": packed("gpt_oss", "GQA", "mixed", "sinks", "window"),
    "minimax_m2": packed("minimax_m2", "GQA"),
    "aria_text": packed("aria_text", "GQA"),
    "afmoe": packed("afmoe", "GQA", "mixed", "window", layer_types=MIXED),
    "solar_open": packed("solar_open", "GQA"),
    "mimo_v2_flash": packed(
        "mimo_v2_flash",
        "GQA",
        "mixed",
        "narrow values",
        "sinks",
        "window",
        layer_types=MIXED,
        num_attention_heads=8,
        head_dim=24,
        v_head_dim=8,
    ),
    "minimax_m3": packed("minimax_m3_vl_text", "GQA"),
    "exaone_moe": packed("exaone_moe", "GQA", "mixed", "window", layer_types=MIXED),
    "laguna": packed("laguna", "GQA"),
    "mellum": packed("mellum", "GQA", "mixed", "window", layer_types=MIXED),
    "cohere2_moe": packed("cohere2_moe", "GQA", "mixed", "window", layer_types=MIXED),
    "sarvam_moe": packed("sarvam_moe", "GQA"),
    "hy_v3": packed("hy_v3", "GQA"),
    "jetmoe": packed("jetmoe"),
    "dbrx": packed(
        "dbrx",
        "GQA",
        without="hidden_size",  # not passed on to its experts
        d_model=48,
        n_heads=6,
        attn_config={"rope_theta": 10000.0, "clip_qkv": 4.0, "kv_n_heads": 2},
        ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    ),
}
