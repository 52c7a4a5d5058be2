"""What this distribution offers. Plain data; FlashInfer and torch are imported when a provider is built."""

from __future__ import annotations

from collections.abc import Sequence

from enginectl.context import Machine
from enginectl.hookspecs import hookimpl
from enginectl.provider import Capabilities, Provider, Role

MIN_CAPABILITY = (8, 0)
MIN_VERSION, BELOW_VERSION = (0, 6, 4), (0, 8)
ADVICE = 'pip install -c constraints.txt "enginectl-attention-flashinfer[gpu]"'


def unsupported(machine: Machine) -> str | None:
    """Why FlashInfer cannot serve here, or None."""
    if not machine.gpus:
        return "needs an NVIDIA GPU, and none was found"
    gpu = machine.gpus[0]
    if gpu.compute_capability < MIN_CAPABILITY:
        found = ".".join(map(str, gpu.compute_capability))
        return f"needs compute capability 8.0 or later (Ampere); {gpu.name} has {found}"
    version = machine.versions.get("flashinfer-python")
    if version is None:
        return f"flashinfer-python is not installed; {ADVICE}"
    if not MIN_VERSION <= _release(version) < BELOW_VERSION:
        return f"needs flashinfer-python>=0.6.4,<0.8, found {version}; {ADVICE}"
    return None


def _release(version: str) -> tuple[int, ...]:
    """Leading numbers: 0.6.10rc1 is (0, 6)."""
    numbers = []
    for part in version.split(".")[:3]:
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


@hookimpl
def enginectl_attention() -> Sequence[Provider]:
    """Behind `triton`, ahead of core's own: it serves where it is named, or where Triton's kernels cannot."""
    return [
        Provider(
            Role.ATTENTION,
            "flashinfer",
            "enginectl_attention_flashinfer.attention:build",
            rank=40,
            unsupported=unsupported,
            capabilities=Capabilities(
                devices=frozenset({"cuda"}),
                dtypes=frozenset({"bfloat16", "float16"}),
                head_dims=frozenset({64, 128, 256}),
                block_sizes=frozenset(1 << i for i in range(9)),
                sinks=False,
                graph_capture=True,
                host_lengths=True,
            ),
            summary="FlashInfer's paged decode and prefill; NVIDIA from Ampere on",
        )
    ]


@hookimpl
def enginectl_op_set() -> Sequence[Provider]:
    """Norms, RoPE and activations on CUDA, behind `triton`'s."""
    return [
        Provider(
            Role.OP_SET,
            "flashinfer",
            "enginectl_attention_flashinfer.ops:build",
            rank=40,
            unsupported=unsupported,
            capabilities=Capabilities(
                devices=frozenset({"cuda"}), dtypes=frozenset({"bfloat16", "float16"}), graph_capture=True
            ),
            summary="FlashInfer's norms, RoPE and activations; matrix products by torch",
        )
    ]
