"""The attention kit notices what it must notice."""

from __future__ import annotations

import pytest
import torch

from enginectl.provider import Provider, Role
from enginectl.testing.attention import AttentionConformance, layer_spec, reference_attention
from enginectl.testing.attention_mutants import MUTANTS

TORCH = Provider(Role.ATTENTION, "torch", "enginectl.builtin.attention_torch:build")


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("check", sorted(MUTANTS))
def test_a_mutant_fails_the_check_named_for_it(check: str, block_size: int) -> None:
    """And the original passes it."""
    run = getattr(AttentionConformance(), check)
    arguments = {"device": "cpu", "dtype": "float32", "block_size": block_size}
    run(provider=TORCH, **arguments)
    with pytest.raises(AssertionError):
        run(provider=MUTANTS[check](TORCH), **arguments)


def test_reference_agrees_with_softmax_by_hand() -> None:
    """Two keys, one head: the weights are those of the logistic function."""
    layer = layer_spec(num_heads=1, num_kv_heads=1, head_dim=1, v_head_dim=1, scale=1.0)
    k = torch.tensor([[[0.0]], [[1.0]]])
    v = torch.tensor([[[0.0]], [[1.0]]])
    out = reference_attention(torch.tensor([[[2.0]]]), k, v, layer)
    torch.testing.assert_close(out.view(()), torch.sigmoid(torch.tensor(2.0, dtype=torch.float64)))


def test_reference_window_of_one_sees_itself_only() -> None:
    """A window counts the query's own token."""
    layer = layer_spec(num_heads=1, num_kv_heads=1, head_dim=4, v_head_dim=4, window=1)
    q, k, v = torch.randn(3, 5, 1, 4, generator=torch.Generator().manual_seed(0)).unbind(0)
    torch.testing.assert_close(reference_attention(q, k, v, layer), v.double())
