"""Fixtures of the prefix-cache tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from enginectl.testing.tiny_models import save_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with room for 2,048 tokens."""
    directory = tmp_path_factory.mktemp("models") / "llama"
    return save_tiny_model("llama", directory, num_hidden_layers=2, max_position_embeddings=2048)
