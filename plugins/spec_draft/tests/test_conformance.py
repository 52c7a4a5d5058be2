"""The speculator kit, on a draft model bound to pages of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from enginectl import Engine
from enginectl.builtin.sampling.sampler import TorchSampler
from enginectl.interfaces.speculator import DraftStore, Speculator
from enginectl.testing.speculator import MakeSpeculator, SpeculatorConformance
from enginectl.testing.tiny_models import VOCAB_SIZE, save_tiny_model

BLOCK_SIZE = 4


class TestDraft(SpeculatorConformance):
    vocab_size = VOCAB_SIZE

    @pytest.fixture
    def make_speculator(self, tmp_path: Path, cut_model: Callable[[Path, int], Path]) -> Iterator[MakeSpeculator]:
        target = save_tiny_model("llama", tmp_path / "target")
        draft = {"model": str(cut_model(target, 1))}
        engines: list[Engine] = []

        def make(max_num_seqs: int, max_model_len: int) -> Speculator:
            engine = Engine(
                str(target),
                plugins=["draft"],
                plugin_options={"draft": draft},
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                max_num_batched_tokens=4096,  # every row is read to its end at once
                block_size=BLOCK_SIZE,
                dtype="float32",
            )
            engines.append(engine)
            speculator: Speculator = engine._assembled.parts["speculator"]
            speculator.bind(store(speculator, max_num_seqs, max_model_len))
            return speculator

        yield make
        for engine in engines:
            engine.close()


def store(speculator: Speculator, max_num_seqs: int, max_model_len: int) -> DraftStore:
    """Every row has the blocks it can ever need."""
    per_row = -(-max_model_len // BLOCK_SIZE)
    table = 1 + np.arange(max_num_seqs * per_row, dtype=np.int32).reshape(1, max_num_seqs, per_row)
    num_blocks = max_num_seqs * per_row + 1

    def pages(heads: int, width: int) -> torch.Tensor:
        return torch.zeros(num_blocks, BLOCK_SIZE, heads, width)

    return DraftStore(
        kv=[(pages(s.num_kv_heads, s.head_dim), pages(s.num_kv_heads, s.v_head_dim)) for s in speculator.kv_layers()],
        block_table=table,
        num_blocks=np.full(max_num_seqs, per_row, np.int32),
        block_size=BLOCK_SIZE,
        prompt_lens=np.ones(max_num_seqs, np.int32),
        processors=(),
        sampler=TorchSampler(max_num_seqs),
    )
