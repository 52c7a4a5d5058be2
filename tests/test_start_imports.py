"""A native model starts without transformers, whose import takes a second."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPOSE = """
import sys
from enginectl.compose import compose
from enginectl.config import EngineConfig
from enginectl.machine import detect_machine
config = EngineConfig(model=sys.argv[1], num_threads=1, max_model_len=256, num_gpu_blocks_override=64)
engine = compose(config, machine=detect_machine())
assert engine.info.eos_token_ids, "the tokenizer's files were read"
engine.close()
assert "transformers" not in sys.modules, "transformers was imported"
"""


def compose_elsewhere(model: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("ENGINECTL_")}
    done = subprocess.run([sys.executable, "-c", COMPOSE, str(model)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_native_model_starts_without_transformers(tiny_llama: Path) -> None:
    compose_elsewhere(tiny_llama)


@pytest.mark.model
def test_a_gguf_with_its_tokenizer_converted_starts_without_transformers(demo_model: Path) -> None:
    """Asking transformers for its version, to find the converted tokenizer, imported it: a second of each start."""
    from enginectl.builtin.weights.gguf import GGUFSource

    GGUFSource().open(demo_model).tokenizer_dir()
    compose_elsewhere(demo_model)
