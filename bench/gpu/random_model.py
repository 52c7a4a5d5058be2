"""Models with random weights, for speed: a weights source whose tensors are pieces of one random buffer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from enginectl.interfaces.weights import Checkpoint, WeightsSource

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
    },
    "0.5B": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 151_936,
    },
    "1.5B": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 151_936,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
    },
}
"""Of Llama's structure, in the sizes of Qwen2.5-0.5B, Qwen2.5-1.5B and Llama-3.1-8B."""

POOL_SIZE = 1 << 24


def config_of(name: str) -> dict[str, Any]:
    """As in a config.json."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 32_768 if name != "tiny" else 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **SHAPES[name],
    }


def tensor_shapes(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes under transformers' module names."""
    c = SHAPES[name]
    hidden, size = c["hidden_size"], c["intermediate_size"]
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden)
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        yield f"{layer}.self_attn.q_proj.weight", (q, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (kv, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (kv, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, q)
        yield f"{layer}.mlp.gate_proj.weight", (size, hidden)
        yield f"{layer}.mlp.up_proj.weight", (size, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, size)
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (c["vocab_size"], hidden)


def weight_bytes(name: str, itemsize: int) -> int:
    """What a decode step must read: every weight but the embedding, of which it reads a row a token."""
    return itemsize * sum(math.prod(s) for n, s in tensor_shapes(name) if not n.startswith("model.embed"))


def kv_bytes_per_token(name: str, itemsize: int) -> int:
    """Keys and values of all layers."""
    c = SHAPES[name]
    return int(2 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"] * itemsize)


class RandomCheckpoint(Checkpoint):
    """Not on any disk."""

    def __init__(self, name: str, dtype: str, device: str, path: Path) -> None:
        self.path = path
        self._device = device
        self.config = config_of(name)
        self._name = name
        self._dtype = dtype

    @property
    def dtype(self) -> str:
        """As asked."""
        return self._dtype

    @property
    def num_bytes(self) -> int:
        """All weights."""
        itemsize = getattr(torch, self._dtype).itemsize
        return int(sum(math.prod(shape) for _, shape in tensor_shapes(self._name)) * itemsize)

    @property
    def generation_config(self) -> dict[str, Any]:
        """None."""
        return {}

    def tokenizer_dir(self) -> Path | None:
        """None: prompts are token ids."""
        return None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each begins elsewhere in the buffer, so that layers differ, and is a copy: weights that share memory would stay
        in the GPU's cache. Norms are ones.
        """
        dtype, device = getattr(torch, self._dtype), self._device
        random = torch.Generator(device).manual_seed(0)
        pool = (torch.randn(POOL_SIZE, generator=random, device=device) * 0.02).to(dtype)
        start = 0
        for name, shape in tensor_shapes(self._name):
            count = math.prod(shape)
            if len(shape) == 1:
                yield name, torch.ones(shape, dtype=dtype, device=device)
                continue
            start = (start + 7919) % POOL_SIZE
            repeats = -(-(start + count) // POOL_SIZE)
            yield name, (pool.repeat(repeats) if repeats > 1 else pool)[start : start + count].view(shape).clone()


class RandomSource(WeightsSource):
    """Serves one model, whatever the path."""

    def __init__(self, name: str, dtype: str, device: str) -> None:
        self._name = name
        self._dtype = dtype
        self._device = device

    def matches(self, path: Path) -> bool:
        """Always."""
        return True

    def open(self, path: Path) -> RandomCheckpoint:
        """At once."""
        return RandomCheckpoint(self._name, self._dtype, self._device, path)
