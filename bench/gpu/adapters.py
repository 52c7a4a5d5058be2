"""Adapters with random weights in PEFT's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from random_model import config_of

RANK = 16
LINEARS = {
    "self_attn.q_proj": ("hidden", "heads"),
    "self_attn.k_proj": ("hidden", "kv_heads"),
    "self_attn.v_proj": ("hidden", "kv_heads"),
    "self_attn.o_proj": ("heads", "hidden"),
    "mlp.gate_proj": ("hidden", "size"),
    "mlp.up_proj": ("hidden", "size"),
    "mlp.down_proj": ("size", "hidden"),
}
"""Name to input and output width."""


def save_adapters(folder: Path, shape: str, count: int, num_layers: int | None = None) -> dict[str, Any]:
    """Makes them, and returns the options of an engine that serves them."""
    names = [f"adapter{i}" for i in range(count)]
    paths = {name: str(save_adapter(folder / name, shape, i, num_layers)) for i, name in enumerate(names)}
    return {"enable_lora": True, "max_loras": count, "max_lora_rank": RANK, "lora_modules": paths}


def save_adapter(directory: Path, shape: str, seed: int, num_layers: int | None = None) -> Path:
    """A random adapter of every linear in PEFT's format; B is not zero."""
    from safetensors.torch import save_file

    c = config_of(shape, num_layers)
    widths = {
        "hidden": c["hidden_size"],
        "size": c["intermediate_size"],
        "heads": c["num_attention_heads"] * c["head_dim"],
        "kv_heads": c["num_key_value_heads"] * c["head_dim"],
    }
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(c["num_hidden_layers"]):
        for linear, (width_in, width_out) in LINEARS.items():
            name = f"base_model.model.model.layers.{layer}.{linear}"
            shapes = {"lora_A": (RANK, widths[width_in]), "lora_B": (widths[width_out], RANK)}
            for part, size in shapes.items():
                tensors[f"{name}.{part}.weight"] = (torch.randn(size, generator=random) * 0.02).to(torch.bfloat16)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    names = [linear.rpartition(".")[2] for linear in LINEARS]
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": names}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
