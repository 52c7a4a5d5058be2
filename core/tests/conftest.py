"""Fixtures that tests of core share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_REPOSITORY = Path(__file__).resolve().parents[2]
_DEMO_MODEL = _REPOSITORY / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The GGUF file of the demo model: $ENGINECTL_DEMO_MODEL, or where scripts/bootstrap.sh puts it.

    Skips where it is absent, and fails instead under CI=true.
    """
    path = Path(os.environ.get("ENGINECTL_DEMO_MODEL") or _DEMO_MODEL)
    if path.is_file():
        return path
    reason = f"no demo model at {path}; fetch it with scripts/bootstrap.sh, or set ENGINECTL_DEMO_MODEL"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
