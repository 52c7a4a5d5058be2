"""Variants of the library: for this CPU, and built for less than it has."""

from __future__ import annotations

from ctypes import CDLL

import pytest

from enginectl_attention_cpu.build import FLAGS
from enginectl_attention_cpu.library import load_library

VARIANTS = {"native": (), "avx512": ("-mno-avx512bf16",), "avx2": ("-mno-avx512f",)}


@pytest.fixture(
    scope="session", params=["native", *(pytest.param(name, marks=pytest.mark.slow) for name in ("avx512", "avx2"))]
)
def library(request: pytest.FixtureRequest) -> CDLL:
    """The library that a test runs with."""
    return load_library((*FLAGS, *VARIANTS[request.param]))
