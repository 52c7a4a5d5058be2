"""Sections that ask what a feature costs a decode step: graphs, overlap, sampling, adapters, drafts."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Bench
from numpy.typing import NDArray
from random_model import config_of
from speed import decode_step_s, engine_for, generate

from enginectl import SamplingParams
from enginectl.interfaces.speculator import DraftBatch, Speculator

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


def compare(bench: Bench, shape: str, batches: Sequence[int], kinds: dict[str, dict[str, Any]]) -> None:
    """A decode step of each kind of engine, beside the first kind's."""
    first: dict[int, float] = {}
    for kind, options in kinds.items():
        params, adapters = options.pop("params", None), options.pop("adapters", ())
        dtype, backend = bench.sizes("bfloat16", "float32"), default_backend(bench)
        with engine_for(bench, shape, dtype, backend, max(batches), **options) as engine:
            for batch in batches:
                seconds = decode_step_s(bench, engine, batch, params=params, adapters=adapters)
                first.setdefault(batch, seconds)
                bench.add(model=shape, kind=kind, batch=batch, step_ms=seconds * 1e3, times=seconds / first[batch])


def default_backend(bench: Bench) -> str:
    """What a GPU gets when nothing is asked for; a dry run's engine has core's."""
    return bench.sizes("triton", "torch")


def graphs(bench: Bench) -> None:
    """Decode steps as CUDA graphs against kernel by kernel, and the host a step ahead against in turn."""
    batches = bench.sizes([1, 8, 64], [1, 2])
    kinds = {
        "graphs, overlap": {},
        "graphs, in turn": {"overlap_depth": 0},
        "eager, overlap": {"enforce_eager": True},
        "eager, in turn": {"enforce_eager": True, "overlap_depth": 0},
    }
    for shape in bench.sizes(["0.5B", "1.5B"], ["tiny"]):
        compare(bench, shape, batches, {kind: dict(options) for kind, options in kinds.items()})


def sampling(bench: Bench) -> None:
    """Greedy against temperature, and against top-k and top-p, over the whole vocabulary."""
    listed = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 1}
    kinds = {"greedy": {}, "temperature": {"temperature": 1.0, "seed": 1}, "top-k, top-p": listed}
    for sampler in bench.sizes(["triton", "torch"], ["torch"]):
        options = {f"{kind}, {sampler}": {"params": given, "sampler": sampler} for kind, given in kinds.items()}
        compare(bench, bench.sizes("0.5B", "tiny"), bench.sizes([1, 64], [2]), options)


def lora(bench: Bench) -> None:
    """Eight adapters in a batch, one, and none in an engine that could; against an engine without adapters."""
    shape = bench.sizes("0.5B", "tiny")
    with tempfile.TemporaryDirectory() as folder:
        names = [f"adapter{i}" for i in range(8)]
        paths = {name: str(save_adapter(Path(folder) / name, shape, seed)) for seed, name in enumerate(names)}
        serving = {"enable_lora": True, "max_loras": len(names), "max_lora_rank": RANK, "lora_modules": paths}
        kinds: dict[str, dict[str, Any]] = {
            "without, graphs": {},
            "without, eager": {"enforce_eager": True},
            "adapters loaded, none used": serving,
            "one adapter": {**serving, "adapters": names[:1]},
            "eight adapters": {**serving, "adapters": names},
            "eight adapters, eager": {**serving, "adapters": names, "enforce_eager": True},
        }
        compare(bench, shape, bench.sizes([1, 64], [2]), kinds)


def save_adapter(directory: Path, shape: str, seed: int) -> Path:
    """A random adapter of every linear in PEFT's format; B is not zero."""
    from safetensors.torch import save_file

    c = config_of(shape)
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


class Guess(Speculator):
    """Drafts that are right (a recorded answer) or wrong (the answer plus one), so that cost and gain are apart."""

    is_adaptive = False

    def __init__(self, max_drafts: int, vocab_size: int) -> None:
        self.max_drafts = max_drafts
        self._vocab_size = vocab_size
        self.answers: dict[int, list[int]] = {}
        self.is_right = True

    def add_row(self, row: int, token_ids: NDArray[np.int32], params: SamplingParams) -> None:
        """Nothing to know."""

    def remove_row(self, row: int) -> None:
        """Nothing to forget."""

    def propose(self, batch: DraftBatch) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """From the answer to the row's first token, which tells prompts apart."""
        drafts = np.zeros((batch.rows.size, self.max_drafts), np.int32)
        for i, (row, length) in enumerate(zip(batch.rows.tolist(), batch.num_tokens.tolist(), strict=True)):
            known = self.answers.get(int(batch.token_ids[row, 0]), [])[length : length + self.max_drafts]
            drafts[i, : len(known)] = known
        if not self.is_right:
            drafts = (drafts + 1) % self._vocab_size
        return drafts, batch.limit


def speculation(bench: Bench) -> None:
    """Four drafts a row, all right and all wrong, against none: the gain at best, the loss at worst."""
    shape, batches = bench.sizes("1.5B", "tiny"), bench.sizes([1, 16], [2])
    dtype, backend = bench.sizes("bfloat16", "float32"), default_backend(bench)
    num_tokens, prompt_len = bench.sizes((256, 128), (6, 8))
    answers: dict[int, list[int]] = {}
    plain: dict[int, float] = {}
    with engine_for(bench, shape, dtype, backend, max(batches)) as engine:
        for prompt, output in generate(engine, max(batches), num_tokens + 64, prompt_len):
            answers[prompt[0]] = [*prompt, *output]
        for batch in batches:
            plain[batch] = decode_step_s(bench, engine, batch)
            bench.add(model=shape, kind="no drafts", batch=batch, token_ms=plain[batch] * 1e3)
    guess = Guess(4, config_of(shape)["vocab_size"])
    guess.answers = answers
    with engine_for(bench, shape, dtype, backend, max(batches), speculator=guess) as engine:
        for is_right in (True, False):
            guess.is_right = is_right
            for batch in batches:
                before = engine.stats()
                seconds = decode_step_s(bench, engine, batch)
                after = engine.stats()
                drafted = after.num_drafted - before.num_drafted
                accepted = after.num_accepted - before.num_accepted
                bench.add(
                    model=shape,
                    kind=f"4 drafts, all {'right' if is_right else 'wrong'}",
                    batch=batch,
                    token_ms=seconds * 1e3,
                    times=seconds / plain[batch],
                    accepted=f"{accepted} of {drafted}",
                )
