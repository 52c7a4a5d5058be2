"""The real model: greedy tokens equal Hugging Face `generate` in fp32, on the same dequantised weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from enginectl import Engine, SamplingParams
from enginectl.builtin.weights import build_gguf
from enginectl.config import EngineConfig
from enginectl.context import BuildContext
from enginectl.machine import detect_machine

NUM_PROMPTS, MAX_TOKENS = 32, 16

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(1200)]

TEXTS = (
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "Water boils at",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,",
    "In the beginning",
)


@pytest.fixture(scope="module")
def prompts(demo_model: Path) -> list[list[int]]:
    """Mixed: texts, and random ids of 1 to 90 tokens."""
    with Engine(str(demo_model), max_model_len=256, max_num_seqs=4) as engine:
        texts = [engine.tokenizer.encode(text) for text in TEXTS]
    random = np.random.default_rng(0)
    return texts + [random.integers(3, 49000, random.integers(1, 90)).tolist() for _ in range(NUM_PROMPTS - len(texts))]


@pytest.fixture(scope="module")
def expected(demo_model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What `generate` gives, one prompt at a time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ctx = BuildContext(EngineConfig(model=str(demo_model), dtype="float32"), detect_machine())
    checkpoint = build_gguf(ctx).open(demo_model)
    model = LlamaForCausalLM(LlamaConfig(**checkpoint.config)).eval()
    missing, unexpected = model.load_state_dict({n: t.float() for n, t in checkpoint.tensors()}, strict=False)
    assert set(missing) <= {"lm_head.weight"}, "tied to the embeddings"
    assert not unexpected
    model.tie_weights()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=MAX_TOKENS,
                min_new_tokens=MAX_TOKENS,
                do_sample=False,
            )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize("family", ["native", "transformers"])
@pytest.mark.parametrize(("budget", "num_blocks"), [(16, None), (512, None), (512, 150)])
def test_greedy_equals_hugging_face(
    family: str,
    budget: int,
    num_blocks: int | None,
    demo_model: Path,
    prompts: list[list[int]],
    expected: list[list[int]],
) -> None:
    """Law 1 and 5: 32 mixed prompts batched together; a pool of 150 blocks makes rows give way."""
    with Engine(
        str(demo_model),
        model_family=family,
        dtype="float32",
        max_num_seqs=NUM_PROMPTS,
        max_num_batched_tokens=budget,
        max_model_len=150 if num_blocks else 256,
        block_size=8 if num_blocks else 16,
        num_gpu_blocks_override=num_blocks,
        enable_prefix_caching=False,
    ) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, min_tokens=MAX_TOKENS)
        outputs = engine.generate(prompts, params)
        assert (engine.stats().num_preemptions > 0) == (num_blocks is not None)
        engine.core.pool.check()
    assert [list(out.outputs[0].token_ids) for out in outputs] == expected
