"""Fixtures of the LoRA tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from enginectl.testing.tiny_models import save_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny random model by name, saved once."""
    made: dict[str, Path] = {}

    def save(name: str) -> Path:
        if name not in made:
            made[name] = save_tiny_model(name, tmp_path_factory.mktemp("models") / name)
        return made[name]

    return save
