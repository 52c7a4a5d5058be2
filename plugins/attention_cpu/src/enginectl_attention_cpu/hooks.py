"""What this distribution registers. Plain data; torch is not imported here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from enginectl.hookspecs import hookimpl
from enginectl.provider import Capabilities, Provider, Role

if TYPE_CHECKING:
    from enginectl.context import Machine

RANK = 10
"""Above core's torch backends, which serve where these cannot."""

NEEDED_FLAGS = frozenset({"avx2", "fma", "f16c"})

_CAPABILITIES = Capabilities(
    devices=frozenset({"cpu"}), dtypes=frozenset({"float32", "bfloat16", "float16"}), host_lengths=True
)


def unsupported(machine: Machine) -> str | None:
    """Why these kernels cannot serve on this machine, or None."""
    if machine.device != "cpu":
        return "this machine computes on its GPU"
    missing = sorted(NEEDED_FLAGS - machine.cpu_flags)
    if missing:
        return f"the CPU lacks {', '.join(missing)}"
    if not machine.has_compiler:
        from enginectl_attention_cpu.build import built_library

        if built_library(machine.cpu_flags) is None:
            return "there is no C++ compiler (c++, g++ or clang++) to build it with, and it has not been built before"
    return None


@hookimpl
def enginectl_attention() -> Sequence[Provider]:
    """Paged attention in place over the pages."""
    return [
        Provider(
            Role.ATTENTION,
            "cpu",
            "enginectl_attention_cpu.attention:build",
            rank=RANK,
            unsupported=unsupported,
            capabilities=_CAPABILITIES,
            summary="C++ over pages in place, AVX-512 or AVX2",
        )
    ]


@hookimpl
def enginectl_op_set() -> Sequence[Provider]:
    """Fused blocks, packed linears and the head of native models."""
    return [
        Provider(
            Role.OP_SET,
            "cpu",
            "enginectl_attention_cpu.ops:build",
            rank=RANK,
            unsupported=unsupported,
            capabilities=_CAPABILITIES,
            summary="C++ with packed weights, fused layers, batch-invariant",
        )
    ]
