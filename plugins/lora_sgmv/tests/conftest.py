"""Fixtures of the LoRA tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from enginectl.testing.tiny_models import save_tiny_model

DEMO_MODEL = Path(__file__).resolve().parents[3] / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny random model by name, saved once."""
    made: dict[str, Path] = {}

    def save(name: str) -> Path:
        if name not in made:
            made[name] = save_tiny_model(name, tmp_path_factory.mktemp("models") / name)
        return made[name]

    return save


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The GGUF file of the demo model; skips where it is absent, and fails instead under CI=true."""
    path = Path(os.environ.get("ENGINECTL_DEMO_MODEL") or DEMO_MODEL)
    if path.is_file():
        return path
    reason = f"no demo model at {path}; fetch it with scripts/bootstrap.sh, or set ENGINECTL_DEMO_MODEL"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
