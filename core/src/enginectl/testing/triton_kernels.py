"""Triton kernels checked without a GPU: compiled ahead of time and measured, and their launches watched.

A plugin lists its kernels as `Spec`s and ends its module with `main(specs)`; `python -m that_module` then prints what
they take on each architecture, and `compiled_by` asks for it in a test. Needs triton 3.6 or later, and a process
without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ARCHITECTURES = (80, 86, 90, 100)
POINTERS = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16"}
ITEMSIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
_SHARED_LIMITS = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}


@dataclass(frozen=True)
class Spec:
    """One specialisation. pointers, sizes, floats: runtime arguments by kind, pointers with their types."""

    name: str
    kernel: Any
    pointers: dict[str, str]
    sizes: tuple[str, ...]
    floats: tuple[str, ...]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    enable_fp_fusion: bool = True


Specs = Callable[[int, Sequence[str]], Iterable[Spec]]
"""(capability, dtypes) to the kernels that such a GPU launches."""


@dataclass(frozen=True)
class Usage:
    """What a compiled kernel takes of a program. spill_bytes: local memory a thread; shared_bytes: of a program."""

    name: str
    capability: int
    registers: int | None
    spill_bytes: int | None
    shared_bytes: int
    shared_limit: int

    @property
    def is_too_much(self) -> bool:
        """It does not start, or spills."""
        return self.shared_bytes > self.shared_limit or bool(self.spill_bytes)


def shared_limit(capability: int) -> int:
    """Bytes of shared memory one program may use, by compute capability (80, 90 …)."""
    return _SHARED_LIMITS[max(known for known in _SHARED_LIMITS if known <= capability)]


# -- ahead of time ---------------------------------------------------------------------------------------------------


def compile_spec(spec: Spec, capability: int) -> Any:
    """Triton's compiled kernel for one architecture. As in real launches, pointers and strides are multiples of 16,
    except those that the kernel does not specialise on.
    """
    names = spec.kernel.arg_names
    signature: dict[str, str] = {}
    for name in names:
        if name in spec.pointers:
            signature[name] = spec.pointers[name]
        elif name in spec.sizes:
            signature[name] = "i32"
        elif name in spec.floats:
            signature[name] = "fp32"
        else:
            signature[name] = "constexpr"
    constants = {(names.index(name),): value for name, value in spec.constants.items()}
    plain = {param.name for param in spec.kernel.params if param.do_not_specialize}
    aligned = [name for name in names if (name in spec.pointers or "stride" in name) and name not in plain]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=spec.kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {
        "num_warps": spec.num_warps,
        "num_stages": spec.num_stages,
        "enable_fp_fusion": spec.enable_fp_fusion,
    }
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def usage(spec: Spec, capability: int) -> Usage:
    """Compile and measure."""
    compiled = compile_spec(spec, capability)
    registers, spills = resource_usage(compiled.asm["cubin"])
    limit = shared_limit(capability)
    return Usage(spec.name, capability, registers, spills, compiled.metadata.shared, limit)


def resource_usage(cubin: bytes) -> tuple[int | None, int | None]:
    """(registers, bytes of local memory) a thread, or (None, None) where cubin tools are missing."""
    tool = find_cuobjdump()
    if tool is None:
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    registers = [int(found) for found in re.findall(r"REG:(\d+)", text.stdout)]
    stacks = [int(found) for found in re.findall(r"STACK:(\d+)", text.stdout)]
    locals_ = [int(found) for found in re.findall(r"LOCAL:(\d+)", text.stdout)]
    return (max(registers), max(stacks + locals_)) if registers else (None, None)


def find_cuobjdump() -> str | None:
    """The one in Triton's wheel."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return str(path) if path.exists() else None


def table(usages: Sequence[Usage]) -> str:
    """Markdown: a row a kernel; registers / spilled bytes / shared KiB by architecture."""
    names = dict.fromkeys(found.name for found in usages)
    by_key = {(found.name, found.capability): found for found in usages}
    capabilities = sorted({found.capability for found in usages})

    def cell(one: Usage) -> str:
        return f"{one.registers} / {one.spill_bytes} / {one.shared_bytes / 1024:.1f}"

    lines = ["| kernel | " + " | ".join(f"sm_{c}" for c in capabilities) + " |", "|---" * (len(capabilities) + 1) + "|"]
    for name in names:
        lines.append(f"| {name} | " + " | ".join(cell(by_key[name, c]) for c in capabilities) + " |")
    return "\n".join(lines)


def main(specs: Specs, description: str | None) -> None:
    """Print the table, or with --json a list of what each kernel takes. Status 1 if one takes too much."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--architectures", type=int, nargs="*", default=list(ARCHITECTURES))
    parser.add_argument("--dtypes", nargs="*", default=list(POINTERS), choices=list(POINTERS))
    parser.add_argument("--only", default="", help="regular expression: kernels whose name it matches")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = [
        usage(spec, capability)
        for capability in args.architectures
        for spec in specs(capability, args.dtypes)
        if re.search(args.only, spec.name)
    ]
    if args.json:
        print(json.dumps([asdict(one) for one in found]))
    else:
        print(f"triton {triton.__version__}; registers / spilled bytes a thread / shared KiB a program\n")
        print(table(found))
    over = [one for one in found if one.is_too_much]
    for one in over:
        print(f"too much: {one}", file=sys.stderr)
    sys.exit(1 if over else 0)


def compiled_by(module: str, *arguments: str) -> list[Usage]:
    """What `python -m module` found, all of it within the limits. In a process of its own: this one may interpret
    kernels, and compiling is not for a forked one.
    """
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "error", "-m", module, "--json", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [Usage(**one) for one in json.loads(done.stdout)]
    for one in found:
        assert one.registers is None or 0 < one.registers <= 255, one
    return found


# -- launches --------------------------------------------------------------------------------------------------------


class _NoDriver:
    """A GPU that is never asked to do anything. The device's number is nobody else's: kernels keep a cache for each."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return -1

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)


@contextmanager
def watched_launches(capability: int = 90) -> Iterator[dict[str, set[str]]]:
    """Launches do nothing, whatever the tensors' device, and tell what would have been compiled: by kernel the
    different specialisations. What a step adds to them, requests would wait for.
    """
    found: dict[str, set[str]] = {}

    def note(*, key: str, fn: Any, **_: Any) -> bool:
        found.setdefault(fn.name.rpartition(".")[2], set()).add(key)
        return True  # nothing is compiled, so nothing is launched

    driver, knobs = triton.runtime.driver, triton.knobs.runtime
    assert not knobs.interpret, "launches are watched in a process without TRITON_INTERPRET"
    before, hook = driver._active, knobs.jit_cache_hook
    driver.set_active(_NoDriver(capability))
    knobs.jit_cache_hook = note
    try:
        yield found
    finally:
        driver._active, knobs.jit_cache_hook = before, hook
