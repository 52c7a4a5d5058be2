"""What a linear launches, watched without a GPU: a step of another length takes the same kernels."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from enginectl.testing.triton_kernels import watched_launches
from enginectl_lora_sgmv.triton_store import TritonStore, device_segments


def test_every_number_of_tokens_takes_the_same_kernels() -> None:
    """Few tokens and many differ, for which tiles differ; nothing else does."""
    store = TritonStore(3, 8, 256, (96, 32), dtype=torch.float16, device="cpu")
    with watched_launches() as found:
        for few_or_many in ((1, 2, 3, 16, 17, 64), (65, 66, 80, 100, 1000)):
            for n in few_or_many:
                step = device_segments(torch.zeros(n, dtype=torch.int32), [8, 8, 8])
                store.add(torch.zeros(n, 256).half(), torch.zeros(n, 128).half(), step)
            if n == 64:
                assert {name: len(keys) for name, keys in found.items()} == {"shrink_kernel": 1, "expand_kernel": 1}
    assert {name: len(keys) for name, keys in found.items()} == {"shrink_kernel": 2, "expand_kernel": 2}
