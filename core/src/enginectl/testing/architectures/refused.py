"""Configurations that must not load."""

from __future__ import annotations

from enginectl.testing.architectures.kinds import Refusal

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
