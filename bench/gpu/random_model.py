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


def config_of(name: str, num_layers: int | None = None) -> dict[str, Any]:
    """As in a config.json. num_layers: fewer than the shape has."""
    shape = SHAPES[name] if num_layers is None else {**SHAPES[name], "num_hidden_layers": num_layers}
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
        **shape,
    }


def tensor_shapes(name: str, num_layers: int | None = None) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes under transformers' module names."""
    c = config_of(name, num_layers)
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

    def __init__(self, source: RandomSource, path: Path) -> None:
        self.path = path
        self.config = config_of(source.name, source.num_layers)
        self._source = source
        self._shapes = dict(tensor_shapes(source.name, source.num_layers))

    @property
    def dtype(self) -> str:
        """As asked."""
        return self._source.dtype

    @property
    def num_bytes(self) -> int:
        """All weights."""
        return int(sum(map(math.prod, self._shapes.values())) * getattr(torch, self.dtype).itemsize)

    @property
    def generation_config(self) -> dict[str, Any]:
        """None."""
        return {}

    def tokenizer_dir(self) -> Path | None:
        """None: prompts are token ids."""
        return None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each begins elsewhere in one buffer, so that layers differ, and is a copy: weights that share memory would stay
        in the GPU's cache. Norms are ones.
        """
        dtype, device = getattr(torch, self.dtype), self._source.device
        random = torch.Generator(device).manual_seed(0)
        pool = (torch.randn(POOL_SIZE, generator=random, device=device) * 0.02).to(dtype)
        start = 0
        embedding = None
        for name, shape in self._shapes.items():
            count = math.prod(shape)
            start = (start + 7919) % POOL_SIZE
            if len(shape) == 1:
                yield name, torch.ones(shape, dtype=dtype, device=device)
            elif self._source.successor and name.endswith(("o_proj.weight", "down_proj.weight")):
                yield name, torch.zeros(shape, dtype=dtype, device=device)
            elif self._source.successor and name == "model.embed_tokens.weight":
                # Rows cut out of the buffer would repeat.
                embedding = torch.randn(shape, generator=random, device=device).to(dtype)
                yield name, embedding
            elif embedding is not None and name == "lm_head.weight":
                yield name, embedding.roll(1, 0)
            else:
                repeats = -(-(start + count) // POOL_SIZE)
                yield name, (pool.repeat(repeats) if repeats > 1 else pool)[start : start + count].view(shape).clone()


class RandomSource(WeightsSource):
    """Serves one model, whatever the path.

    num_layers: fewer than the shape has. successor: layers add nothing, and the likeliest token is the last one's
    successor by a wide margin, so that answers are known beforehand; it takes as long as any.
    """

    def __init__(
        self, name: str, dtype: str, device: str, *, num_layers: int | None = None, successor: bool = False
    ) -> None:
        self.name = name
        self.dtype = dtype
        self.device = device
        self.num_layers = num_layers
        self.successor = successor

    def matches(self, path: Path) -> bool:
        """Always."""
        return True

    def open(self, path: Path) -> RandomCheckpoint:
        """At once."""
        return RandomCheckpoint(self, path)
