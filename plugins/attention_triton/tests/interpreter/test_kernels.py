"""Attention kernels against the reference: splits, block edges, shared blocks, strided tables, odd heads, capture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from enginectl.context import BuildContext
from enginectl.interfaces.attention import AttentionBatch
from enginectl.interfaces.model import LayerSpec
from enginectl.provider import Provider
from enginectl.testing.attention import Scene, layer_spec, reference_attention
from enginectl.testing.tolerances import TOLERANCES
from enginectl_attention_triton import config, hooks
from enginectl_attention_triton.attention import TritonAttention
from enginectl_attention_triton.op_launch import turn_heads
from enginectl_attention_triton.plan import Device

TRITON = hooks.enginectl_attention()[0]
FEATURES = {
    "plain": layer_spec(),
    "window": layer_spec(window=40),
    "chunk": layer_spec(chunk=48),
    "cap": layer_spec(soft_cap=1.5, scale=2.0),
    "sinks": layer_spec(sinks=True),
}


def backend(layers: Sequence[LayerSpec], block_size: int, dtype: str = "float32", num_sms: int = 8) -> TritonAttention:
    device = Device("cpu", 80, num_sms)
    return TritonAttention(layers, block_size=block_size, device=device, dtype=getattr(torch, dtype))


def with_sms(num_sms: int) -> Provider:
    """Many multiprocessors and few rows make splits."""

    def factory(ctx: BuildContext) -> TritonAttention:
        assert ctx.model_spec is not None
        return backend(ctx.model_spec.layers, ctx.engine.block_size, ctx.dtype, num_sms)

    return dataclasses.replace(TRITON, factory=factory)


def make_batch(
    counts: Sequence[int], lengths: Sequence[int], tables: NDArray[np.int32], block_size: int
) -> AttentionBatch:
    """Rows of one group. tables: [num_seqs, max_blocks]."""
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    lens = np.array(lengths, np.int32)
    positions = [np.arange(n - c, n) for c, n in zip(counts, lengths, strict=True)]
    slots = [tables[i][p // block_size].astype(np.int64) * block_size + p % block_size for i, p in enumerate(positions)]
    return AttentionBatch(
        num_seqs=len(counts),
        num_tokens=int(starts[-1]),
        num_decodes=sum(c == 1 for c in counts),
        max_query_len=max(counts),
        max_seq_len=max(lengths),
        query_start=torch.from_numpy(starts),
        seq_lens=torch.from_numpy(lens),
        block_tables=torch.from_numpy(tables[None]),
        slot_mapping=torch.from_numpy(np.concatenate(slots)[None]),
        query_start_host=starts,
        seq_lens_host=lens,
    )


def random_store(layer: LayerSpec, num_blocks: int, block_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(7)
    shape = (num_blocks, block_size, layer.num_kv_heads)
    keys = torch.randn(*shape, layer.head_dim, generator=random)
    return keys.to(dtype), torch.randn(*shape, layer.v_head_dim, generator=random).to(dtype)


def check(
    layer: LayerSpec, store: tuple[Tensor, Tensor], q: Tensor, out: Tensor, batch: AttentionBatch, block_size: int
) -> None:
    """Each row of `out` against the fp64 reference over what the table says."""
    tolerance = TOLERANCES[str(q.dtype).removeprefix("torch.")]
    for i in range(batch.num_seqs):
        rows = slice(int(batch.query_start_host[i]), int(batch.query_start_host[i + 1]))
        length = int(batch.seq_lens_host[i])
        at = torch.arange(length)
        blocks = batch.block_tables[0, i].long()
        keys, values = (x[blocks[at // block_size], at % block_size] for x in store)
        exact = reference_attention(q[rows], keys, values, layer)
        allowed = tolerance.atol + tolerance.rtol * exact.abs()
        worst = ((out[rows].double() - exact).abs() / allowed).max().item()
        assert worst <= 1, f"row {i}: an error is {worst:.2f} times the tolerance"


@pytest.mark.parametrize("feature", FEATURES)
def test_splits_equal_the_reference(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows on a large device: keys are split and joined; some splits of short rows are empty."""
    monkeypatch.setattr(config, "MIN_SPLIT_KEYS", 8)
    layer = FEATURES[feature]
    scene = Scene(with_sms(8), [layer], block_size=4, device="cpu", dtype="float32")
    sinks = torch.tensor([2.0, -1.0, 0.5, 3.0]) if layer.sinks else None
    splits = spy_on_splits(scene, monkeypatch)
    scene.step([(0, 3), (1, 90)], sinks=sinks)
    scene.step([(0, 1), (1, 1)], sinks=sinks)
    scene.step([(1, 1), (0, 4), (2, 3)], sinks=sinks)
    assert max(splits) > 1
    assert 1 in splits


def spy_on_splits(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    prepare = scene.backend.prepare

    def spy(batch: AttentionBatch) -> Any:
        plan = prepare(batch)
        found.extend(part.num_splits for parts in plan.parts for part in parts)
        return plan

    monkeypatch.setattr(scene.backend, "prepare", spy)
    return found


@pytest.mark.parametrize("block_size", [1, 2, 8, 32, 64, 128, 256])
def test_every_block_size(block_size: int) -> None:
    """Blocks smaller and larger than a tile of keys."""
    scene = Scene(TRITON, [layer_spec()], block_size=block_size, device="cpu", dtype="float32")
    scene.step([(0, 7), (1, 70)])
    scene.step([(1, 1), (0, 5)])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(64, 64), (80, 80), (40, 24), (192, 128), (256, 256)])
def test_heads_of_any_size(dtype: str, head_dim: int, v_head_dim: int) -> None:
    """Odd sizes are padded by masks."""
    layer = layer_spec(head_dim=head_dim, v_head_dim=v_head_dim, scale=head_dim**-0.5)
    scene = Scene(TRITON, [layer], block_size=16, device="cpu", dtype=dtype)
    scene.step([(0, 5), (1, 34)])
    scene.step([(0, 1), (1, 1)])


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(14, 2), (20, 1), (71, 1)])
def test_wide_groups(num_heads: int, num_kv_heads: int) -> None:
    """Groups that do not divide a tile, and one larger than the usual tile."""
    layer = layer_spec(num_heads=num_heads, num_kv_heads=num_kv_heads)
    scene = Scene(TRITON, [layer], block_size=16, device="cpu", dtype="float32")
    scene.step([(0, 3), (1, 20)])
    scene.step([(0, 1), (1, 2)])


@pytest.mark.parametrize("length", [15, 16, 17, 63, 64, 65])
def test_block_and_tile_edges(length: int) -> None:
    """A context that ends before, at and behind the edge of a block and of a tile of keys."""
    layer, size = layer_spec(), 16
    store = random_store(layer, 12, size, torch.float16)
    store[0][0] = store[1][0] = float("nan")
    tables = np.random.default_rng(5).permutation(np.arange(1, 11)).reshape(2, 5).astype(np.int32)
    batch = make_batch([1, 3], [length, length], tables, size)
    q = torch.randn(4, 4, 16, generator=torch.Generator().manual_seed(1)).half()
    for store_part in store:  # what the rows have not written yet is poisoned
        for row in range(2):
            blocks = torch.from_numpy(tables[row]).long()
            flat = store_part[blocks].flatten(0, 1)
            flat[length:] = float("nan")
            store_part[blocks] = flat.view(5, size, *store_part.shape[2:])
    b = backend([layer], size, "float16")
    b.bind([store])
    check(layer, store, q, b.attend(0, q, b.prepare(batch)), batch, size)


def test_rows_may_share_blocks_and_tables_may_be_strided() -> None:
    """A common prefix is read by every row; the table is a slice of a wider one."""
    layer, size = layer_spec(), 8
    store = random_store(layer, 20, size, torch.float32)
    wide = np.zeros((3, 9), np.int32)
    wide[:, :2] = [4, 9]
    wide[0, 2:4], wide[1, 2:5], wide[2, 2:4] = [1, 2], [3, 5, 6], [7, 8]
    batch = make_batch([1, 1, 6], [21, 40, 30], wide, size)
    batch.block_tables = torch.from_numpy(np.repeat(wide, 2, axis=0))[None, ::2, :5]
    assert not batch.block_tables.is_contiguous()
    q = torch.randn(8, 4, 16, generator=torch.Generator().manual_seed(1))
    b = backend([layer], size)
    b.bind([store])
    check(layer, store, q, b.attend(0, q, b.prepare(batch)), batch, size)


def test_pools_may_be_larger_than_32_bits_count() -> None:
    """Blocks whose elements lie beyond 2**31 are written and read. Only those pages are ever touched."""
    layer, size = layer_spec(), 16
    num_blocks = (1 << 31) // (size * layer.num_kv_heads * layer.head_dim) + 8
    pools = [np.empty((num_blocks, size, layer.num_kv_heads, layer.head_dim), np.float16) for _ in range(2)]
    # The interpreter copies what it is given, so the backend knows the first block only; what counts is where it starts.
    store = [torch.from_numpy(pool[:1]) for pool in pools]
    tables = np.array([[num_blocks - 1, 3], [num_blocks - 2, num_blocks - 5]], np.int32)
    batch = make_batch([20, 25], [20, 25], tables, size)
    random = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(45, heads, 16, generator=random).half() for heads in (4, 2, 2))
    b = backend([layer], size, "float16")
    b.bind([(store[0], store[1])])
    plan = b.prepare(batch)
    b.write_kv(0, k, v, plan)
    written = [torch.from_numpy(pool) for pool in pools]
    check(layer, (written[0], written[1]), q, b.attend(0, q, plan), batch, size)
    cos, sin = torch.ones(45, 16), torch.zeros(45, 16)
    b.rope_and_write_kv(0, q, 2 * k, v, cos, sin, plan)
    slots = batch.slot_mapping[0]
    assert torch.equal(written[0].flatten(0, 1)[slots], 2 * k)
    assert torch.equal(written[1].flatten(0, 1)[slots], v)


def test_long_prompts_take_several_tiles() -> None:
    """Chunks of more queries than a tile has, beside drafts and decodes."""
    scene = Scene(TRITON, [layer_spec(), layer_spec(window=20)], block_size=16, device="cpu", dtype="float32")
    scene.step([(0, 70), (1, 33), (2, 4)])
    scene.step([(2, 1), (0, 3), (1, 40)])


def test_a_captured_plan_follows_its_updates() -> None:
    """Buffers stay in place; fewer rows than captured attend to nothing and write nothing."""
    layer, size = layer_spec(), 4
    random = np.random.default_rng(0)
    tables = random.permutation(np.arange(1, 49)).reshape(4, 12).astype(np.int32)
    store = random_store(layer, 50, size, torch.float32)
    b = backend([layer], size)
    b.bind([store])
    plan = b.capture(make_batch([1] * 4, [48] * 4, tables, size))
    pointers = [x.data_ptr() for x in (plan.seq_lens, plan.block_tables, plan.slot_mapping)]
    for lengths in ([5, 17, 30, 1], [6, 18], [44, 2, 3]):
        n = len(lengths)
        batch = make_batch([1] * n, lengths, tables[:n, : -(-max(lengths) // size)], size)
        before = [x.clone() for x in store]
        b.update(plan, batch)
        k, v = torch.randn(4, 2, 16), torch.randn(4, 2, 16)
        b.write_kv(0, k, v, plan)
        changed = (store[0] != before[0]).flatten(2).any(-1).flatten().nonzero().flatten()
        assert sorted(changed.tolist()) == sorted(batch.slot_mapping[0].tolist())
        q = torch.randn(4, 4, 16)
        out = b.attend(0, q, plan)
        check(layer, store, q, out, batch, size)
        assert not out[n:].any()
    assert pointers == [x.data_ptr() for x in (plan.seq_lens, plan.block_tables, plan.slot_mapping)]


@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_rope_fused_with_the_write_equals_one_after_the_other(rotary_dim: int) -> None:
    """Heads turned in whole and in part."""
    layer, size = layer_spec(), 4
    tables = np.array([[3, 1], [2, 4]], np.int32)
    batch = make_batch([1, 5], [4, 7], tables, size)
    q, k, v = torch.randn(6, 4, 16), torch.randn(6, 2, 16), torch.randn(6, 2, 16)
    cos, sin = torch.randn(6, rotary_dim), torch.randn(6, rotary_dim)
    stores = [tuple(torch.zeros(6, size, 2, 16) for _ in range(2)) for _ in range(2)]
    queries = []
    for store, fused in zip(stores, (True, False), strict=True):
        b = backend([layer], size)
        b.bind([store])
        plan, turned, key = b.prepare(batch), q.clone(), k.clone()
        if fused:
            b.rope_and_write_kv(0, turned, key, v, cos, sin, plan)
            assert torch.equal(key, k)
        else:
            turn_heads(turned, key, cos, sin)
            b.write_kv(0, key, v, plan)
        queries.append(turned)
    assert torch.equal(queries[0], queries[1])
    assert stores[0][0].any()
    for mine, other in zip(*stores, strict=True):
        assert torch.equal(mine, other)
