"""LoRA adapters for tiny models, saved by PEFT, whose B is not zero; and what PEFT says of each alone.

Needs the package `peft`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from enginectl.testing.tiny_models import tiny_model

ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
Tokens = list[list[int]]


def save_adapter(base: str | Any, directory: Path, *, seed: int = 0, std: float = 0.2, **config: Any) -> Path:
    """A random adapter, saved by PEFT. base: a tiny model's name, or a module, which is left as it was.

    config: fields of LoraConfig.
    """
    from peft import LoraConfig, get_peft_model

    fields: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": ATTENTION + MLP, "task_type": "CAUSAL_LM"}
    with torch.random.fork_rng(devices=[]):
        module = tiny_model(base) if isinstance(base, str) else base
        model = get_peft_model(module, LoraConfig(**{**fields, **config}))
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=random) * std / parameter.shape[-1] ** 0.5)
    model.save_pretrained(directory, save_embedding_layers=False)
    model.unload()
    return directory


def greedy(module: Any, prompts: Tokens, num_tokens: int | Sequence[int]) -> Tokens:
    """What `generate` gives, each prompt alone, whatever ends a text."""
    lengths = [num_tokens] * len(prompts) if isinstance(num_tokens, int) else list(num_tokens)
    found = []
    for prompt, length in zip(prompts, lengths, strict=True):
        asked = torch.tensor([prompt])
        out = module.generate(
            input_ids=asked,
            attention_mask=torch.ones_like(asked),
            max_new_tokens=length,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


def peft_greedy(base: str, adapter: Path | None, prompts: Tokens, num_tokens: int | Sequence[int]) -> Tokens:
    """PEFT with one adapter, or the base alone."""
    module = tiny_model(base)
    if adapter is not None:
        from peft import PeftModel

        module = PeftModel.from_pretrained(module, adapter).eval()
    return greedy(module, prompts, num_tokens)
