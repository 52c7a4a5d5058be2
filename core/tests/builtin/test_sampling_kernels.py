"""Whole weights, thresholds and the inversion, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from enginectl.builtin.sampling import kernels


def _logits(num_rows: int, width: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("width", [1, 5, 63, 64, 65, 1000, 4096])
def test_argmax_is_numpys_with_ties_to_the_lowest(width: int) -> None:
    logits = _logits(40, width).round()  # many ties
    assert kernels.argmax(logits).tolist() == logits.numpy().argmax(-1).tolist()


def test_argmax_reads_rows_that_lie_apart() -> None:
    wide = _logits(9, 500)
    assert kernels.argmax(wide[:, 10:400]).tolist() == wide[:, 10:400].argmax(-1).tolist()


@pytest.mark.parametrize("width", [64, 640, 49_152, 262_144])
def test_sums_of_weights_are_exact_in_any_order(width: int) -> None:
    """Law 4 rests on it: equal logits give the largest sum there is."""
    for logits in (torch.zeros(1, width), _logits(1, width, scale=1.0)):
        weights = kernels.to_weights(logits, None)
        exact = sum(int(weight) for weight in weights[0].tolist())
        assert exact <= 2**53
        assert int(kernels.block_sums(weights).sum()) == exact
        assert int(weights.flip(-1).double().cumsum(-1)[0, -1]) == exact


def test_weights_are_the_softmax() -> None:
    logits, temperature = _logits(8, 640), torch.linspace(0.3, 2.0, 8)
    weights = kernels.to_weights(logits.clone(), temperature).double()
    expected = torch.softmax(logits.double() / temperature.double()[:, None], -1)
    torch.testing.assert_close(weights / weights.sum(-1, keepdim=True), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("width", [64, 640, 12_800])
def test_kth_largest_is_that_of_a_sorted_row(width: int) -> None:
    x = _logits(12, width)
    x[0, : width // 2] = -torch.inf
    x[1] = x[1].round()
    k = torch.tensor([1, 2, 40, 63, 64, 65, 66, width // 2 + 1, width - 1, width, width + 1, 10**12])
    order = x.sort(dim=-1, descending=True).values
    found = kernels.kth_largest(x, k.numpy())
    for row in range(12):
        expected = order[row, k[row] - 1] if k[row] <= width else -torch.inf
        assert found[row] == expected, f"k = {k[row]}"


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 3.0, 30.0])
def test_nucleus_is_that_of_a_sorted_row(scale: float) -> None:
    top_p = torch.tensor([0.0, 0.01, 0.3, 0.5, 0.9, 0.99, 0.99999, 1.0], dtype=torch.float64)
    weights = kernels.to_weights(_logits(8, 6400, scale=scale), None)
    found = kernels.nucleus(weights, top_p)
    for row in range(7):
        order = np.sort(weights[row].double().numpy())[::-1]
        last = np.flatnonzero(np.cumsum(order) >= float(top_p[row]) * order.sum())[0]
        assert found[row] == order[last], f"top_p = {top_p[row]}"
    assert found[7] == 0


@pytest.mark.parametrize("k", [1, 5, 64])
def test_the_largest_of_few_blocks_are_the_largest_of_all(k: int) -> None:
    x = _logits(5, 64 * 300)
    x[1] = x[1].round()
    x[2, 64:] = -torch.inf
    assert torch.equal(kernels.largest(x, k), x.topk(k).values)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=200), st.floats(0, 1, exclude_min=True, exclude_max=True))
@settings(max_examples=200, deadline=None)
def test_pick_inverts_the_running_sum(counts: list[int], uniform: float) -> None:
    """Never a token of weight zero, however near to 0 or 1 the noise is."""
    counts[len(counts) // 2] += 1
    weights = kernels.whole_blocks(torch.tensor([counts], dtype=torch.float32)).clamp(min=0)
    token_id = int(kernels.pick(weights, torch.tensor([uniform], dtype=torch.float64)))
    assert counts[token_id] > 0
    point = min(int(uniform * sum(counts)), sum(counts) - 1)
    assert sum(counts[:token_id]) <= point < sum(counts[: token_id + 1])


@pytest.mark.parametrize("uniform", [2.0**-53, 1 - 2.0**-53])
def test_the_ends_of_the_noise_give_the_first_and_last_possible_token(uniform: float) -> None:
    logits = torch.full((1, 49_152), -torch.inf)
    logits[0, 700:40_000] = 0.0
    token_id = int(kernels.pick(kernels.to_weights(logits, None), torch.tensor([uniform], dtype=torch.float64)))
    assert token_id == (700 if uniform < 0.5 else 39_999)
