"""Whole engines on the CPU kernels: the tokens of the torch path, and in bf16 a row's own bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from enginectl import Engine, SamplingParams
from enginectl.testing.tiny_models import save_tiny_model

NAMES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "qwen3_moe"]
PROMPTS = [[5, 9, 200, 17], list(range(20, 61)), [7] * 3 + [90, 33], [250]]
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """Engines set them."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def engine(path: Path, kind: str, **options: Any) -> Engine:
    parts = {"attention": kind, "op_set": kind, "model_family": "native", "max_model_len": 128, "num_threads": 2}
    return Engine(str(path), **(parts | {"kv_cache_memory_bytes": 1 << 24} | options))


def tokens(path: Path, kind: str, prompts: list[list[int]], **options: Any) -> list[Any]:
    with engine(path, kind, **options) as running:
        return [out.outputs[0].token_ids for out in running.generate(prompts, GREEDY)]


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_the_torch_path(name: str, tmp_path: Path) -> None:
    """Law 1 and law 5: in fp32, token for token, with chunked prompts."""
    path = save_tiny_model(name, tmp_path)
    expected = tokens(path, "torch", PROMPTS, dtype="float32")
    assert tokens(path, "cpu", PROMPTS, dtype="float32", max_num_batched_tokens=16) == expected


@pytest.mark.parametrize("name", NAMES)
def test_bf16_logprobs_are_the_same_alone_and_in_a_batch(name: str, tmp_path: Path) -> None:
    """Law 1: on this path they are equal to the bit, whatever shares the batch and however prompts are cut."""
    path = save_tiny_model(name, tmp_path)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=3)

    def run(batches: list[list[list[int]]], **options: Any) -> list[Any]:
        with engine(path, "cpu", dtype="bfloat16", **options) as running:
            outs = [out.outputs[0] for batch in batches for out in running.generate(batch, params)]
            return [(out.token_ids, out.logprobs) for out in outs]

    assert run([PROMPTS], max_num_batched_tokens=16) == run([[prompt] for prompt in PROMPTS])


def test_float16_is_served(tmp_path: Path) -> None:
    path = save_tiny_model("llama", tmp_path)
    assert len(tokens(path, "cpu", PROMPTS[:1], dtype="float16")[0]) == 20


def test_it_is_chosen_on_a_cpu_unless_something_else_is_named(tmp_path: Path) -> None:
    path = save_tiny_model("llama", tmp_path)
    with Engine(str(path), max_model_len=64) as running:
        chosen = {role: name for role, name, *_ in running.info.table}
    assert chosen["attention"] == chosen["op_set"] == "cpu"
