"""What this distribution offers. Plain data; Triton and torch are imported when a provider is built."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

from enginectl.context import Machine
from enginectl.hookspecs import hookimpl
from enginectl.provider import Capabilities, Provider, Role

MIN_CAPABILITY = (8, 0)
MIN_TRITON = (3, 6)
_FLOATS = frozenset({"float32", "bfloat16", "float16"})
_CUDA = frozenset({"cuda"})
_BLOCK_SIZES = frozenset(1 << i for i in range(9))
_MAX_HEAD_DIM = 256


def unsupported(machine: Machine) -> str | None:
    """Why the kernels cannot run here, or None."""
    if not machine.gpus:
        return "needs an NVIDIA GPU, and none was found"
    gpu = machine.gpus[0]
    if gpu.compute_capability < MIN_CAPABILITY:
        found = ".".join(map(str, gpu.compute_capability))
        return f"needs compute capability 8.0 or later (Ampere); {gpu.name} has {found}"
    version = machine.versions.get("triton")
    if version is None:
        return "needs triton>=3.6, which is not installed; pip install -c constraints.txt triton"
    if _release(version) < MIN_TRITON:
        return f"needs triton>=3.6, found {version}; pip install -c constraints.txt -U triton"
    if not os.environ.get("CC") and shutil.which("gcc") is None and shutil.which("clang") is None:
        return "needs a C compiler, with which Triton builds what launches a kernel: install gcc or clang, or set CC"
    return None


def _release(version: str) -> tuple[int, ...]:
    """Major and minor."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


@hookimpl
def enginectl_attention() -> Sequence[Provider]:
    """Paged attention on CUDA, ahead of core's own."""
    return [
        Provider(
            Role.ATTENTION,
            "triton",
            "enginectl_attention_triton.attention:build",
            rank=50,
            unsupported=unsupported,
            capabilities=Capabilities(
                devices=_CUDA,
                dtypes=_FLOATS,
                head_dims=frozenset(range(1, _MAX_HEAD_DIM + 1)),
                block_sizes=_BLOCK_SIZES,
                graph_capture=True,
            ),
            summary="split-KV decode, tiled prefill, KV write; NVIDIA from Ampere on",
        )
    ]


@hookimpl
def enginectl_op_set() -> Sequence[Provider]:
    """Norms, activations and RoPE on CUDA."""
    return [
        Provider(
            Role.OP_SET,
            "triton",
            "enginectl_attention_triton.ops:build",
            rank=50,
            unsupported=unsupported,
            capabilities=Capabilities(devices=_CUDA, dtypes=_FLOATS, graph_capture=True),
            summary="fused norms, RoPE and activations; matrix products by torch",
        )
    ]


@hookimpl
def enginectl_sampler() -> Sequence[Provider]:
    """Sampling on CUDA in one launch."""
    return [
        Provider(
            Role.SAMPLER,
            "triton",
            "enginectl_attention_triton.sampler:build",
            rank=50,
            unsupported=unsupported,
            capabilities=Capabilities(devices=_CUDA),
            summary="greedy, temperature, top-k, top-p, min-p in one kernel; never waits for the GPU",
        )
    ]
