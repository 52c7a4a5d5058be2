"""A decoder layer from an op set's linears and norms, for structures it has no fused block for."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from enginectl.builtin.native.moe import Mixture
from enginectl.interfaces.ops import Block, BlockSpec, BlockWeights, Op, OpSet


class PlainBlock(Block):
    """Norms, fused linears, RoPE, activation and residuals, one after another."""

    def __init__(self, spec: BlockSpec, weights: BlockWeights, ops: OpSet) -> None:
        self.spec = spec
        self.linears: dict[str, Op] = {
            "qkv": ops.linear(weights.qkv, weights.qkv_bias),
            "output": ops.linear(weights.output, weights.output_bias),
        }
        activate = gated_gelu if spec.activation == "gelu_tanh" else gated_silu
        self._mixture: Mixture | None = None
        if spec.num_experts:
            self._mixture = Mixture(spec, weights, ops, activate)
        else:
            self.linears["gate_up"] = ops.linear(weights.gate_up, weights.gate_up_bias)
            self.linears["down"] = ops.linear(weights.down, weights.down_bias)
        self._activate = activate
        plus_one = spec.norm == "rms_plus_one"

        def norm(weight: Tensor | None) -> Op | None:
            return None if weight is None else ops.rms_norm(weight, spec.eps, plus_one=plus_one)

        self._attention_norm = norm(weights.attention_norm)
        self._attention_post_norm = norm(weights.attention_post_norm)
        self._mlp_norm = norm(weights.mlp_norm)
        self._mlp_post_norm = norm(weights.mlp_post_norm)
        self._qk_weight = qk_norm_weight(spec, weights, plus_one)
        self._num_qk = spec.num_heads + spec.num_kv_heads

    def before(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Norm, fused projection, norms of q and k, RoPE."""
        spec, num_qk = self.spec, self._num_qk
        rows = hidden if self._attention_norm is None else self._attention_norm(hidden)
        qkv = self.linears["qkv"](rows)
        qkv = qkv.view(-1, num_qk + spec.num_kv_heads, spec.head_dim)  # [num_tokens, heads, head_dim]
        qk, v = qkv[:, :num_qk], qkv[:, num_qk:]
        if self._qk_weight is not None or not spec.no_rope:
            wide = qk.float()
            if self._qk_weight is not None:
                wide = self._normalise(wide) * self._qk_weight
            if not spec.no_rope:
                wide = turn(wide, cos.unsqueeze(1), sin.unsqueeze(1))
            qk = wide.to(qkv.dtype)
        return qk[:, : spec.num_heads], qk[:, spec.num_heads :], v

    def _normalise(self, qk: Tensor) -> Tensor:
        """Each head by itself, or all of q and all of k. qk: fp32 [num_tokens, q and k heads, head_dim]."""
        if self.spec.qk_norm == "head":
            return qk * torch.rsqrt(qk.square().mean(-1, keepdim=True) + self.spec.eps)
        parts = torch.split(qk, [self.spec.num_heads, self.spec.num_kv_heads], dim=1)
        return torch.cat(
            [part * torch.rsqrt(part.square().mean((1, 2), keepdim=True) + self.spec.eps) for part in parts], dim=1
        )

    def after(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Output projection and MLP, each added to the residual, which is updated in place."""
        scale = self.spec.residual_scale
        rows = self.linears["output"](attended)
        if self._attention_post_norm is not None:
            rows = self._attention_post_norm(rows)
        hidden = hidden.add_(rows, alpha=scale)
        rows = hidden if self._mlp_norm is None else self._mlp_norm(hidden)
        if self._mixture is None:
            rows = self.linears["down"](self._activate(self.linears["gate_up"](rows)))
        else:
            rows = self._mixture(rows)
        if self._mlp_post_norm is not None:
            rows = self._mlp_post_norm(rows)
        return hidden.add_(rows, alpha=scale)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on the first elements of each head. x: fp32 [num_tokens, heads, head_dim]; cos, sin: [num_tokens, 1, dim]."""
    dim = cos.shape[-1]
    half = dim // 2
    whole = dim == x.shape[-1]
    turned = (x if whole else x[..., :dim]) * cos
    turned[..., :half].addcmul_(x[..., half:dim], sin[..., :half], value=-1)
    turned[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return turned if whole else torch.cat((turned, x[..., dim:]), -1)


def gated_silu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. gate_up: [num_tokens, 2 * intermediate_size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up)


def gated_gelu(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up with the tanh approximation."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate, approximate="tanh").mul_(up)


def qk_norm_weight(spec: BlockSpec, weights: BlockWeights, plus_one: bool) -> Tensor | None:
    """fp32 [num_heads + num_kv_heads, head_dim], so that q and k are normalised together; None without such norms."""
    if weights.q_norm is None or weights.k_norm is None:
        return None
    both = [
        weight.float().view(-1, spec.head_dim).expand(heads, -1)
        for weight, heads in ((weights.q_norm, spec.num_heads), (weights.k_norm, spec.num_kv_heads))
    ]
    return torch.cat(both) + (1.0 if plus_one else 0.0)
