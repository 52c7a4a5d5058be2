"""The op set of native models: FlashInfer's norms, RoPE and gated activations around torch's matrix products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from enginectl.context import BuildContext
from enginectl.interfaces.ops import Block, BlockSpec, BlockWeights, Op, OpSet
from enginectl_attention_flashinfer.modules import load_library

HEAD_DIMS = frozenset({64, 128, 256})
"""Sizes of heads that the RoPE kernel is made for."""

VECTOR = 8
"""Elements that a thread loads at once: rows, and the halves that RoPE exchanges, are multiples of it."""


class FlashInferOpSet(OpSet):
    """Norms with their residual, RoPE from the step's cosines, gated activations."""

    batch_invariant = False

    def __init__(self, library: Any) -> None:
        self._library = library
        self._rope = Rope(library)

    def linear(self, weight: Tensor, bias: Tensor | None) -> Op:
        """torch's matrix product."""
        return lambda rows: linear(rows, weight, bias)

    def rms_norm(self, weight: Tensor, eps: float, *, plus_one: bool = False) -> Op:
        """Computed in fp32 and rounded once. A launch for no rows at all would fail."""
        norm = self._library.gemma_rmsnorm if plus_one else self._library.rmsnorm
        return lambda rows: norm(input=rows, weight=weight, eps=eps) if len(rows) else torch.empty_like(rows)

    def block(self, spec: BlockSpec, weights: BlockWeights) -> Block | None:
        """Dense layers whose sizes the kernels are made for."""
        return FlashInferBlock(spec, weights, self, self._library, self._rope) if fits(spec) else None


def fits(spec: BlockSpec) -> bool:
    """Whether the kernels take these sizes; otherwise core builds the layer, and only its norms are FlashInfer's."""
    return (
        not spec.num_experts
        and spec.head_dim in HEAD_DIMS
        and spec.rotary_dim % (2 * VECTOR) == 0
        and spec.hidden_size % VECTOR == 0
        and spec.intermediate_size % VECTOR == 0
    )


class Rope:
    """RoPE of q and k in place. The kernel reads cosines and sines of the pairs from one table, a row a position.

    Each token has its own row here. The table is put together once a step and RoPE, by the first layer that asks.
    """

    def __init__(self, library: Any) -> None:
        self._turn = library.apply_rope_with_cos_sin_cache_inplace
        self._made_of: tuple[Tensor, Tensor] | None = None
        self._table: Tensor | None = None
        self._rows: Tensor | None = None

    def turn(self, q: Tensor, k: Tensor, head_dim: int, cos: Tensor, sin: Tensor) -> None:
        """q: [num_tokens, num_heads * head_dim], k likewise, any row stride; cos, sin: see `Block.before`."""
        if self._made_of is None or self._made_of[0] is not cos or self._made_of[1] is not sin:
            half = cos.shape[1] // 2
            self._table = torch.cat((cos[:, :half], sin[:, :half]), dim=1)
            self._rows = torch.arange(len(cos), dtype=torch.int32, device=cos.device)
            self._made_of = (cos, sin)
        self._turn(positions=self._rows, query=q, key=k, head_size=head_dim, cos_sin_cache=self._table, is_neox=True)


class FlashInferBlock(Block):
    """A dense decoder layer in up to nine launches beside its matrix products."""

    def __init__(self, spec: BlockSpec, weights: BlockWeights, ops: OpSet, library: Any, rope: Rope) -> None:
        self.spec = spec
        self.linears: dict[str, Op] = {
            "qkv": ops.linear(weights.qkv, weights.qkv_bias),
            "output": ops.linear(weights.output, weights.output_bias),
            "gate_up": ops.linear(weights.gate_up, weights.gate_up_bias),
            "down": ops.linear(weights.down, weights.down_bias),
        }
        plus_one = spec.norm == "rms_plus_one"

        def norm(weight: Tensor | None) -> Op | None:
            return None if weight is None else ops.rms_norm(weight, spec.eps, plus_one=plus_one)

        self._attention_norm = norm(weights.attention_norm)
        self._attention_post_norm = norm(weights.attention_post_norm)
        self._mlp_post_norm = norm(weights.mlp_post_norm)
        self._q_norm, self._k_norm = norm(weights.q_norm), norm(weights.k_norm)
        self._mlp_norm_weight = weights.mlp_norm
        self._add_norm = library.gemma_fused_add_rmsnorm if plus_one else library.fused_add_rmsnorm
        self._gated = library.gelu_tanh_and_mul if spec.activation == "gelu_tanh" else library.silu_and_mul
        self._rope = rope
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self._sizes = [q_size, kv_size, kv_size]

    def before(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Norm, fused projection, norms of q and k, then RoPE in place."""
        spec = self.spec
        rows = hidden if self._attention_norm is None else self._attention_norm(hidden)
        q, k, v = torch.split(self.linears["qkv"](rows), self._sizes, dim=1)
        if self._q_norm is not None and self._k_norm is not None:
            q, k = self._normalise(q, self._q_norm), self._normalise(k, self._k_norm)
        if spec.rotary_dim and not spec.no_rope:
            self._rope.turn(q, k, spec.head_dim, cos, sin)
        heads = (rows.shape[0], -1, spec.head_dim)
        return q.view(heads), k.view(heads), v.view(heads)

    def _normalise(self, rows: Tensor, norm: Op) -> Tensor:
        """Each head by itself, or all of them together. Gemma's kernel has no form for heads, so they become rows."""
        if self.spec.qk_norm == "flat":
            return norm(rows)
        return norm(rows.reshape(-1, self.spec.head_dim)).view(rows.shape)

    def after(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Output projection and MLP; the residual is updated in place, the first time with the norm behind it."""
        scale = self.spec.residual_scale
        rows = self.linears["output"](attended)
        if self._attention_post_norm is not None:
            rows = self._attention_post_norm(rows)
        if self._mlp_norm_weight is None:
            rows = hidden.add_(rows, alpha=scale)
        else:
            rows = rows if scale == 1.0 else rows.mul_(scale)
            self._add_norm(input=rows, residual=hidden, weight=self._mlp_norm_weight, eps=self.spec.eps)
        rows = self.linears["down"](self._gated(input=self.linears["gate_up"](rows)))
        if self._mlp_post_norm is not None:
            rows = self._mlp_post_norm(rows)
        return hidden.add_(rows, alpha=scale)


def build(ctx: BuildContext) -> FlashInferOpSet:
    """Provider factory: needs ctx.device."""
    return FlashInferOpSet(load_library("op set", ctx.device, module="rope"))
