"""The conformance kit with compiled kernels on a GPU."""

from __future__ import annotations

import pytest

from enginectl.provider import Provider
from enginectl.testing.attention import AttentionConformance
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
