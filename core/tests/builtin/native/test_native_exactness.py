"""The native family gives the tokens of Hugging Face and of the transformers family, for every architecture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Tokens = list[list[int]]


def test_greedy_equals_generate(
    case: str,
    tiny: Callable[[str], Path],
    prompts: Tokens,
    generated: Callable[[str], Tokens],
    engine_tokens: Callable[..., Tokens],
) -> None:
    """Law 1: fp32, prompts batched together and cut into chunks."""
    expected = generated(case)
    assert len({token for row in expected for token in row}) > 12, "the model repeats itself and proves nothing"
    assert engine_tokens(tiny(case), "native", prompts) == expected


@pytest.mark.parametrize("case", ["llama_yarn", "qwen3", "gemma3", "granite", "olmo2", "qwen2_moe"])
def test_greedy_equals_the_transformers_family(
    case: str, tiny: Callable[[str], Path], prompts: Tokens, engine_tokens: Callable[..., Tokens]
) -> None:
    """Law 5."""
    assert engine_tokens(tiny(case), "native", prompts) == engine_tokens(tiny(case), "transformers", prompts)


@pytest.mark.parametrize("case", ["llama", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize(
    "options", [{"max_num_batched_tokens": 512, "block_size": 16}, {"overlap_depth": 1, "num_gpu_blocks_override": 30}]
)
def test_no_option_changes_a_token(
    case: str,
    options: dict[str, Any],
    tiny: Callable[[str], Path],
    prompts: Tokens,
    generated: Callable[[str], Tokens],
    engine_tokens: Callable[..., Tokens],
) -> None:
    """Law 1: whole prompts in a step; overlap, and a pool so small that rows wait or are preempted."""
    if "num_gpu_blocks_override" in options:
        options = {**options, "max_model_len": 56}
    assert engine_tokens(tiny(case), "native", prompts, **options) == generated(case)


@pytest.mark.parametrize("case", ["llama", "qwen2", "gemma3"])
def test_native_is_the_default_where_it_applies(case: str, tiny: Callable[[str], Path]) -> None:
    """Nobody has to ask for it."""
    from enginectl import Engine

    with Engine(str(tiny(case)), attention="torch", op_set="torch", num_threads=1) as engine:
        assert ("model_family", "native") in [row[:2] for row in engine.info.table]
        assert ("op_set", "torch") in [row[:2] for row in engine.info.table]


@pytest.mark.model
def test_demo_model_equals_the_transformers_family(demo_model: Path, engine_tokens: Callable[..., Tokens]) -> None:
    """Law 5 on a real model: eight prompts, 24 tokens, fp32."""
    from enginectl.builtin.weights.gguf import GGUFCheckpoint

    directory = GGUFCheckpoint(demo_model).tokenizer_dir()
    assert directory is not None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    texts = [
        "The capital of France is",
        "def fibonacci(n):",
        "Once upon a time",
        "Q: What is 12 times 12?\nA:",
        "The three primary colours are",
        "In 1969, two astronauts",
        "Dear Sir or Madam,",
        "1, 1, 2, 3, 5, 8,",
    ]
    asked = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "block_size": 16, "max_model_len": 256}
    found = engine_tokens(demo_model, "native", asked, max_tokens=24, **options)
    assert found == engine_tokens(demo_model, "transformers", asked, max_tokens=24, **options)
