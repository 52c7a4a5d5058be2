"""In bf16 too, where a row's bits do not depend on its batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from enginectl import Engine, SamplingParams
from enginectl.machine import detect_machine
from enginectl.plugins import PluginHost, unsupported_reason
from enginectl.provider import Role
from enginectl.testing.tiny_models import save_tiny_model


def _cpu_op_set_serves() -> bool:
    entry = PluginHost().catalogue[Role.OP_SET].get("cpu")
    return entry is not None and unsupported_reason(entry.provider, detect_machine()) is None


@pytest.mark.skipif(not _cpu_op_set_serves(), reason="needs the batch-invariant op set of enginectl-attention-cpu")
@pytest.mark.parametrize("depth", [0, 1])
def test_tokens_are_the_same_with_and_without_the_cache_in_bf16(depth: int, tmp_path: Path) -> None:
    """Law 19: hits at several depths and chunk borders, bit for bit, through log-probabilities."""
    model = str(save_tiny_model("llama", tmp_path / "llama", dtype="bfloat16"))
    random = np.random.default_rng(0)
    shared = random.integers(3, 250, 40).tolist()
    prompts = [shared[: random.integers(8, 40)] + random.integers(3, 250, 5).tolist() for _ in range(12)]
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2)
    found = {}
    for cached in (False, True):
        with Engine(
            model,
            dtype="bfloat16",
            op_set="cpu",
            attention="cpu",
            enable_prefix_caching=cached,
            block_size=4,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            overlap_depth=depth,
        ) as engine:
            outputs = engine.generate(prompts, params)
            found[cached] = [(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outputs]
            assert (engine.stats().prefix_hits > 0) == cached
    assert found[True] == found[False]
