"""Log-probabilities against log_softmax in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from enginectl.builtin.sampling.logprobs import MIN_LOGPROB, token_logprobs
from enginectl.testing.tolerances import TOLERANCES

RTOL, ATOL = TOLERANCES["float32"]


def _logits(num_rows: int, vocab_size: int) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(2)) * 4


@pytest.mark.parametrize("vocab_size", [3, 100, 5003])
def test_they_are_the_log_softmax(vocab_size: int) -> None:
    logits = _logits(9, vocab_size)
    chosen = np.arange(9) * 31 % vocab_size
    num_top = np.arange(9) % 7
    before = logits.clone()
    entries = token_logprobs(logits, chosen, num_top)
    assert torch.equal(logits, before)
    expected = torch.log_softmax(logits.double(), -1)
    for i, entry in enumerate(entries):
        order = expected[i].argsort(descending=True).tolist()
        k = min(int(num_top[i]), vocab_size)
        assert entry.token_id == chosen[i]
        assert entry.rank == order.index(chosen[i]) + 1
        assert entry.logprob == pytest.approx(float(expected[i, chosen[i]]), rel=RTOL, abs=ATOL)
        assert list(entry.top_ids) == order[:k]
        assert entry.top_logprobs == pytest.approx(expected[i, order[:k]].tolist(), rel=RTOL, abs=ATOL)


def test_equal_tokens_come_by_ascending_id_also_at_the_cut() -> None:
    logits = torch.zeros(2, 300)
    logits[0, [250, 9, 130]] = 2.0
    first, second = token_logprobs(logits, [9, 299], [2, 4])
    assert first.top_ids == (9, 130)
    assert first.rank == 1
    assert second.top_ids == (0, 1, 2, 3)
    assert second.rank == 1


def test_an_entry_does_not_depend_on_the_batch() -> None:
    """Law 1: not even in its last bit."""
    logits, chosen, num_top = _logits(40, 20_011), np.arange(40) * 97, np.arange(40) % 21
    whole = token_logprobs(logits, chosen, num_top)
    for part in (np.arange(3, 4), np.arange(20, 33), np.array([39, 0, 5])):
        assert token_logprobs(logits[part], chosen[part], num_top[part]) == [whole[i] for i in part]


def test_none_asked_gives_the_chosen_token_alone() -> None:
    """Law 10."""
    (entry,) = token_logprobs(_logits(1, 50), [4], [0])
    assert entry.top_ids == ()
    assert entry.top_logprobs == ()
    assert token_logprobs(_logits(0, 50), [], []) == []


def test_what_json_cannot_hold_becomes_a_number() -> None:
    logits = _logits(2, 50)
    logits[0, 4] = -torch.inf
    logits[1, 5] = torch.nan
    impossible, broken = token_logprobs(logits, [4, 5], [1, 1])
    assert impossible.logprob == MIN_LOGPROB
    assert impossible.rank == 50
    assert broken.logprob == MIN_LOGPROB
