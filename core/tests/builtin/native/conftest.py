"""Tiny models of every native architecture, on disk once, and what others make of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from enginectl import Engine, SamplingParams
from enginectl.builtin.ops_torch import TorchOpSet
from enginectl.builtin.weights.safetensors import SafetensorsCheckpoint
from enginectl.context import BuildContext
from enginectl.testing.attention import context_for, layer_spec
from enginectl.testing.tiny_models import save_tiny_model

ABSENT = "absent"
"""The value of a field that is not in the configuration."""

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.2 * i for i in range(8)],
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 96,
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama_tied", {}),
    "llama_biased": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 6}),
    "llama_linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0}}),
    "llama_llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama_yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {}),
    "mistral_full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2_window": ("qwen2_window", {}),
    "qwen3": ("qwen3", {}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3", {}),
    "gemma3_linear": ("gemma3", {"rope_parameters": GEMMA3_ROPE}),
    "phi3": ("phi3", {}),
    "phi3_partial": ("phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "phi3_longrope": (
        "phi3",
        {
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 96,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
        },
    ),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_bias": True}),
    "mixtral": ("mixtral", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe_sparse": ("qwen3_moe", {"decoder_sparse_step": 2, "norm_topk_prob": False}),
}
"""Name to a tiny model and what is changed in its configuration."""

MAX_TOKENS = 12
PROMPT_LENGTHS = (1, 33, 12, 21, 5)

Tokens = list[list[int]]
Tiny = Callable[[str], Path]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `case` and names none gets all of them."""
    marks = metafunc.definition.iter_markers("parametrize")
    named = any(mark.args[0] == "case" or "case" in tuple(mark.args[0]) for mark in marks)
    if "case" in metafunc.fixturenames and not named:
        metafunc.parametrize("case", sorted(CASES))


@pytest.fixture(scope="session")
def prompts() -> Tokens:
    """Mixed lengths, up to well over a window."""
    random = np.random.default_rng(0)
    return [random.integers(3, 250, length).tolist() for length in PROMPT_LENGTHS]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """`tiny(case)` is the directory of a tiny random model, made once."""

    @functools.cache
    def make(case: str) -> Path:
        name, changes = CASES[case]
        return save_tiny_model(name, tmp_path_factory.mktemp("native") / case, tokenizer=False, **changes)

    return make


@pytest.fixture(scope="session")
def generated(tiny: Tiny, prompts: Tokens) -> Callable[[str], Tokens]:
    """`generated(case)`: greedy tokens of Hugging Face's `generate`, one prompt at a time, fp32."""
    from transformers import AutoModelForCausalLM

    @functools.cache
    def generate(case: str) -> Tokens:
        model = AutoModelForCausalLM.from_pretrained(tiny(case), dtype=torch.float32, attn_implementation="eager")
        outputs = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                out = model.eval().generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False
                )
            outputs.append(out[0, len(prompt) :].tolist())
        return outputs

    return generate


@pytest.fixture(scope="session")
def engine_tokens() -> Callable[..., Tokens]:
    """Greedy tokens through the engine: prompts share steps, and a small budget cuts them into chunks."""

    def tokens(model: Path, family: str, asked: Tokens, *, max_tokens: int = MAX_TOKENS, **options: Any) -> Tokens:
        parts: dict[str, Any] = {"op_set": "torch"} if family == "native" else {}
        values: dict[str, Any] = {
            "dtype": "float32",
            "block_size": 4,
            "max_num_batched_tokens": 24,
            "max_num_seqs": 4,
            "num_threads": 1,
        }
        values |= options
        with Engine(str(model), model_family=family, attention="torch", **parts, **values) as engine:
            outputs = engine.generate(asked, SamplingParams(temperature=0.0, max_tokens=max_tokens))
        assert [output.error for output in outputs] == [None] * len(asked)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return tokens


@pytest.fixture(scope="session")
def context() -> Callable[..., BuildContext]:
    """What compose would hand to the family, with the torch op set in place."""

    def make(*, dtype: str = "float32", max_model_len: int | None = None, enable_lora: bool = False) -> BuildContext:
        ctx = context_for([layer_spec()], block_size=4, device="cpu", dtype=dtype)
        engine = msgspec.structs.replace(ctx.engine, max_model_len=max_model_len, enable_lora=enable_lora)
        return ctx.with_(engine=engine, parts={"op_set": TorchOpSet("cpu", getattr(torch, dtype))})

    return make


@pytest.fixture(scope="session")
def checkpoint(tiny: Tiny) -> Callable[..., SafetensorsCheckpoint]:
    """`checkpoint(case, **changes)`: opened, with some fields of its configuration changed; ABSENT takes one out."""

    def opened(case: str, **changes: Any) -> SafetensorsCheckpoint:
        found = SafetensorsCheckpoint(tiny(case))
        config = {**found.config, **changes}
        found.config = {key: value for key, value in config.items() if value != ABSENT}
        return found

    return opened
