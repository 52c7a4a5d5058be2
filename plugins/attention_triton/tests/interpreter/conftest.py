"""Collected only where kernels run in Triton's interpreter: `test_in_interpreter.py` starts such a process."""

from __future__ import annotations

import os
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """numpy, which computes here, warns of infinities that the kernels mean."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore:(overflow|divide by zero) encountered:RuntimeWarning"))


@pytest.fixture(autouse=True)
def _bfloat16_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bfloat16 as bit patterns and multiplies those: widen what goes into a dot.

    Our kernels compute with bfloat16 nowhere else, and the tests would show it if they did.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    plain = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain(
            self, *(self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)), *rest
        )

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
