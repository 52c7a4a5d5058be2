"""Whether FlashInfer's kernels can be had, and building the ones we need with nvcc."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from enginectl.errors import UnsupportedError
from enginectl_attention_flashinfer import modules

PREBUILD = Path(__file__).resolve().parents[3] / "bench" / "gpu" / "prebuild.py"


@pytest.fixture(autouse=True)
def _nothing_installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a toolkit nor ready kernels, whatever this machine has."""
    if "slow" in request.keywords:
        return
    monkeypatch.setattr(modules, "find_spec", lambda name: None)
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda self: not str(self).startswith("/usr/local/cuda") and exists(self))


def test_without_nvcc_and_modules_the_reason_says_what_to_do(tmp_path: Path) -> None:
    """Before the weights are loaded, not in the first step."""
    reason = modules.no_modules(tmp_path, {"PATH": str(tmp_path)})
    assert reason is not None
    assert "needs nvcc" in reason
    assert "flashinfer-jit-cache" in reason


def test_nvcc_on_the_path_or_in_cuda_home_is_enough(tmp_path: Path) -> None:
    """Either."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    assert modules.no_modules(tmp_path, {"PATH": str(nvcc.parent)}) is None
    assert modules.no_modules(tmp_path, {"PATH": "", "CUDA_HOME": str(tmp_path)}) is None
    assert "FLASHINFER_DISABLE_JIT" in str(
        modules.no_modules(tmp_path, {"PATH": str(nvcc.parent), "FLASHINFER_DISABLE_JIT": "1"})
    )


def test_ready_modules_need_no_nvcc(tmp_path: Path) -> None:
    """As check.py puts them there."""
    module = tmp_path / "data" / "aot" / "some" / "some.so"
    module.parent.mkdir(parents=True)
    module.write_bytes(b"")
    assert modules.no_modules(tmp_path, {"PATH": "", "FLASHINFER_DISABLE_JIT": "1"}) is None


def test_a_part_says_what_else_could_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op set needs modules of its own: those of attention alone do not make it start."""
    library = ModuleType("flashinfer")
    library.__file__ = str(tmp_path / "__init__.py")
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    decode = tmp_path / "data" / "aot" / "batch_decode" / "batch_decode.so"
    decode.parent.mkdir(parents=True)
    decode.write_bytes(b"")
    assert modules.load_library("attention", "cuda") is library
    with pytest.raises(UnsupportedError, match=r"FLASHINFER_DISABLE_JIT.*or use --op-set triton"):
        modules.load_library("op set", "cuda", module="rope")
    with pytest.raises(
        UnsupportedError, match="op set 'flashinfer' needs an NVIDIA GPU, not 'cpu'; use --op-set torch"
    ):
        modules.load_library("op set", "cpu", module="rope")


def needs_nvcc() -> None:
    if find_spec("flashinfer") is None:
        pytest.skip("flashinfer-python is not installed")
    if not Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc").exists():
        pytest.skip("there is no nvcc")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_module_builds_for_hopper_and_offers_what_is_called(tmp_path: Path) -> None:
    """The smallest one, as bench/gpu/prebuild.py builds all of them. Nothing of it runs without a GPU."""
    needs_nvcc()
    only = "batch_decode.*_bf16_.*head_dim_qk_64_.*swa_False_use_logits_cap_False"
    command = [sys.executable, str(PREBUILD), "--out", str(tmp_path), "--only", only]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (module,) = tmp_path.glob("*/*.so")
    assert module.parent.name == module.stem
    symbols = subprocess.run(
        [shutil.which("nm") or "nm", "-D", "--defined-only", str(module)], capture_output=True, text=True, check=True
    ).stdout
    assert all(f"__tvm_ffi_{name}" in symbols for name in ("plan", "run"))
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not again.stdout, "what is there is left out"
