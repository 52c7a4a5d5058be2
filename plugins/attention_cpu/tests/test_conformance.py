"""The conformance kit of attention backends, and its mutants."""

from __future__ import annotations

import pytest
from enginectl_attention_cpu import hooks

from enginectl.provider import Provider
from enginectl.testing.attention import AttentionConformance


class TestCpuAttention(AttentionConformance):
    @pytest.fixture
    def provider(self) -> Provider:
        return hooks.enginectl_attention()[0]
