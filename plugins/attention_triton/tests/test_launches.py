"""What a step launches, watched without a GPU: nothing is compiled anew because a step differs from the last one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from enginectl.testing.attention import layer_spec
from enginectl.testing.paging import Pages
from enginectl.testing.triton_kernels import watched_launches
from enginectl_attention_triton.attention import TritonAttention
from enginectl_attention_triton.op_launch import add_rms_norm, argmax, gated, rms_norm, sample, turn_heads
from enginectl_attention_triton.plan import Device

LAYERS = [
    layer_spec(num_heads=8, head_dim=64, v_head_dim=64),
    layer_spec(head_dim=64, v_head_dim=64, window=64, group=1),
]


def attention() -> TritonAttention:
    backend = TritonAttention(LAYERS, block_size=4, device=Device("cpu", 90, 132), dtype=torch.float16)
    backend.bind([(torch.zeros(400, 4, 2, 64).half(), torch.zeros(400, 4, 2, 64).half()) for _ in LAYERS])
    return backend


def run_step(backend: TritonAttention, pages: Pages, work: list[tuple[int, int]]) -> None:
    batch = pages.advance(work)
    plan = backend.prepare(batch)
    for index, layer in enumerate(LAYERS):
        qkv = torch.zeros(batch.num_tokens, layer.num_heads + 4, 64).half()
        q, k, v = qkv.split([layer.num_heads, 2, 2], dim=1)
        cos = torch.zeros(batch.num_tokens, 64)
        turn_heads(q, k, cos, cos)
        backend.write_kv(index, k, v, plan)
        backend.rope_and_write_kv(index, q, k, v, cos, cos, plan)
        backend.attend(index, q, plan)


def test_decode_kernels_serve_every_batch_and_length() -> None:
    """Rows, columns of the table, and where the tables of a second group begin: only the number of splits counts, and
    of those only whether there are several.
    """
    with watched_launches() as found:
        backend, pages = attention(), Pages(block_size=4, num_blocks=400, num_groups=2)
        pages.advance([(i, 1 + 40 * i) for i in range(8)])
        for num_rows in (1, 2, 3, 5, 7, 8):
            for _ in range(2):
                run_step(backend, pages, [(i, 1) for i in range(num_rows)])
        short = Pages(block_size=4, num_blocks=40, num_groups=2)
        for num_rows in (1, 3, 8):
            run_step(backend, short, [(i, 1) for i in range(num_rows)])
        long_split = {name: len(keys) for name, keys in found.items()}
    assert long_split.pop("join_kernel") <= 2  # 2 splits in the first layer
    # Without a window keys are split or not, within one of 64 they never are.
    assert long_split == {"attend_kernel": 3, "write_kernel": 1, "rope_kernel": 4}


def test_prompts_of_any_length_take_the_same_kernels() -> None:
    """One kernel a layer for rows with many queries, and a few for those with few, by powers of two."""
    with watched_launches() as found:
        backend = attention()
        for lengths in ([17], [40, 33], [100, 18, 31], [64], [80, 80, 80, 80]):
            run_step(backend, Pages(block_size=4, num_blocks=400, num_groups=2), list(enumerate(lengths)))
        assert len(found["attend_kernel"]) == 2
        for drafts in range(2, 17):
            run_step(backend, Pages(block_size=4, num_blocks=400, num_groups=2), [(0, drafts), (1, drafts)])
        assert len(found["attend_kernel"]) <= 2 + 2 * 3


def test_ops_serve_every_number_of_rows() -> None:
    """Also a single one, which Triton would make a constant."""
    with watched_launches() as found:
        for n in (1, 2, 3, 16, 17, 33):
            x, weight = torch.zeros(n, 48), torch.zeros(48)
            rms_norm(x, weight, 1e-5)
            add_rms_norm(x, x.clone(), weight, 1e-5)
            gated(torch.zeros(n, 96), "silu")
            logits = torch.zeros(n, 5000)
            argmax(logits)
            sample(logits, torch.from_numpy(np.zeros((5, n))), 40)
    assert {name: len(keys) for name, keys in found.items()} == {
        "rms_norm_kernel": 2,
        "gated_kernel": 1,
        "argmax_pieces_kernel": 1,
        "argmax_join_kernel": 1,
        "sample_kernel": 1,
    }
