"""The op set against plain torch, in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from enginectl.interfaces.ops import BlockSpec, BlockWeights
from enginectl.testing.tolerances import TOLERANCES
from enginectl_attention_triton.op_launch import add_rms_norm, argmax, gated, rms_norm, turn_heads
from enginectl_attention_triton.ops import TritonHead, TritonOpSet

DTYPES = ["float32", "float16", "bfloat16"]


def noise(*shape: int, dtype: str = "float32", seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, dtype))


def close(found: Tensor, exact: Tensor, dtype: str) -> None:
    torch.testing.assert_close(found.double(), exact.double(), **TOLERANCES[dtype]._asdict())


def exact_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (weight.double() + plus_one)


def exact_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [num_tokens, heads, head_dim]."""
    dim = cos.shape[-1]
    turned, rest = x.double()[..., :dim], x.double()[..., dim:]
    low, high = turned.chunk(2, -1)
    turned = turned * cos[:, None].double() + torch.cat((-high, low), -1) * sin[:, None].double()
    return torch.cat((turned, rest), -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plus_one", [False, True])
def test_rms_norm_of_strided_rows(dtype: str, plus_one: bool) -> None:
    """Sizes that are no power of two, and rows that are a slice of wider ones."""
    x, weight = noise(5, 100, dtype=dtype)[:, :72], noise(72, dtype=dtype, seed=1)
    close(rms_norm(x, weight, 1e-5, plus_one=plus_one), exact_norm(x, weight, 1e-5, plus_one), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_is_added_in_place_and_normed(dtype: str) -> None:
    """The norm sees the sum as the dtype rounds it."""
    x, residual, weight = noise(4, 64, dtype=dtype), noise(4, 64, dtype=dtype, seed=1), noise(64, dtype=dtype, seed=2)
    total = residual.double() + 0.5 * x.double()
    out = add_rms_norm(x, residual, weight, 1e-6, scale=0.5)
    close(residual, total, dtype)
    close(out, exact_norm(residual, weight, 1e-6), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_activation(dtype: str, activation: str) -> None:
    """Large inputs neither overflow nor make NaN."""
    gate_up = noise(3, 2 * 1100, dtype=dtype)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, -30.0, 30.0])
    gate, up = gate_up.double().chunk(2, -1)
    act = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    close(gated(gate_up, activation), act * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (24, 8), (16, 0)])
def test_norms_of_q_and_k_and_rope(dtype: str, head_dim: int, rotary_dim: int) -> None:
    """In place in a fused projection, whose values are left alone."""
    qkv = noise(5, (3 + 2 + 2) * head_dim, dtype=dtype)
    before = qkv.clone().view(5, 7, head_dim)
    cos, sin = noise(5, rotary_dim, seed=3), noise(5, rotary_dim, seed=4)
    norms = (noise(head_dim, dtype=dtype, seed=5), noise(head_dim, dtype=dtype, seed=6))
    heads = qkv.view(5, 7, head_dim)
    turn_heads(heads[:, :3], heads[:, 3:5], cos, sin, norms=norms, eps=1e-6)
    for part, weight in ((slice(0, 3), norms[0]), (slice(3, 5), norms[1])):
        close(heads[:, part], exact_rope(exact_norm(before[:, part], weight, 1e-6), cos, sin), dtype)
    assert torch.equal(heads[:, 5:], before[:, 5:])


def test_argmax_takes_the_lowest_id_on_ties_and_ignores_nan() -> None:
    """Ties within a piece, across pieces, a row of -inf, and NaN."""
    logits = noise(5, 9000)
    logits[0, [77, 5000, 8999]] = 50.0
    logits[1, [4095, 4096]] = 50.0
    logits[2] = float("-inf")
    logits[3, 3] = float("nan")
    logits[3, 8000] = 50.0
    assert argmax(logits).tolist() == [77, 4095, 0, 8000, int(logits[4].argmax())]


SPECS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"qk_norm": "head"},
    "gemma2": {"norm": "rms_plus_one", "norm_order": "sandwich", "activation": "gelu_tanh"},
    "olmo2": {"norm_order": "post", "qk_norm": "flat"},
    "granite": {"residual_scale": 0.25},
    "smollm3": {"no_rope": True},
    "partial": {"rotary_dim": 8},
}


def make_block(changes: dict[str, Any]) -> tuple[BlockSpec, BlockWeights]:
    fields: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "eps": 1e-5,
        "rotary_dim": 16,
    }  # fmt: skip
    spec = BlockSpec(**(fields | changes))
    pre, post = spec.norm_order != "post", spec.norm_order != "pre"

    def norm(size: int, seed: int) -> Tensor:
        return noise(size, seed=seed)

    flat = spec.qk_norm == "flat"
    weights = BlockWeights(
        qkv=noise(8 * 16, 32, seed=1) * 0.2,
        qkv_bias=noise(8 * 16, seed=2),
        output=noise(32, 64, seed=3) * 0.2,
        output_bias=None,
        gate_up=noise(96, 32, seed=4) * 0.2,
        down=noise(32, 48, seed=5) * 0.2,
        attention_norm=norm(32, 6) if pre else None,
        attention_post_norm=norm(32, 7) if post else None,
        mlp_norm=norm(32, 8) if pre else None,
        mlp_post_norm=norm(32, 9) if post else None,
        q_norm=norm(64 if flat else 16, 10) if spec.qk_norm else None,
        k_norm=norm(32 if flat else 16, 11) if spec.qk_norm else None,
    )
    return spec, weights


@pytest.mark.parametrize("name", SPECS)
def test_block_equals_the_definition(name: str) -> None:
    """Every dense structure, against fp64 written out."""
    spec, w = make_block(SPECS[name])
    block = TritonOpSet().block(spec, w)
    assert block is not None
    hidden, attended = noise(6, 32, seed=20), noise(6, 64, seed=21)
    cos, sin = noise(6, spec.rotary_dim, seed=22), noise(6, spec.rotary_dim, seed=23)
    plus = spec.norm == "rms_plus_one"

    def norm(x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else exact_norm(x, weight, spec.eps, plus)

    qkv = functional.linear(norm(hidden.double(), w.attention_norm), w.qkv.double(), w.qkv_bias.double())
    q, k, v = qkv.split([64, 32, 32], 1)
    if spec.qk_norm == "flat":
        q, k = norm(q, w.q_norm), norm(k, w.k_norm)
    q, k, v = q.view(6, 4, 16), k.view(6, 2, 16), v.view(6, 2, 16)
    if spec.qk_norm == "head":
        q, k = norm(q, w.q_norm), norm(k, w.k_norm)
    if not spec.no_rope:
        q, k = exact_rope(q, cos, sin), exact_rope(k, cos, sin)
    kept = hidden.clone()
    for found, exact in zip(block.before(hidden, cos, sin), (q, k, v), strict=True):
        close(found, exact, "float32")
    assert torch.equal(hidden, kept), "before() changed the hidden rows"

    x = hidden.double() + spec.residual_scale * norm(attended.double() @ w.output.double().t(), w.attention_post_norm)
    gate, up = functional.linear(norm(x, w.mlp_norm), w.gate_up.double()).chunk(2, -1)
    act = functional.silu(gate) if spec.activation == "silu" else functional.gelu(gate, approximate="tanh")
    x = x + spec.residual_scale * norm((act * up) @ w.down.double().t(), w.mlp_post_norm)
    close(block.after(hidden, attended), x, "float32")


def test_mixtures_of_experts_are_left_to_core() -> None:
    """No block of ours for them."""
    spec, weights = make_block({"num_experts": 4, "top_k": 2})
    assert TritonOpSet().block(spec, weights) is None


def test_head_greedy_is_the_argmax_of_its_logits() -> None:
    """Norm, product, search."""
    spec, _ = make_block({})
    head = TritonOpSet().head(noise(32), noise(200, 32, seed=1), spec)
    assert isinstance(head, TritonHead)
    hidden = noise(3, 32, seed=2)
    exact = exact_norm(hidden, noise(32), spec.eps) @ noise(200, 32, seed=1).double().t()
    close(head.logits(hidden), exact, "float32")
    assert torch.equal(head.greedy(hidden), exact.argmax(-1))
