"""FlashInfer's kernels are compiled on first use, or taken ready-made: can either be done here?"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from enginectl.errors import UnsupportedError


def load_library(part: str, device: str, *, module: str = "*") -> Any:
    """FlashInfer itself, for what is built in its name on this device. module: a kernel module that it cannot do without.

    Raises UnsupportedError off NVIDIA GPUs, and where kernels can be neither found nor compiled.
    """
    flag = "--" + part.replace(" ", "-")
    if not device.startswith("cuda"):
        raise UnsupportedError(f"{part} 'flashinfer' needs an NVIDIA GPU, not {device!r}; use {flag} torch")
    library = import_module("flashinfer")
    if (reason := no_modules(Path(str(library.__file__)).parent, module=module)) is not None:
        raise UnsupportedError(f"{part} 'flashinfer' {reason}, or use {flag} triton")
    return library


def no_modules(package: Path, environ: Mapping[str, str] = os.environ, *, module: str = "*") -> str | None:
    """Why no kernel can be had, or None. package: FlashInfer's folder.

    Otherwise the first step fails, after the weights are loaded.
    """
    ready = any((package / "data" / "aot").glob(f"{module}/*.so")) or find_spec("flashinfer_jit_cache") is not None
    if ready:
        return None
    if environ.get("FLASHINFER_DISABLE_JIT"):
        return (
            f"does not find its kernels in {package / 'data' / 'aot'}, and FLASHINFER_DISABLE_JIT forbids to compile "
            "them; unset it, put modules there (bench/gpu/prebuild.py makes them)"
        )
    if _has_nvcc(environ):
        return None
    return (
        "compiles its kernels on first use and needs nvcc, which is neither on PATH nor in CUDA_HOME or /usr/local/cuda; "
        "install the CUDA toolkit or flashinfer-jit-cache"
    )


def _has_nvcc(environ: Mapping[str, str]) -> bool:
    if shutil.which("nvcc", path=environ.get("PATH")):
        return True
    return any((Path(home) / "bin" / "nvcc").exists() for home in (environ.get("CUDA_HOME"), "/usr/local/cuda") if home)
