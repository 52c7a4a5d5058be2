"""Hugging Face `generate`, one padded batch at a time."""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Generate, serve


def make(model: str, options: dict[str, str]) -> Generate:
    """Load the model."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, options.get("dtype", "bfloat16"))).eval()

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = loaded.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
            )
        return out[:, ids.shape[1] :].tolist()

    return generate


serve(make)
