"""Log-probabilities of a prompt, whatever becomes of its reading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from enginectl import Engine, SamplingParams
from enginectl.interfaces.model import Kept
from enginectl.types import RequestOutput

FIXED: dict[str, Any] = {"max_num_seqs": 2, "block_size": 4, "dtype": "float32", "num_threads": 1, "only_plugins": True}


def scored(model: Path, **options: Any) -> tuple[list[RequestOutput], int]:
    """Answers to a short prompt with a long output and a long one that is scored, and how often rows gave way."""
    random = np.random.default_rng(3)
    prompts = [random.integers(3, 250, length).tolist() for length in (4, 60)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=1),
    ]
    with Engine(str(model), **{**FIXED, **options}) as engine:
        outputs = engine.generate(prompts, params)
        return outputs, engine.stats().num_preemptions


@pytest.mark.parametrize("depth", [0, 1])
def test_a_prompt_that_gave_way_while_it_was_read_is_scored_once(depth: int, tiny: Callable[[str], Path]) -> None:
    """Law 10. What had been read was scored again when the request resumed: more entries than the prompt has tokens."""
    model = tiny("llama")
    (_, expected), none = scored(model)
    (_, found), num_preemptions = scored(
        model, num_gpu_blocks_override=20, max_model_len=80, max_num_batched_tokens=4, overlap_depth=depth
    )
    assert none == 0
    assert num_preemptions > 0
    assert expected.prompt_logprobs is not None
    assert found.prompt_logprobs is not None
    assert len(found.prompt_logprobs) == len(expected.prompt_logprobs) == 60
    for one, other in zip(found.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
        assert one is not None
        assert other is not None
        assert (one.token_id, one.rank, one.top_ids) == (other.token_id, other.rank, other.top_ids)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids


def test_logits_of_a_long_prompt_are_made_a_part_at_a_time(tiny: Callable[[str], Path]) -> None:
    """Those of 8,192 positions are 5 GB with a vocabulary of 150,000: a GPU ran out of memory, and the request failed."""
    prompt = np.random.default_rng(3).integers(3, 250, 200).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2)
    found = []
    for budget in (256, 16):
        with Engine(str(tiny("llama")), max_num_batched_tokens=budget, **FIXED) as engine:
            runner: Any = engine.core.executor
            model = runner.model
            plain, sizes = model.logits, list[int]()

            def noted(kept: Kept, rows: Tensor | None = None, plain: Any = plain, sizes: list[int] = sizes) -> Tensor:
                logits: Tensor = plain(kept, rows)
                sizes.append(len(logits))
                return logits

            model.logits = noted
            (output,) = engine.generate([prompt], params)
        assert max(sizes) <= 64
        assert output.prompt_logprobs is not None
        found.append(output.prompt_logprobs)
    assert len(found[0]) == 200
    for one, other in zip(found[0][1:], found[1][1:], strict=True):
        assert one is not None
        assert other is not None
        assert (one.token_id, one.rank, one.top_ids) == (other.token_id, other.rank, other.top_ids)
