"""Build the FlashInfer modules that the engine and check.py use, on a machine with nvcc and without a GPU.

    python bench/gpu/prebuild.py --out modules                  all of them; those already there are left out
    python bench/gpu/prebuild.py --out modules --only 'head_dim_qk_128.*swa_False'
    python bench/gpu/prebuild.py --list                         names only, nothing is built

A module is a kind of attention (decode, prefill), a dtype, a head size, and whether there is a window and a soft cap;
page sizes and head counts are run-time values. Four more are the op set's. check.py --flashinfer-modules takes the folder as it is.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

DTYPES = ("bfloat16", "float16")
VARIANTS: tuple[tuple[int, bool, bool], ...] = (
    (64, False, False),
    (128, False, False),
    (128, True, False),
    (256, True, True),
    (64, True, False),
    (64, False, True),
    (64, True, True),
)
"""(head size, window, soft cap): the models of check.py first, then what only the conformance kit asks for."""


def find_cuda() -> Path:
    """The toolkit's folder. Raises SystemExit where there is no nvcc."""
    nvcc, home = shutil.which("nvcc"), os.environ.get("CUDA_HOME")
    places = [Path(home)] if home else []
    places += [Path(nvcc).resolve().parents[1]] if nvcc else []
    for place in (*places, Path("/usr/local/cuda")):
        # A launcher script of nvcc's name on PATH is not the toolkit.
        if all((place / part).exists() for part in ("bin/nvcc", "include/cuda_runtime.h", "lib64")):
            return place
    raise SystemExit("no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda: install the CUDA toolkit, of 12.8 or later")


def prepare(scratch: Path, architecture: str) -> None:
    """Set the environment in which FlashInfer names and generates modules. Before it is imported."""
    os.environ.update(FLASHINFER_WORKSPACE_BASE=str(scratch), FLASHINFER_CUDA_ARCH_LIST=architecture)
    os.environ.pop("FLASHINFER_DISABLE_JIT", None)


def prepare_compiler(scratch: Path, headers: list[Path]) -> None:
    """Set the environment in which it compiles.

    Modules link to the driver's library, which a machine without a GPU lacks: an empty one of its name stands for it.
    """
    cuda = find_cuda()
    stub = scratch / "stub"
    stub.mkdir(parents=True, exist_ok=True)
    options = ["-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", os.devnull, "-o", str(stub / "libcuda.so")]
    subprocess.run([shutil.which("gcc") or "cc", *options], check=True)
    os.environ.update(
        CUDA_HOME=str(cuda),
        FLASHINFER_EXTRA_LDFLAGS=f"-L{stub}",
        FLASHINFER_EXTRA_CUDAFLAGS=" ".join(f"-isystem {folder}" for folder in headers),
        FLASHINFER_EXTRA_CFLAGS=" ".join(f"-isystem {folder}" for folder in headers),
    )


def library_headers() -> list[Path]:
    """Folders with curand's and cublas's headers, from NVIDIA's wheels: a small toolkit comes without them."""
    spec = find_spec("nvidia")
    roots = [Path(root) for root in spec.submodule_search_locations or ()] if spec else []
    return sorted(path.parent for root in roots for path in root.rglob("curand.h"))


def specs() -> Iterator[Any]:
    """FlashInfer's own description of each module, as its wrappers will ask for it."""
    import torch
    from flashinfer.jit.activation import gen_act_and_mul_module
    from flashinfer.jit.attention import gen_batch_decode_module, gen_batch_prefill_module
    from flashinfer.jit.norm import gen_norm_module
    from flashinfer.jit.rope import gen_rope_module

    for head_dim, window, cap in VARIANTS:
        for name in DTYPES:
            dtype = getattr(torch, name)
            # dtypes of queries, keys, output and indices; sizes of keys and values; no position encoding of its own.
            common = (dtype, dtype, dtype, torch.int32, head_dim, head_dim, 0, window, cap)
            # Decode with tensor cores runs the prefill module.
            yield gen_batch_prefill_module("fa2", *common, False)
            yield gen_batch_decode_module(*common)
    yield from (
        gen_norm_module(),
        gen_rope_module(),
        gen_act_and_mul_module("silu"),
        gen_act_and_mul_module("gelu_tanh"),
    )


def build(spec: Any, out: Path) -> tuple[float, int]:
    """Compile one module into its place. Returns seconds and bytes."""
    start = time.monotonic()
    spec.build(verbose=False)
    target = out / spec.name / f"{spec.name}.so"
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    shutil.copyfile(spec.jit_library_path, partial)
    partial.replace(target)  # a build that is interrupted leaves no half module
    return time.monotonic() - start, target.stat().st_size


def main() -> int:
    """Build what is missing. Status 1 if a module could not be built."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("modules"))
    parser.add_argument("--only", default="", help="regular expression: modules whose name it matches")
    parser.add_argument("--architecture", default="9.0a", help="compute capability; an H200 has 9.0a")
    parser.add_argument("--list", action="store_true", help="print the names, build nothing")
    args = parser.parse_args()
    if find_spec("flashinfer") is None:
        raise SystemExit("flashinfer-python is not installed; README.md beside this file says how to get it")
    with tempfile.TemporaryDirectory(prefix="flashinfer-") as scratch:
        prepare(Path(scratch), args.architecture)
        if not args.list:
            prepare_compiler(Path(scratch), library_headers())
        wanted = [spec for spec in specs() if re.search(args.only, spec.name)]
        if args.list:
            print(*(spec.name for spec in wanted), sep="\n")
            return 0
        return build_all([spec for spec in wanted if not (args.out / spec.name / f"{spec.name}.so").exists()], args.out)


def build_all(missing: list[Any], out: Path) -> int:
    """One after another: nvcc takes the cores for itself."""
    failed = 0
    for spec in missing:
        try:
            seconds, size = build(spec, out)
        except RuntimeError as error:
            failed += 1
            print(f"FAILED {spec.name}: {str(error)[-2000:]}", file=sys.stderr, flush=True)
        else:
            print(f"{seconds:6.1f} s {size / 2**20:6.1f} MiB  {spec.name}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
