"""Bits of a row depend on its own position and context, and on nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL

import pytest
import torch
from torch import Tensor

from enginectl.interfaces.model import LayerSpec
from enginectl.testing.attention import layer_spec, reference_attention
from enginectl.testing.paging import Pages
from enginectl.testing.tolerances import TOLERANCES
from enginectl_attention_cpu.attention import CpuAttention

LENGTH = 1300
"""More than two segments of 512 keys."""

LAYERS = {
    "full": layer_spec(num_heads=6, num_kv_heads=2, head_dim=64, v_head_dim=64, scale=0.125),
    "window": layer_spec(num_heads=6, num_kv_heads=2, head_dim=64, v_head_dim=64, scale=0.125, window=700),
    "chunk": layer_spec(num_heads=6, num_kv_heads=2, head_dim=64, v_head_dim=64, scale=0.125, chunk=600),
    "sinks": layer_spec(num_heads=6, num_kv_heads=2, head_dim=64, v_head_dim=64, scale=0.125, sinks=True),
    "odd heads": layer_spec(num_heads=5, num_kv_heads=1, head_dim=24, v_head_dim=40, scale=0.2),
    "wide": layer_spec(num_heads=2, num_kv_heads=1, head_dim=96, v_head_dim=112, scale=0.1),
}


class Sequence_:
    """One sequence's queries, keys and values, attended as it is asked for."""

    def __init__(self, layer: LayerSpec, dtype: torch.dtype, library: CDLL, *, threads: int = 2) -> None:
        random = torch.Generator().manual_seed(4)
        self.layer = layer
        self.q = torch.randn(LENGTH, layer.num_heads, layer.head_dim, generator=random).to(dtype)
        self.k = torch.randn(LENGTH, layer.num_kv_heads, layer.head_dim, generator=random).to(dtype)
        self.v = torch.randn(LENGTH, layer.num_kv_heads, layer.v_head_dim, generator=random).to(dtype)
        self.sinks = torch.randn(layer.num_heads, generator=random) if layer.sinks else None
        self.backend = CpuAttention([layer], block_size=16, dtype=dtype, num_threads=threads, library=library)
        blocks = 900
        store = [torch.full((blocks, 16, *x.shape[1:]), float("nan"), dtype=dtype) for x in (self.k, self.v)]
        self.backend.bind([(store[0], store[1])])
        self.pages = Pages(block_size=16, num_blocks=blocks)

    def attend(self, work: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Advance sequences, all of which hold the same tokens; each one's output."""
        ranges = [(self.pages.num_tokens(s), self.pages.num_tokens(s) + n) for s, n in work]
        plan = self.backend.prepare(self.pages.advance(work))
        q, k, v = (torch.cat([x[a:b] for a, b in ranges]) for x in (self.q, self.k, self.v))
        self.backend.write_kv(0, k, v, plan)
        out = self.backend.attend(0, q, plan, sinks=self.sinks)
        return list(out.split([n for _, n in work]))


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = getattr(torch, request.param)
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_bits_do_not_depend_on_chunks_batch_or_threads(name: str, dtype: torch.dtype, library: CDLL) -> None:
    """Law 1 and law 19's ground: a prompt at once, in chunks, by single queries, in company, on one thread or two."""
    layer = LAYERS[name]
    whole = Sequence_(layer, dtype, library, threads=1).attend([(0, LENGTH)])[0]
    scene = Sequence_(layer, dtype, library)
    at = 0
    for count in (1, 7, 512, 3, 61, 64, 500, 2):
        part = scene.attend([(0, count)])[0]
        assert torch.equal(part, whole[at : at + count]), f"{count} queries at {at}"
        at += count
    for _ in range(3):  # alone: heads and segments side by side
        assert torch.equal(scene.attend([(0, 1)])[0][0], whole[at])
        at += 1
    scene.attend([(s, at + s) for s in range(1, 10)])
    for _ in range(2):  # in company: all heads of a sequence at once
        parts = scene.attend([(s, 1) for s in range(10)])
        for s, part in enumerate(parts):
            assert torch.equal(part[0], whole[at + s]), f"sequence {s}"
        at += 1
    for s, part in enumerate(scene.attend([(s, 4) for s in range(10)])):  # drafts
        assert torch.equal(part, whole[at + s : at + s + 4])


@pytest.mark.parametrize("name", LAYERS)
def test_long_contexts_equal_the_reference(name: str, dtype: torch.dtype, library: CDLL) -> None:
    scene = Sequence_(LAYERS[name], dtype, library)
    scene.attend([(0, LENGTH - 2)])
    found = scene.attend([(0, 2)])[0]
    exact = reference_attention(scene.q[-2:], scene.k, scene.v, scene.layer, scene.sinks)
    tolerance = TOLERANCES[str(dtype).removeprefix("torch.")]
    torch.testing.assert_close(found.double(), exact, rtol=tolerance.rtol, atol=tolerance.atol)


def test_large_scores_do_not_overflow(dtype: torch.dtype, library: CDLL) -> None:
    layer = layer_spec(num_heads=2, num_kv_heads=1, head_dim=64, v_head_dim=64, scale=30.0)
    scene = Sequence_(layer, dtype, library)
    found = scene.attend([(0, 200)])[0]
    exact = reference_attention(scene.q[:200], scene.k[:200], scene.v[:200], layer)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found.double(), exact, rtol=0.05, atol=0.05)
