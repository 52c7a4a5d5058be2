"""Prompt lookup against a search that is slow and obvious."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from enginectl import Engine
from enginectl.errors import EnginectlError
from enginectl.interfaces.speculator import DraftBatch
from enginectl.testing.tiny_models import save_tiny_model
from enginectl.types import SamplingParams
from enginectl_spec_ngram.config import NgramConfig
from enginectl_spec_ngram.speculator import NgramSpeculator

MAX_LEN = 400


def searched(tokens: list[int], shortest: int, longest: int, limit: int) -> list[int]:
    """The longest run of last tokens that came before, its latest occurrence, and what followed, repeated."""
    for length in range(longest, shortest - 1, -1):
        suffix = tokens[-length:]
        for start in range(len(tokens) - length - 1, -1, -1):
            if len(suffix) == length and tokens[start : start + length] == suffix:
                return list(itertools.islice(itertools.cycle(tokens[start + length :]), limit))
    return []


def proposals(
    speculator: NgramSpeculator, rows: list[int], lengths: list[int], limits: list[int], matrix: NDArray[np.int32]
) -> list[list[int]]:
    batch = DraftBatch(np.array(rows, np.int32), np.array(lengths, np.int32), np.array(limits, np.int32), matrix)
    drafts, counts = speculator.propose(batch)
    assert (counts <= batch.limit).all()
    return [row[:count].tolist() for row, count in zip(drafts, counts, strict=True)]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), vocab=st.sampled_from([2, 3, 12]), shortest=st.integers(1, 3), extra=st.integers(0, 3))
def test_proposals_are_those_of_a_search(data: st.DataObject, vocab: int, shortest: int, extra: int) -> None:
    """Rows grow by one or several tokens, are left out of steps, end and are taken again."""
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    config = NgramConfig(num_speculative_tokens=4, prompt_lookup_min=shortest, prompt_lookup_max=shortest + extra)
    speculator = NgramSpeculator(config, max_num_seqs=4, max_model_len=MAX_LEN)
    matrix = np.zeros((4, MAX_LEN + 5), np.int32)
    lengths = [0] * 4
    for _ in range(40):
        for row in range(4):
            if lengths[row] == 0 or random.random() < 0.05 or lengths[row] > MAX_LEN - 20:
                if lengths[row]:
                    speculator.remove_row(row)
                lengths[row] = int(random.integers(1, 200))
                matrix[row] = random.integers(0, vocab, MAX_LEN + 5)
                speculator.add_row(
                    row, matrix[row, : lengths[row]], SamplingParams(max_tokens=int(random.integers(1, 90)))
                )
            else:
                lengths[row] += int(random.choice([1, 1, 1, 2, 5]))
        rows = [int(row) for row in random.permutation(4)[: random.integers(1, 5)]]
        limits = [int(limit) for limit in random.integers(0, 5, len(rows))]
        found = proposals(speculator, rows, [lengths[row] for row in rows], limits, matrix)
        for row, limit, drafts in zip(rows, limits, found, strict=True):
            assert drafts == searched(matrix[row, : lengths[row]].tolist(), shortest, shortest + extra, limit)


def test_asking_twice_gives_the_same() -> None:
    speculator = NgramSpeculator(NgramConfig(), max_num_seqs=1, max_model_len=MAX_LEN)
    matrix = np.tile(np.arange(7, dtype=np.int32), (1, 40))
    speculator.add_row(0, matrix[0, :30], SamplingParams())
    first = proposals(speculator, [0], [30], [3], matrix)
    assert first == [[2, 3, 4]]
    assert proposals(speculator, [0], [30], [3], matrix) == first


def test_a_row_of_which_drafts_are_never_wanted_is_never_indexed() -> None:
    speculator = NgramSpeculator(NgramConfig(), max_num_seqs=2, max_model_len=MAX_LEN)
    matrix = np.tile(np.arange(7, dtype=np.int32), (2, 40))
    for row in range(2):
        speculator.add_row(row, matrix[row, :50], SamplingParams())
    assert proposals(speculator, [0, 1], [50, 50], [0, 2], matrix) == [[], [1, 2]]
    assert not speculator._index._tables[:, 0].any()
    speculator.remove_row(1)
    assert not speculator._index._tables.any(), "a row that ends leaves nothing behind"


def test_equal_hashes_are_not_trusted() -> None:
    """Two n-grams in one slot with one tag: the tokens decide."""
    speculator = NgramSpeculator(NgramConfig(), max_num_seqs=1, max_model_len=MAX_LEN)
    matrix = np.arange(MAX_LEN + 5, dtype=np.int32)[None].copy()
    speculator.add_row(0, matrix[0, :40], SamplingParams())
    speculator._index._hash = lambda rows, positions, tokens: np.full((4, positions.size), 7, np.uint64)  # type: ignore[method-assign]
    assert proposals(speculator, [0], [40], [4], matrix) == [[]]


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min is 4"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min is 0"),
        ({"prompt_lookup_max": 100}, "prompt_lookup_max is 100"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        ({"num_speculative_tokens": 1000}, "num_speculative_tokens is 1000"),
        ({"num_speculative_token": 4}, "num_speculative_token"),
        ({"num_speculative_tokens": "many"}, "int"),
    ],
)
def test_a_bad_configuration_is_refused(values: dict[str, object], word: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=word):
        msgspec.convert(values, NgramConfig)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min is 4"),
        ({"num_speculative_tokens": 20}, "num_speculative_tokens is 20, and sequences have at most 16 tokens"),
        ({"lookup": 2}, "lookup"),
        ({"method": "ngran"}, "ngran"),
    ],
)
def test_what_cannot_work_is_an_error_at_start(config: dict[str, object], word: str, tmp_path: Path) -> None:
    target = save_tiny_model("llama", tmp_path)
    with pytest.raises(EnginectlError, match=word):
        Engine(str(target), speculative_config={"method": "ngram", **config}, max_model_len=16, dtype="float32")


def test_a_row_that_is_asked_for_seldom_is_searched() -> None:
    """Probes of a row that grows in between, then drafts step after step: the same proposals, and no index until then."""
    speculator = NgramSpeculator(NgramConfig(), max_num_seqs=1, max_model_len=MAX_LEN)
    matrix = np.random.default_rng(0).integers(0, 4, (1, MAX_LEN + 5)).astype(np.int32)
    speculator.add_row(0, matrix[0, :70], SamplingParams())
    for length in (70, 170, 270):
        expected = searched(matrix[0, :length].tolist(), 2, 5, 4)
        assert expected
        assert proposals(speculator, [0], [length], [4], matrix) == [expected]
        assert not speculator._index._tables.any()
    for length in range(271, 290):
        assert proposals(speculator, [0], [length], [4], matrix) == [searched(matrix[0, :length].tolist(), 2, 5, 4)]
    assert speculator._index._tables.any()
