"""Fixtures of the LoRA tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from enginectl import Engine
from enginectl.testing.tiny_adapters import save_adapter
from enginectl.testing.tiny_models import save_tiny_model, tiny_model
from enginectl_lora_sgmv.checkpoint import CONFIG, WEIGHTS

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


# -- adapters that come, change and go: each version signs what it answers -----------------------------------------------

NUM_VERSIONS, NUM_SLOTS, NUM_TOKENS = 48, 4, 6
KINDS = ((4, ["q_proj", "v_proj"]), (8, "all-linear"), (12, ["down_proj"]), (16, ["gate_proj", "o_proj"]))
Signed = tuple[list[Path], list[list[int]]]
"""Checkpoints, and what each makes of the prompt; last what the base makes of it."""


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where adapters may be loaded from."""
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="session")
def prompt() -> list[int]:
    """The one that all versions answer."""
    return [int(token) for token in np.random.default_rng(4).integers(3, 250, 20)]


@pytest.fixture(scope="session")
def signed(root: Path, prompt: list[int]) -> Callable[[int], Signed]:
    """`signed(count)`: so many versions, made anew."""

    def make(count: int) -> Signed:
        directory = Path(tempfile.mkdtemp(dir=root))
        versions = write_versions(directory, count)
        return versions, sign_all(versions, prompt)

    return make


@pytest.fixture(scope="session")
def _versions(signed: Callable[[int], Signed]) -> Signed:
    return signed(NUM_VERSIONS)


@pytest.fixture
def versions(_versions: Signed) -> list[Path]:
    """Checkpoints, no two of which sign alike."""
    return _versions[0]


@pytest.fixture
def signatures(_versions: Signed) -> list[list[int]]:
    """What each version makes of the prompt, and last the base."""
    return _versions[1]


@pytest.fixture
def engine(tiny: Callable[[str], Path], root: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    options: dict[str, Any] = {
        "dtype": "float32",
        "num_threads": 1,
        "max_num_seqs": 8,
        "max_model_len": 64,
        "block_size": 4,
        "enable_lora": True,
        "max_loras": NUM_SLOTS,
        "plugins": ["prefix-cache", "sgmv"],
        "plugin_options": {"sgmv": {"roots": [str(root)], "max_wait_s": 0.05}},
    }
    with Engine(str(tiny("llama")), **{**options, **getattr(request, "param", {})}) as engine:
        yield engine
        backend = engine._assembled.parts["adapter"]
        assert backend.table.references == [0] * len(backend.table.slots)
        assert all(slot.reserved_for is None for slot in backend.table.slots)
        assert not backend.table._waiting_since
        assert not backend.library._users
        assert not backend.library._again
        assert engine.stats().num_blocks_in_use == 0
        engine.core.pool.check()


def write_versions(directory: Path, count: int) -> list[Path]:
    """Checkpoints of four kinds in turn. PEFT saves one of each kind; each version has numbers of its own."""
    kinds = [
        save_adapter("llama", directory / f"kind{i}", r=rank, lora_alpha=32, target_modules=modules)
        for i, (rank, modules) in enumerate(KINDS)
    ]
    tensors = [load_file(kind / WEIGHTS) for kind in kinds]
    found = []
    for i in range(count):
        random = torch.Generator().manual_seed(i)
        path = directory / str(i)
        path.mkdir()
        shutil.copy(kinds[i % len(KINDS)] / CONFIG, path)
        own = {
            name: torch.randn(tensor.shape, generator=random) / tensor.shape[1] ** 0.5
            for name, tensor in tensors[i % len(KINDS)].items()
        }
        save_file(own, path / WEIGHTS)
        found.append(path)
    return found


def sign(module: Any, prompt: list[int]) -> list[int]:
    """A whole forward a token: less than `generate` costs, for so few."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            tokens.append(int(module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def sign_all(versions: list[Path], prompt: list[int]) -> list[list[int]]:
    """What PEFT makes of the prompt with each version, and last the base: no two make the same."""
    from peft import PeftModel, set_peft_model_state_dict

    found: list[list[int]] = [[]] * len(versions)
    for kind in range(len(KINDS)):
        module = PeftModel.from_pretrained(tiny_model("llama"), versions[kind]).eval()
        for i in range(kind, len(versions), len(KINDS)):
            set_peft_model_state_dict(module, load_file(versions[i] / WEIGHTS))
            found[i] = sign(module, prompt)
    found.append(sign(tiny_model("llama"), prompt))
    assert len({tuple(tokens) for tokens in found}) == len(found)
    return found
