"""What the machine allows: its memory bandwidth and FLOP/s, and from them a bound on a workload's rate.

The bound counts what no engine can leave out: the weights are read once a step, each row's keys and values once, and each
token is multiplied with every weight, the head only where a token is chosen. So it is the larger of two times for each
step, and it takes prompts of the whole batch as one step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BYTES = 2  # bf16
_PROBE_S = 1.0


@dataclass(frozen=True, slots=True)
class Roofline:
    """bytes_per_s: reading memory. flop_per_s: multiplying bf16 matrices."""

    bytes_per_s: float
    flop_per_s: float

    def step_s(self, num_bytes: float, flop: float) -> float:
        """The least that a step can take."""
        return max(num_bytes / self.bytes_per_s, flop / self.flop_per_s)


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense decoder. layers, head: weights in all layers and in the head. kv: values kept a token. width: attention
    heads × head size, over all layers.
    """

    layers: int
    head: int
    kv: int
    width: int

    @classmethod
    def read(cls, model: Path) -> Shape:
        """From a model's directory, or a GGUF file."""
        config = _config(model)
        layers, hidden, heads = (config[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
        head_dim = config.get("head_dim") or hidden // heads
        kv_heads = config.get("num_key_value_heads") or heads
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        weights = layers * (attention + 3 * hidden * config["intermediate_size"])
        return cls(weights, hidden * config["vocab_size"], 2 * layers * kv_heads * head_dim, layers * heads * head_dim)


def _config(model: Path) -> dict[str, Any]:
    if model.is_dir():
        config: dict[str, Any] = json.loads((model / "config.json").read_text())
        return config
    from enginectl.builtin.weights.gguf_config import hf_config
    from enginectl.builtin.weights.gguf_file import GGUFFile

    return hf_config(GGUFFile(model))


def bound(roofline: Roofline, shape: Shape, sequences: int, prompt: int, output: int) -> float:
    """Tokens a second that no engine can exceed: prompt tokens if one token is asked for, output tokens otherwise."""
    weight_bytes = _BYTES * (shape.layers + shape.head)
    flop = 2.0 * sequences * (prompt * shape.layers + shape.head + prompt * prompt * shape.width)
    seconds = roofline.step_s(weight_bytes, flop)
    for length in range(prompt + 1, prompt + output):
        read = weight_bytes + _BYTES * sequences * length * shape.kv
        flop = 2.0 * sequences * (shape.layers + shape.head + 2 * length * shape.width)
        seconds += roofline.step_s(read, flop)
    return sequences * (prompt if output == 1 else output) / seconds


def measure(threads: int) -> Roofline:
    """Of this machine, with so many threads: the best of a second each."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        values = torch.ones(1 << 27)  # 512 MiB, more than a cache
        left, right = (torch.ones(2048, 2048, dtype=torch.bfloat16) for _ in range(2))
        reading, multiplying = _least_s(values.sum), _least_s(lambda: left @ right)
    finally:
        torch.set_num_threads(before)
    return Roofline(values.numel() * values.element_size() / reading, 2 * 2048**3 / multiplying)


def _least_s(run: Callable[[], object]) -> float:
    run()
    best, deadline = float("inf"), time.perf_counter() + _PROBE_S
    while time.perf_counter() < deadline:
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return best
