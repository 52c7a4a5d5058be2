"""The conformance kits with compiled kernels on a GPU."""

from __future__ import annotations

import pytest

from enginectl.provider import Provider
from enginectl.testing.attention import AttentionConformance
from enginectl.testing.sampler import MakeSampler, SamplerConformance
from enginectl_attention_triton import hooks


@pytest.mark.gpu
class TestTriton(AttentionConformance):
    """Every dtype and block size of the kit."""

    @pytest.fixture
    def provider(self) -> Provider:
        """What the plugin registers."""
        return hooks.enginectl_attention()[0]

    @pytest.fixture
    def device(self) -> str:
        """The first GPU."""
        return "cuda"


@pytest.mark.gpu
class TestTritonSampler(SamplerConformance):
    """Compiled, on the GPU."""

    device = "cuda"

    @pytest.fixture
    def make_sampler(self) -> MakeSampler:
        """What the plugin registers."""
        from enginectl_attention_triton.sampler import TritonSampler

        return TritonSampler
