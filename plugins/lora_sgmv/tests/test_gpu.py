"""The conformance kit with compiled kernels on a GPU, and steps recorded there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from enginectl.interfaces.adapter import AdapterBackend
from enginectl.testing.adapter import AdapterConformance, MakeBackend
from enginectl_lora_sgmv.backend import SgmvAdapters, choose_kernels
from enginectl_lora_sgmv.config import SgmvConfig


@pytest.mark.gpu
class TestTriton(AdapterConformance):
    """What serves on a GPU when nothing is asked for."""

    device = "cuda"

    @pytest.fixture
    def make_backend(self, tmp_path: Path) -> MakeBackend:
        """As the plugin builds it."""

        def make(num_slots: int, max_rank: int) -> AdapterBackend:
            return SgmvAdapters(
                max_loras=num_slots,
                max_lora_rank=max_rank,
                max_cpu_loras=8,
                dtype=getattr(torch, self.dtype_name),
                device=self.device,
                config=SgmvConfig(roots=(str(tmp_path),)),
                kernels=choose_kernels("auto", self.device),
            )

        return make


@pytest.mark.gpu
class TestTritonBfloat16(TestTriton):
    """Tensor cores."""

    dtype_name = "bfloat16"
