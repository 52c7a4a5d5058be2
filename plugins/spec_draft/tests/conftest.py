"""Draft models for tests: a target cut to its first layers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cut_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, int], Path]:
    """`cut_model(target, num_layers)`: a directory with the first layers of that model, and its tokenizer."""
    from transformers import AutoModelForCausalLM

    def cut(target: Path, num_layers: int) -> Path:
        directory = tmp_path_factory.mktemp("draft")
        whole = AutoModelForCausalLM.from_pretrained(target)
        whole.config.num_hidden_layers = num_layers
        part = type(whole)(whole.config)
        part.load_state_dict(whole.state_dict(), strict=False)
        part.save_pretrained(directory)
        for path in target.glob("*token*"):
            shutil.copy(path, directory)
        return directory

    return cut
