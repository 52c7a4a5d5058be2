"""Launches of the op set's kernels: tensors in, tensors out."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from enginectl_attention_triton.config import power_of_two
from enginectl_attention_triton.op_kernels import (
    argmax_join_kernel,
    argmax_pieces_kernel,
    gated_kernel,
    rms_norm_kernel,
    rope_kernel,
)
from enginectl_attention_triton.sample_kernels import sample_kernel

ROPE_ROWS = 16
"""(token, head) rows that one program turns."""

GATED_BLOCK = 1024
ARGMAX_BLOCK = 4096
SAMPLE_BLOCK, SAMPLE_WARPS = 1024, 16


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, plus_one: bool = False) -> Tensor:
    """RMSNorm of x [num_tokens, size], of any row stride; a new, contiguous tensor."""
    return _norm(x, None, weight, eps, plus_one, 1.0)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, plus_one: bool = False, scale: float = 1.0
) -> Tensor:
    """residual += scale * x, in place; returns its RMSNorm."""
    return _norm(x, residual, weight, eps, plus_one, scale)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, plus_one: bool, scale: float) -> Tensor:
    num_tokens, size = x.shape
    assert x.stride(1) == 1, "a row is contiguous"
    out = x.new_empty(num_tokens, size)
    block = power_of_two(size)
    rms_norm_kernel[(num_tokens,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        SIZE=size,
        PLUS_ONE=plus_one,
        ADD=residual is not None,
        SCALE=scale,
        BLOCK=block,
        num_warps=norm_warps(block),
        enable_fp_fusion=True,
    )
    return out


def norm_warps(block: int) -> int:
    """Up to 16 elements a thread."""
    return min(16, max(1, block // 512))


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """act(gate) * up from rows [gate, up]: [num_tokens, 2 * size] to [num_tokens, size]."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, size)
    gated_kernel[(num_tokens, triton.cdiv(size, GATED_BLOCK))](
        gate_up,
        out,
        gate_up.stride(0),
        SIZE=size,
        ACTIVATION=activation,
        BLOCK=GATED_BLOCK,
        enable_fp_fusion=True,
    )
    return out


def argmax(logits: Tensor) -> Tensor:
    """Ids [n] int64 of the largest logits [n, size]; the lowest id on ties; NaN counts as -inf."""
    num_rows, size = logits.shape
    num_pieces = triton.cdiv(size, ARGMAX_BLOCK)
    best = torch.empty(num_rows, num_pieces, dtype=torch.float32, device=logits.device)
    best_id = torch.empty(num_rows, num_pieces, dtype=torch.int32, device=logits.device)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    argmax_pieces_kernel[(num_rows, num_pieces)](
        logits,
        best,
        best_id,
        logits.stride(0),
        num_pieces,
        SIZE=size,
        BLOCK=ARGMAX_BLOCK,
        enable_fp_fusion=True,
    )
    argmax_join_kernel[(num_rows,)](
        best, best_id, out, num_pieces, BLOCK=power_of_two(num_pieces), enable_fp_fusion=True
    )
    return out


def sample(logits: Tensor, params: Tensor, bits: int) -> Tensor:
    """Token ids [n] int64 drawn from logits [n, size]. params: [5, n] fp64, see the kernel; bits: of the largest weight."""
    num_rows, size = logits.shape
    assert logits.stride(1) == 1, "a row is contiguous"
    assert params.is_contiguous(), "params are contiguous"
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    sample_kernel[(num_rows,)](
        logits,
        params,
        out,
        logits.stride(0),
        num_rows,
        SIZE=size,
        BITS=bits,
        BLOCK=min(SAMPLE_BLOCK, power_of_two(size)),
        num_warps=SAMPLE_WARPS,
        enable_fp_fusion=False,  # a weight is rounded the same in every sweep
    )
    return out


def turn_heads(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    plus_one: bool = False,
    write: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> None:
    """Norm (optional) and RoPE of q [num_tokens, num_heads, head_dim] in place, and of k in place or into the store.

    norms: RMSNorm weights [head_dim] for q and k. write: (v, keys, values, slots), v [num_tokens, num_kv_heads, …].
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, rotary_dim = k.shape[1], cos.shape[-1]
    assert q.stride(2) == k.stride(2) == 1, "heads are contiguous"
    assert all(x.is_contiguous() for x in (cos, sin)), "cos and sin are contiguous"
    v, keys, values, slots = write or (k, k, k, k)
    q_norm, k_norm = norms or (cos, cos)
    num_rows = num_tokens * (num_heads + num_kv_heads)
    rope_kernel[(triton.cdiv(num_rows, ROPE_ROWS),)](
        q,
        k,
        v,
        cos,
        sin,
        q_norm,
        k_norm,
        keys,
        values,
        slots,
        num_rows,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        V_HEAD_DIM=v.shape[2],
        ROTARY_DIM=rotary_dim,
        NORM=norms is not None,
        PLUS_ONE=plus_one,
        WRITE=write is not None,
        BLOCK_ROWS=ROPE_ROWS,
        BLOCK_HALF=power_of_two(rotary_dim // 2),
        BLOCK_REST=power_of_two(max(1, head_dim - rotary_dim)),
        BLOCK_DV=power_of_two(v.shape[2]),
        enable_fp_fusion=True,
    )
