"""Weights sources: Hugging Face safetensors directories and GGUF files. Importing this package imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from enginectl.context import BuildContext
    from enginectl.interfaces.weights import WeightsSource


def build_safetensors(ctx: BuildContext) -> WeightsSource:
    """Factory of the `safetensors` provider."""
    from enginectl.builtin.weights.safetensors import SafetensorsSource

    return SafetensorsSource()


def build_gguf(ctx: BuildContext) -> WeightsSource:
    """Factory of the `gguf` provider. Quantised files dequantise straight to the dtype the configuration names."""
    from enginectl.builtin.weights.gguf import GGUFSource

    return GGUFSource(
        dtype=None if ctx.engine.dtype == "auto" else ctx.engine.dtype,
        num_threads=ctx.engine.num_threads or ctx.machine.num_cores,
    )
