"""The conformance kit of attention backends."""

from __future__ import annotations

import dataclasses
from ctypes import CDLL

import pytest
import torch

from enginectl.context import BuildContext
from enginectl.provider import Provider
from enginectl.testing.attention import AttentionConformance
from enginectl_attention_cpu import hooks
from enginectl_attention_cpu.attention import CpuAttention
from enginectl_attention_cpu.library import load_library


class TestCpuAttention(AttentionConformance):
    @pytest.fixture
    def provider(self, library: CDLL) -> Provider:
        """As it is registered, or on a library built for less than this CPU has."""
        registered = hooks.enginectl_attention()[0]
        if library is load_library():
            return registered

        def factory(ctx: BuildContext) -> CpuAttention:
            assert ctx.model_spec is not None
            return CpuAttention(
                ctx.model_spec.layers,
                block_size=ctx.engine.block_size,
                dtype=getattr(torch, ctx.dtype),
                num_threads=2,
                library=library,
            )

        return dataclasses.replace(registered, factory=factory)
