"""One backend for decodes and another for the rest give the tokens that one alone gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from enginectl import Engine, SamplingParams
from enginectl.builtin.attention_torch import TorchAttention
from enginectl.engine.phased_attention import PhasedAttention
from enginectl.errors import ConfigError, PluginError
from enginectl.interfaces.attention import AttentionBatch

PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12], [20] * 17, [31, 32, 33]]


class Counting(TorchAttention):
    """Counts the rows it prepares."""

    num_rows = 0

    def prepare(self, batch: AttentionBatch) -> object:
        self.num_rows += batch.num_seqs
        return super().prepare(batch)


@pytest.mark.parametrize("depth", [0, 1])
def test_two_backends_give_the_tokens_of_one(depth: int, tiny: Callable[[str], Path]) -> None:
    """Law 1: chunks of 3 tokens beside decodes, so that most steps are cut in two."""
    options = {"max_num_batched_tokens": 6, "block_size": 4, "overlap_depth": depth, "dtype": "float32"}
    params = SamplingParams(temperature=0.0, max_tokens=12)
    with Engine(str(tiny("gemma2")), **options) as engine:
        expected = [out.outputs[0].token_ids for out in engine.generate(PROMPTS, params)]
        layers = engine._assembled.parts["attention"]._layers  # the same layers for the two
    import torch

    decode, prefill = (Counting(layers, block_size=4, device="cpu", dtype=torch.float32) for _ in range(2))
    with Engine(str(tiny("gemma2")), attention=PhasedAttention(decode, prefill), **options) as engine:
        found = [out.outputs[0].token_ids for out in engine.generate(PROMPTS, params)]
    assert found == expected
    assert decode.num_rows > 0
    assert prefill.num_rows > 0


def test_the_flag_names_both_phases(tiny: Callable[[str], Path]) -> None:
    with Engine(str(tiny("llama")), attention="decode=torch,prefill=torch") as engine:
        assert engine.generate([PROMPTS[0]], SamplingParams(max_tokens=2))[0].error is None
    with pytest.raises(ConfigError, match="decode=NAME,prefill=NAME"):
        Engine(str(tiny("llama")), attention="decode=torch")
    with pytest.raises(PluginError, match="no attention named 'trch'; did you mean 'torch'"):
        Engine(str(tiny("llama")), attention="decode=torch,prefill=trch")
