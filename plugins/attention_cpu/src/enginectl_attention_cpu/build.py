"""Compiles the kernels for this CPU, once, into a cache. Imports nothing heavy."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

from enginectl.errors import UnsupportedError
from enginectl.machine import COMPILERS, cpu_flags

FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-pthread",
    "-fno-math-errno",
    # A product and a sum are fused where the source says so, the same in every variant of a kernel.
    "-ffp-contract=off",
)

MAX_ERROR_CHARS = 4000


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where built libraries lie."""
    root = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "enginectl" / "cpu"


def source_key(cpu: frozenset[str], flags: Sequence[str] = FLAGS) -> str:
    """Names what a library was made from and for: sources, build flags, CPU features."""
    digest = hashlib.sha256("\0".join((*flags, *sorted(cpu))).encode())
    sources = resources.files("enginectl_attention_cpu") / "csrc"
    for file in sorted(sources.iterdir(), key=lambda file: file.name):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def built_library(cpu: frozenset[str], directory: Path | None = None, flags: Sequence[str] = FLAGS) -> Path | None:
    """A library built before from these sources for this CPU, by whatever compiler, or None."""
    found = sorted((directory or cache_dir()).glob(f"{source_key(cpu, flags)}-*.so"))
    return found[-1] if found else None


def find_compiler(path: str | None = None) -> str | None:
    """The system's C++ compiler."""
    return next((found for name in COMPILERS if (found := shutil.which(name, path=path))), None)


def library_path(
    directory: Path | None = None, *, flags: Sequence[str] = FLAGS, compiler: str | None = None
) -> tuple[Path, float]:
    """The built library, building it if need be, and the seconds that took.

    Raises UnsupportedError with the compiler's output.
    """
    directory = directory or cache_dir()
    cpu = cpu_flags()
    compiler = compiler or find_compiler()
    if compiler is None:
        found = built_library(cpu, directory, flags)
        if found is None:
            raise UnsupportedError(
                "plugin 'cpu': no C++ compiler was found (c++, g++ or clang++); install one, or use --attention torch "
                "and --op-set torch"
            )
        return found, 0.0
    library = directory / f"{source_key(cpu, flags)}-{_compiler_key(compiler)}.so"
    if library.exists():
        return library, 0.0
    started = time.monotonic()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two engines that start at once build once
            if not library.exists():
                _compile(compiler, flags, library)
    except OSError as error:
        raise UnsupportedError(
            f"plugin 'cpu': cannot build the kernels in {directory}: {error}; set XDG_CACHE_HOME to a directory that "
            "can be written, or use --attention torch and --op-set torch"
        ) from error
    return library, time.monotonic() - started


def _compiler_key(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    return hashlib.sha256(compiler.encode() + version).hexdigest()[:8]


def _compile(compiler: str, flags: Sequence[str], library: Path) -> None:
    """Under its name only when it is whole."""
    with (
        resources.as_file(resources.files("enginectl_attention_cpu") / "csrc") as sources,
        tempfile.TemporaryDirectory(dir=library.parent) as work,
    ):
        made = Path(work) / library.name
        command = [compiler, *flags, str(sources / "library.cpp"), "-o", str(made)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise UnsupportedError(
                f"plugin 'cpu': {compiler} could not compile the kernels (status {result.returncode}); use "
                f"--attention torch and --op-set torch, or another compiler. It said:\n{result.stderr[:MAX_ERROR_CHARS]}"
            )
        made.replace(library)
