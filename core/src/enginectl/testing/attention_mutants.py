"""Three ways for an attention backend to be wrong, made from any right one. The kit, and every exactness test of a
model, must notice them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from enginectl.context import BuildContext
from enginectl.interfaces.attention import AttentionBackend, AttentionBatch
from enginectl.provider import Provider


class PassingAttention(AttentionBackend):
    """A backend that passes everything on. Mutants change one thing."""

    def __init__(self, inner: AttentionBackend) -> None:
        self.inner = inner

    def bind(self, kv: list[tuple[Tensor, Tensor]]) -> None:
        self.inner.bind(kv)

    def prepare(self, batch: AttentionBatch) -> Any:
        return self.inner.prepare(batch)

    def write_kv(self, layer: int, k: Tensor, v: Tensor, plan: Any) -> None:
        self.inner.write_kv(layer, k, v, plan)

    def attend(self, layer: int, q: Tensor, plan: Any, *, sinks: Tensor | None = None) -> Tensor:
        return self.inner.attend(layer, q, plan, sinks=sinks)


class _Zeroed(PassingAttention):
    def attend(self, layer: int, q: Tensor, plan: Any, *, sinks: Tensor | None = None) -> Tensor:
        return torch.zeros_like(super().attend(layer, q, plan, sinks=sinks))


class _LostBlock(PassingAttention):
    def prepare(self, batch: AttentionBatch) -> Any:
        """Every second block is read where the one before it lies."""
        tables = batch.block_tables.clone()
        tables[:, :, 1::2] = tables[:, :, 0 : tables.shape[2] // 2 * 2 : 2]
        return super().prepare(dataclasses.replace(batch, block_tables=tables))


def zeroed(provider: Provider) -> Provider:
    """Attention that returns zeros."""
    return dataclasses.replace(provider, factory=lambda ctx: _Zeroed(provider.build(ctx)))


def lost_block(provider: Provider) -> Provider:
    """Attention that never reads every second block."""
    return dataclasses.replace(provider, factory=lambda ctx: _LostBlock(provider.build(ctx)))


def window_off_by_one(provider: Provider) -> Provider:
    """Attention whose windows reach one token too far."""

    def factory(ctx: BuildContext) -> Any:
        assert ctx.model_spec is not None
        wider = tuple(
            msgspec.structs.replace(layer, window=layer.window + 1) if layer.window else layer
            for layer in ctx.model_spec.layers
        )
        return provider.build(ctx.with_(model_spec=msgspec.structs.replace(ctx.model_spec, layers=wider)))

    return dataclasses.replace(provider, factory=factory)


MUTANTS: dict[str, Callable[[Provider], Provider]] = {
    "test_decode_equals_reference": zeroed,
    "test_window_counts_the_query_itself": window_off_by_one,
    "test_every_block_is_read": lost_block,
}
"""Check to the mutant it must notice."""
