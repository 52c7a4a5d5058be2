"""The torch attention backend."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from enginectl.builtin import attention_torch
from enginectl.builtin.attention_torch import padded_length
from enginectl.interfaces.model import LayerSpec
from enginectl.provider import Provider, Role
from enginectl.testing.attention import AttentionConformance, Scene, context_for, layer_spec
from enginectl.testing.paging import Pages

TORCH = Provider(Role.ATTENTION, "torch", "enginectl.builtin.attention_torch:build")


class TestTorchAttention(AttentionConformance):
    """The kit on the CPU."""

    @pytest.fixture
    def provider(self) -> Provider:
        """Core's own."""
        return TORCH


@pytest.mark.gpu
class TestTorchAttentionOnGpu(AttentionConformance):
    """The kit on a GPU."""

    @pytest.fixture
    def provider(self) -> Provider:
        """Core's own."""
        return TORCH

    @pytest.fixture
    def device(self) -> str:
        """The first GPU."""
        return "cuda"


@pytest.mark.parametrize("layer", [layer_spec(), layer_spec(window=8), layer_spec(soft_cap=2.0)])
def test_long_prompts_are_cut_and_still_exact(layer: LayerSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt longer than a piece attends as if it were whole."""
    monkeypatch.setitem(attention_torch.MAX_PIECE, "cpu", 24)
    scene = Scene(TORCH, [layer], block_size=4, device="cpu", dtype="float32")
    scene.step([(0, 5), (1, 61)])
    scene.step([(0, 1), (1, 49)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_queries", [1, 4])
def test_a_row_is_bitwise_the_same_whatever_its_neighbours(dtype: str, num_queries: int) -> None:
    """Law 1: a row's padding depends on that row alone."""
    layer = layer_spec(num_heads=6, head_dim=64, v_head_dim=64)
    backend = TORCH.build(context_for([layer], block_size=16, device="cpu", dtype=dtype))
    random = torch.Generator().manual_seed(2)
    store = [torch.randn(200, 16, 2, 64, generator=random).to(backend._dtype) for _ in range(2)]
    backend.bind([(store[0], store[1])])
    q = torch.randn(num_queries * 4, 6, 64, generator=random).to(backend._dtype)
    pages = Pages(block_size=16, num_blocks=200)
    pages.advance([(0, 137), (1, 9), (2, 300), (3, 133)])
    crowd = pages.advance([(0, num_queries), (1, num_queries), (2, num_queries), (3, num_queries)])
    alone = dataclasses.replace(
        crowd,
        num_seqs=1,
        num_tokens=num_queries,
        block_tables=crowd.block_tables[:, :1],
        query_start_host=crowd.query_start_host[:2],
        seq_lens_host=crowd.seq_lens_host[:1],
    )
    together = backend.attend(0, q, backend.prepare(crowd))[:num_queries]
    assert torch.equal(backend.attend(0, q[:num_queries], backend.prepare(alone)), together)
    assert together.abs().max() > 0


def test_padded_length_wastes_at_most_half() -> None:
    """Few distinct lengths, none too short."""
    counts = torch.arange(1, 5000).numpy()
    padded = padded_length(counts)
    assert (padded >= counts).all()
    assert (padded[16:] <= counts[16:] * 1.5).all()
    assert len(set(padded.tolist())) < 24
