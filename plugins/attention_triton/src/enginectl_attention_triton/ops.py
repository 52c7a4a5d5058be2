"""The op set of native models on a GPU: our kernels around torch's matrix products."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from enginectl.context import BuildContext
from enginectl.interfaces.ops import Block, BlockSpec, BlockWeights, Head, Op, OpSet
from enginectl_attention_triton.attention import find_device
from enginectl_attention_triton.op_launch import add_rms_norm, argmax, gated, rms_norm, turn_heads


class TritonOpSet(OpSet):
    """Norms with their residual, RoPE with the norms of q and k, gated activations, and the greedy search."""

    batch_invariant = False

    def linear(self, weight: Tensor, bias: Tensor | None) -> Op:
        """torch's matrix product."""
        return lambda rows: linear(rows, weight, bias)

    def rms_norm(self, weight: Tensor, eps: float, *, plus_one: bool = False) -> Op:
        """Computed in fp32 and rounded once."""
        return lambda rows: rms_norm(rows, weight, eps, plus_one=plus_one)

    def block(self, spec: BlockSpec, weights: BlockWeights) -> Block | None:
        """Every dense structure; mixtures of experts are core's."""
        return None if spec.num_experts else TritonBlock(spec, weights, self)

    def head(self, norm: Tensor | None, weight: Tensor, spec: BlockSpec) -> Head | None:
        """Norm, product with fp32 sums, greedy search that breaks ties as promised."""
        if norm is None:
            return None
        return TritonHead(self.rms_norm(norm, spec.eps, plus_one=spec.norm == "rms_plus_one"), weight)


class TritonBlock(Block):
    """A dense decoder layer in seven launches beside its matrix products, or fewer."""

    def __init__(self, spec: BlockSpec, weights: BlockWeights, ops: OpSet) -> None:
        assert not spec.num_experts, "dense layers only"
        self.spec = spec
        self.linears: dict[str, Op] = {
            "qkv": ops.linear(weights.qkv, weights.qkv_bias),
            "output": ops.linear(weights.output, weights.output_bias),
            "gate_up": ops.linear(weights.gate_up, weights.gate_up_bias),
            "down": ops.linear(weights.down, weights.down_bias),
        }
        self._plus_one = spec.norm == "rms_plus_one"
        self._attention_norm = weights.attention_norm
        self._attention_post_norm = weights.attention_post_norm
        self._mlp_norm = weights.mlp_norm
        self._mlp_post_norm = weights.mlp_post_norm
        self._head_norms: tuple[Tensor, Tensor] | None = None
        self._flat_norms: tuple[Tensor, Tensor] | None = None
        if weights.q_norm is not None and weights.k_norm is not None:
            pair = (weights.q_norm, weights.k_norm)
            if spec.qk_norm == "flat":
                self._flat_norms = pair
            else:
                self._head_norms = pair

    def before(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Norm, fused projection, then norms of q and k and RoPE in place in its output."""
        spec = self.spec
        rows = hidden if self._attention_norm is None else self._norm(hidden, self._attention_norm)
        qkv = self.linears["qkv"](rows)
        num_tokens, q_size, kv_size = len(qkv), spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        q, k, v = torch.split(qkv, [q_size, kv_size, kv_size], dim=1)
        if self._flat_norms is not None:
            q, k = self._norm(q, self._flat_norms[0]), self._norm(k, self._flat_norms[1])
        q = q.view(num_tokens, spec.num_heads, spec.head_dim)
        k = k.view(num_tokens, spec.num_kv_heads, spec.head_dim)
        if spec.no_rope:
            cos, sin = cos[:, :0], sin[:, :0]
        if cos.shape[1] or self._head_norms is not None:
            turn_heads(
                q, k, cos.contiguous(), sin.contiguous(), norms=self._head_norms, eps=spec.eps, plus_one=self._plus_one
            )
        return q, k, v.view(num_tokens, spec.num_kv_heads, spec.head_dim)

    def after(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Output projection and MLP; the residual is updated in place, the first time with the norm behind it."""
        spec = self.spec
        rows = self.linears["output"](attended)
        if self._attention_post_norm is not None:
            rows = self._norm(rows, self._attention_post_norm)
        if self._mlp_norm is None:
            rows = hidden.add_(rows, alpha=spec.residual_scale)
        else:
            rows = add_rms_norm(
                rows, hidden, self._mlp_norm, spec.eps, plus_one=self._plus_one, scale=spec.residual_scale
            )
        rows = self.linears["down"](gated(self.linears["gate_up"](rows), spec.activation))
        if self._mlp_post_norm is not None:
            rows = self._norm(rows, self._mlp_post_norm)
        return hidden.add_(rows, alpha=spec.residual_scale)

    def _norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(rows, weight, self.spec.eps, plus_one=self._plus_one)


class TritonHead(Head):
    """Final norm and output projection; the weight stays as it is, shared with a tied embedding."""

    def __init__(self, normalise: Op, weight: Tensor) -> None:
        self._normalise = normalise
        self._weight = weight

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [n, vocab_size], summed in fp32."""
        rows, weight = self._normalise(hidden), self._weight
        if rows.is_cuda and rows.dtype != torch.float32:
            return torch.mm(rows, weight.t(), out_dtype=torch.float32)
        return torch.mm(rows.float(), weight.float().t())

    def greedy(self, hidden: Tensor) -> Tensor | None:
        """The lowest id of the largest logits."""
        return argmax(self.logits(hidden))


def build(ctx: BuildContext) -> TritonOpSet:
    """Provider factory: needs ctx.device."""
    find_device(ctx.device)
    return TritonOpSet()
