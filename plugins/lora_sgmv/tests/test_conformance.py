"""The backend keeps the contract in every dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from enginectl.interfaces.adapter import AdapterBackend
from enginectl.testing.adapter import AdapterConformance, MakeBackend
from enginectl_lora_sgmv.backend import SgmvAdapters, torch_kernels
from enginectl_lora_sgmv.config import SgmvConfig


class TestTorch(AdapterConformance):
    @pytest.fixture
    def make_backend(self, tmp_path: Path) -> MakeBackend:
        def make(num_slots: int, max_rank: int) -> AdapterBackend:
            return SgmvAdapters(
                max_loras=num_slots,
                max_lora_rank=max_rank,
                max_cpu_loras=8,
                dtype=getattr(torch, self.dtype_name),
                config=SgmvConfig(roots=(str(tmp_path),)),
                kernels=torch_kernels(),
            )

        return make


class TestTorchBfloat16(TestTorch):
    dtype_name = "bfloat16"


class TestTorchFloat16(TestTorch):
    dtype_name = "float16"
