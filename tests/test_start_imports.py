"""A native model starts without transformers, and the API process without torch: each import takes a second."""

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


CHECK = """
import sys
from enginectl.cli.startup import check_start
from enginectl.config import EngineConfig, ServerConfig
from enginectl.config_sources import Resolved
from enginectl.logs import LogConfig
check_start(Resolved(EngineConfig(model=sys.argv[1]), ServerConfig(), LogConfig(), {}))
assert "torch" not in sys.modules, "torch was imported"
"""


def run_elsewhere(code: str, model: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("ENGINECTL_")}
    done = subprocess.run([sys.executable, "-c", code, str(model)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_native_model_starts_without_transformers(tiny_llama: Path) -> None:
    run_elsewhere(COMPOSE, tiny_llama)


@pytest.mark.model
def test_a_gguf_with_its_tokenizer_converted_starts_without_transformers(demo_model: Path) -> None:
    """Asking transformers for its version, to find the converted tokenizer, imported it: a second of each start."""
    from enginectl.builtin.weights.gguf import GGUFSource

    GGUFSource().open(demo_model).tokenizer_dir()
    run_elsewhere(COMPOSE, demo_model)


def test_what_is_checked_before_the_engine_starts_needs_no_torch(tiny_llama: Path) -> None:
    """To ask the weights sources who reads the model imported it, a second of each start."""
    run_elsewhere(CHECK, tiny_llama)
