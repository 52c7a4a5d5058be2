"""Fixtures of the engine tests: tiny models on disk, and what Hugging Face generates with them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from enginectl.testing.tiny_models import save_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny(name)` is the directory of a tiny random model, made once."""

    @functools.cache
    def make(name: str) -> Path:
        return save_tiny_model(name, tmp_path_factory.mktemp("models") / name)

    return make


@pytest.fixture(scope="session")
def hugging_face(tiny: Callable[[str], Path]) -> Callable[[str, Sequence[int], int], list[int]]:
    """`hugging_face(name, prompt, max_tokens)`: greedy tokens of `generate`, one prompt at a time, fp32."""
    from transformers import AutoModelForCausalLM

    @functools.cache
    def load(name: str) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(tiny(name), dtype=torch.float32).eval()

    @functools.cache
    def generate(name: str, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = load(name).generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
            )
        return out[0, len(prompt) :].tolist()

    return lambda name, prompt, max_tokens: generate(name, tuple(prompt), max_tokens)
