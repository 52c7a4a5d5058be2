"""The conformance kit over our kernels, in the interpreter."""

from __future__ import annotations

import pytest

from enginectl.provider import Provider
from enginectl.testing.attention import AttentionConformance
from enginectl_attention_triton import hooks


class _Triton(AttentionConformance):
    @pytest.fixture
    def provider(self) -> Provider:
        """What the plugin registers."""
        return hooks.enginectl_attention()[0]


class TestFloat32(_Triton):
    """Every block size of the kit."""

    @pytest.fixture
    def dtype(self) -> str:
        """fp32."""
        return "float32"


class TestFloat16(_Triton):
    """One block size; the others are slow."""

    @pytest.fixture
    def dtype(self) -> str:
        """fp16."""
        return "float16"

    @pytest.fixture
    def block_size(self) -> int:
        """As served by default."""
        return 16


class TestBfloat16(_Triton):
    """One block size; the others are slow."""

    @pytest.fixture
    def dtype(self) -> str:
        """bf16."""
        return "bfloat16"

    @pytest.fixture
    def block_size(self) -> int:
        """Small, so that every row has several."""
        return 4


@pytest.mark.slow
class TestHalves(_Triton):
    """What the classes above leave out."""

    @pytest.fixture(params=[("float16", 1), ("float16", 4), ("bfloat16", 1), ("bfloat16", 16)])
    def case(self, request: pytest.FixtureRequest) -> tuple[str, int]:
        """(dtype, block size)."""
        found: tuple[str, int] = request.param
        return found

    @pytest.fixture
    def dtype(self, case: tuple[str, int]) -> str:
        """Of the case."""
        return case[0]

    @pytest.fixture
    def block_size(self, case: tuple[str, int]) -> int:
        """Of the case."""
        return case[1]
