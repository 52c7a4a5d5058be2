"""The speculator kit."""

from __future__ import annotations

import pytest

from enginectl.testing.speculator import MakeSpeculator, SpeculatorConformance
from enginectl_spec_ngram.config import NgramConfig
from enginectl_spec_ngram.speculator import NgramSpeculator


class TestNgram(SpeculatorConformance):
    @pytest.fixture
    def make_speculator(self) -> MakeSpeculator:
        return lambda max_num_seqs, max_model_len: NgramSpeculator(
            NgramConfig(), max_num_seqs=max_num_seqs, max_model_len=max_model_len
        )
