"""Weights are read beside the steps, and what was read is what is served."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enginectl import Engine, SamplingParams
from enginectl.engine.control import ControlDesk, NotYet
from enginectl.errors import RequestError
from enginectl.testing.stepping import ask, finish
from enginectl_lora_sgmv.checkpoint import CONFIG, WEIGHTS
from enginectl_lora_sgmv.library import Library, PreparedAdapter

SIGN = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


class Gate:
    """Stands in front of the library's reader: says which thread read, and holds it back while it is closed."""

    def __init__(self, library: Library) -> None:
        self._read, library._read = library._read, self
        self._open = threading.Event()
        self.threads: set[str] = set()
        self.set(is_open=True)

    def set(self, *, is_open: bool) -> None:
        (self._open.set if is_open else self._open.clear)()

    def __call__(self, path: Path) -> PreparedAdapter:
        self.threads.add(threading.current_thread().name)
        assert self._open.wait(60)
        return self._read(path)


@pytest.mark.parametrize(
    "engine", [{"max_loras": 1, "max_cpu_loras": 1, "overlap_depth": depth} for depth in (0, 1)], indirect=True
)
def test_no_step_waits_for_files(
    engine: Engine, versions: list[Path], signatures: list[list[int]], prompt: list[int]
) -> None:
    """A load that is asked for, and weights that left host memory, are read beside the steps: as long as the files give
    nothing, each step gives other rows a token; then only the copy to the slot is left.
    """
    desk, gate = ControlDesk(engine._assembled), Gate(engine._assembled.parts["adapter"].library)
    for i in range(2):
        engine.load_adapter(f"a{i}", str(versions[i]))
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    base = ask(engine, prompt, params)
    engine._step()
    gate.set(is_open=False)
    evicted = ask(engine, prompt, SIGN, adapter="a0")
    load = {"name": "a2", "path": str(versions[2])}
    for _ in range(20):
        before = engine.stats().num_generation_tokens
        with pytest.raises(NotYet):
            desk.handle("load_adapter", load)
        engine._step()
        assert engine.stats().num_generation_tokens == before + 1
        assert not evicted.take()
    gate.set(is_open=True)
    assert finish(engine, evicted)[0][0] == signatures[0]
    engine.load_adapter("a2", str(versions[2]))
    assert finish(engine, ask(engine, prompt, SIGN, adapter="a2"))[0][0] == signatures[2]
    finish(engine, base)
    assert all(name.startswith("adapters") for name in gate.threads), "no step, and no control message, reads"


def test_files_that_changed_are_not_read_again_in_silence(
    tiny: Callable[[str], Path], versions: list[Path], root: Path, prompt: list[int]
) -> None:
    """Weights dropped from host memory are those that were loaded, or the request ends with the reason."""
    copy = shutil.copytree(versions[0], root / "changing")
    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 64, "num_threads": 1}
    options |= {"max_loras": 1, "max_cpu_loras": 1, "plugin_options": {"sgmv": {"roots": [str(root)]}}}
    with Engine(str(tiny("llama")), enable_lora=True, **options) as engine:
        engine.load_adapter("mine", str(copy))
        engine.load_adapter("other", str(versions[1]))
        shutil.copy(versions[5] / WEIGHTS, copy)
        shutil.copy(versions[5] / CONFIG, copy)
        (output,) = engine.generate([prompt], SIGN, adapter="mine")
        assert output.error is not None
        assert "have changed since it was loaded" in output.error
        assert engine.generate([prompt], SIGN, adapter="other")[0].error is None
        engine.load_adapter("mine", str(copy), replace=True)
        assert engine.generate([prompt], SIGN, adapter="mine")[0].error is None


def test_what_was_read_for_a_refused_load_is_not_used_later(
    tiny: Callable[[str], Path], versions: list[Path], signatures: list[list[int]], root: Path, prompt: list[int]
) -> None:
    """Weights read ahead for a name that was taken stayed in memory, and a later load in place served them as new."""
    copy = shutil.copytree(versions[0], root / "refused")
    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 64, "num_threads": 1}
    options |= {"plugin_options": {"sgmv": {"roots": [str(root)]}}}
    with Engine(str(tiny("llama")), enable_lora=True, **options) as engine:
        engine.load_adapter("mine", str(copy))
        with pytest.raises(RequestError, match="is loaded"):
            engine.load_adapter("mine", str(copy))
        for name in (WEIGHTS, CONFIG):
            shutil.copy(versions[5] / name, copy)
        engine.load_adapter("mine", str(copy), replace=True)
        assert list(engine.generate([prompt], SIGN, adapter="mine")[0].outputs[0].token_ids) == signatures[5]


def test_pinned_adapters_stay_in_host_memory(tiny: Callable[[str], Path], versions: list[Path], root: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 64, "num_threads": 1}
    options |= {"max_loras": 1, "max_cpu_loras": 2}
    options |= {"plugin_options": {"sgmv": {"roots": [str(root)], "pinned": ["a0"]}}}
    with Engine(str(tiny("llama")), enable_lora=True, **options) as engine:
        for i in range(5):
            engine.load_adapter(f"a{i}", str(versions[i]))
        library = engine._assembled.parts["adapter"].library
        assert list(library._weights) == ["a0", "a4"]
