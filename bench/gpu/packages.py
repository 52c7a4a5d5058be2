"""What the sections' processes find: extra packages, prebuilt FlashInfer modules, caches, and whether all is there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent

NEEDED = (
    *("torch", "numpy", "triton", "msgspec", "pluggy", "psutil", "pytest", "enginectl", "enginectl_attention_triton"),
)
"""Modules that every section imports, or asks for. The testing kits are written with pytest."""

ENGINE = ("transformers", "tokenizers", "safetensors")
"""Modules that a section with an engine needs besides."""

NEEDED_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("greedy", "first_start", "steps", "graphs", "host_gap", "memory"), ENGINE),
    **dict.fromkeys(("lora", "sampling", "speculation", "baseline"), ENGINE),
    "conformance": (*ENGINE, "pytest_asyncio", "pytest_timeout"),
}
"""Section to what it needs besides NEEDED."""

FIND = "import json, sys; from importlib.util import find_spec; print(json.dumps([find_spec(m) is None for m in sys.argv[1:]]))"
"""Nothing is imported."""


def missing_modules(environ: Mapping[str, str], sections: Sequence[str]) -> dict[str, list[str]]:
    """Module to the sections among these that lack it, as a process with this environment finds it."""
    needed: dict[str, list[str]] = {}
    for section in sections:
        for module in (*NEEDED, *NEEDED_BY.get(section, ())):
            needed.setdefault(module, []).append(section)
    command = [sys.executable, "-c", FIND, *needed]
    found = subprocess.run(command, env=dict(environ), capture_output=True, text=True, check=True)
    lacks = json.loads(found.stdout)
    return {module: users for (module, users), missing in zip(needed.items(), lacks, strict=True) if missing}


def missing_message(missing: Mapping[str, Sequence[str]], num_sections: int) -> str:
    """Which packages, for which sections, and what to do."""
    lines = [
        f"  {module.replace('_', '-')}: needed by "
        + ("every section" if len(users) == num_sections else ", ".join(users))
        for module, users in missing.items()
    ]
    return (
        f"packages are missing from the environment of {sys.executable}:\n" + "\n".join(lines) + "\n"
        "install them there, give a folder that has them as --wheels (README.md beside check.py says how to make it), "
        "or choose other --sections"
    )


def environment_of(wheels: Path | None, flashinfer_modules: Path | None) -> dict[str, str]:
    """The environment of every section. wheels are installed into a folder of their own, which comes first on the path;
    entry points are found there as anywhere else.
    """
    scratch = Path(tempfile.gettempdir()) / "enginectl-gpu"
    # Settings of the engine that happen to be in the environment are not what is measured.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ENGINECTL_")}
    environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    environ.setdefault("TRITON_CACHE_DIR", str(scratch / "triton"))
    path = [str(HERE)]
    if wheels is not None:
        path.append(str(install(wheels, scratch / "packages")))
    environ["PYTHONPATH"] = os.pathsep.join([*path, *filter(None, [environ.get("PYTHONPATH")])])
    if flashinfer_modules is not None:
        place_modules(flashinfer_modules, scratch / "packages")
        environ["FLASHINFER_DISABLE_JIT"] = "1"  # a module that is missing is an error, not minutes of nvcc
        environ.setdefault("FLASHINFER_WORKSPACE_BASE", str(scratch / "flashinfer"))
    return environ


def install(wheels: Path, target: Path) -> Path:
    """All of a folder. Raises SystemExit if that is not possible."""
    files = sorted(str(path) for path in wheels.glob("*.whl"))
    if not files:
        raise SystemExit(f"{wheels} holds no wheels; README.md beside check.py says how to make them")
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--target", str(target), *files]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(f"pip could not install the wheels of {wheels}")
    return target


def place_modules(modules: Path, packages: Path) -> None:
    """Where FlashInfer looks for ready-made modules. Raises SystemExit if there is nothing to place, or no place."""
    package = packages / "flashinfer"
    if not package.is_dir():
        raise SystemExit("--flashinfer-modules needs flashinfer-python among the --wheels")
    found = [path for path in sorted(modules.glob("*/*.so")) if path.stem == path.parent.name]
    if not found:
        raise SystemExit(f"{modules} holds no NAME/NAME.so; prebuild.py makes them")
    for path in found:
        place = package / "data" / "aot" / path.stem
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
