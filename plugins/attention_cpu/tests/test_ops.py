"""The op set: right within the table's tolerances, and a row's bits are its own."""

from __future__ import annotations

import dataclasses
import threading
from ctypes import CDLL
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from enginectl.builtin.native.block import PlainBlock
from enginectl.interfaces.ops import BlockSpec, BlockWeights
from enginectl.testing.tolerances import TOLERANCES
from enginectl_attention_cpu.ops import CpuBlock, CpuOpSet

DTYPES = ["float32", "bfloat16", "float16"]
SPEC = BlockSpec(
    hidden_size=96, intermediate_size=160, num_heads=6, num_kv_heads=2, head_dim=16, eps=1e-5, rotary_dim=16
)


@pytest.fixture(scope="session")
def ops(library: CDLL) -> CpuOpSet:
    """On two threads, whatever the test run has."""
    return CpuOpSet(num_threads=2, library=library)


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = getattr(torch, request.param)
    return found


def noise(*shape: int, dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def assert_near(found: Tensor, exact: Tensor, dtype: torch.dtype, *, factor: float = 1.0) -> None:
    tolerance = TOLERANCES[str(dtype).removeprefix("torch.")]
    allowed = factor * (tolerance.atol + tolerance.rtol * exact.abs())
    worst = ((found.double() - exact.double()).abs() / allowed).max().item()
    assert worst <= 1, f"an error is {worst:.2f} times the tolerance for {dtype}"


def weights_for(spec: BlockSpec, dtype: torch.dtype, *, biases: bool = False) -> BlockWeights:
    """Random weights; those that the structure has."""
    hidden, middle = spec.hidden_size, spec.intermediate_size
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim

    def matrix(rows: int, columns: int, seed: int) -> Tensor:
        return noise(rows, columns, dtype=dtype, scale=columns**-0.5, seed=seed)

    def vector(size: int, seed: int) -> Tensor:
        return noise(size, dtype=dtype, scale=0.3, seed=seed) + (0.0 if spec.norm == "rms_plus_one" else 1.0)

    sandwich, qk = spec.norm_order == "sandwich", spec.qk_norm == "head"
    return BlockWeights(
        qkv=matrix(heads, hidden, 1),
        qkv_bias=vector(heads, 2) if biases else None,
        output=matrix(hidden, spec.num_heads * spec.head_dim, 3),
        output_bias=vector(hidden, 4) if biases else None,
        gate_up=matrix(2 * middle, hidden, 5),
        gate_up_bias=vector(2 * middle, 6) if biases else None,
        down=matrix(hidden, middle, 7),
        down_bias=vector(hidden, 8) if biases else None,
        attention_norm=vector(hidden, 9),
        mlp_norm=vector(hidden, 10),
        attention_post_norm=vector(hidden, 11) if sandwich else None,
        mlp_post_norm=vector(hidden, 12) if sandwich else None,
        q_norm=vector(spec.head_dim, 13) if qk else None,
        k_norm=vector(spec.head_dim, 14) if qk else None,
    )


def in_double(weights: BlockWeights) -> BlockWeights:
    fields = {f.name: getattr(weights, f.name) for f in dataclasses.fields(weights)}
    return BlockWeights(**{name: t if t is None else t.double() for name, t in fields.items()})


class DoubleOps(CpuOpSet):
    """What the exact result is made with."""

    def __init__(self) -> None:
        pass

    def linear(self, weight: Tensor, bias: Tensor | None) -> Any:
        return lambda rows: torch.nn.functional.linear(rows.double(), weight.double(), bias)

    def rms_norm(self, weight: Tensor, eps: float, *, plus_one: bool = False) -> Any:
        w = weight.double() + (1.0 if plus_one else 0.0)
        return lambda rows: rows.double() * torch.rsqrt(rows.double().square().mean(-1, keepdim=True) + eps) * w


def turns(num_tokens: int, dim: int) -> tuple[Tensor, Tensor]:
    half = torch.rand(num_tokens, dim // 2, generator=torch.Generator().manual_seed(5)) * 6
    both = torch.cat((half, half), 1)
    return both.cos(), both.sin()


SHAPES = [(96, 64), (17, 33), (576, 100), (2048, 40), (5, 1)]


@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize("rows", [1, 3, 12, 13, 150])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_equals_double(ops: CpuOpSet, dtype: torch.dtype, k: int, n: int, rows: int, bias: bool) -> None:
    weight, x = noise(n, k, dtype=dtype, scale=k**-0.5), noise(rows, k, dtype=dtype)
    b = noise(n, dtype=dtype, seed=3) if bias else None
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
    assert_near(ops.linear(weight, b)(x), exact, dtype)


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("size", [7, 64, 576])
def test_norm_equals_double(ops: CpuOpSet, dtype: torch.dtype, size: int, plus_one: bool) -> None:
    weight, x = noise(size, dtype=dtype), noise(9, size, dtype=dtype, scale=3)
    exact = DoubleOps().rms_norm(weight, 1e-5, plus_one=plus_one)(x)
    assert_near(ops.rms_norm(weight, 1e-5, plus_one=plus_one)(x), exact, dtype)


VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"biases": True},
    "qwen3": {"qk_norm": "head"},
    "partial rotary": {"rotary_dim": 8},
    "no rope": {"no_rope": True},
    "granite": {"residual_scale": 0.22},
    "gemma": {
        "norm": "rms_plus_one",
        "norm_order": "sandwich",
        "activation": "gelu_tanh",
        "qk_norm": "head",
        "head_dim": 32,
        "rotary_dim": 32,
    },
    "odd sizes": {"hidden_size": 50, "intermediate_size": 37, "head_dim": 10, "rotary_dim": 6, "num_heads": 3},
}


def variant(name: str) -> tuple[BlockSpec, bool]:
    changes = dict(VARIANTS[name])
    biases = changes.pop("biases", False)
    if "num_heads" in changes:
        changes["num_kv_heads"] = 1
    return msgspec.structs.replace(SPEC, **changes), biases


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_fused_block_equals_double(ops: CpuOpSet, dtype: torch.dtype, name: str, rows: int) -> None:
    spec, biases = variant(name)
    weights = weights_for(spec, dtype, biases=biases)
    fused, exact = ops.block(spec, weights), PlainBlock(spec, in_double(weights), DoubleOps())
    assert isinstance(fused, CpuBlock)
    hidden = noise(rows, spec.hidden_size, dtype=dtype)
    attended = noise(rows, spec.num_heads * spec.head_dim, dtype=dtype, seed=7)
    cos, sin = turns(rows, spec.rotary_dim)
    before = hidden.clone()
    for found, wanted in zip(fused.before(hidden, cos, sin), exact.before(hidden.double(), cos, sin), strict=True):
        assert_near(found, wanted, dtype, factor=2)
    assert torch.equal(hidden, before), "before() changed the hidden rows"
    wanted = exact.after(hidden.double(), attended.double())
    assert_near(fused.after(hidden, attended), wanted, dtype, factor=2)


@pytest.mark.parametrize("name", VARIANTS)
def test_fused_block_rounds_like_separate_ops(ops: CpuOpSet, name: str) -> None:
    """In bf16 a block made of this op set's linears and norms gives nearly the same bits."""
    spec, biases = variant(name)
    weights = weights_for(spec, torch.bfloat16, biases=biases)
    fused, plain = ops.block(spec, weights), PlainBlock(spec, weights, ops)
    assert fused is not None
    hidden = noise(64, spec.hidden_size, dtype=torch.bfloat16)
    attended = noise(64, spec.num_heads * spec.head_dim, dtype=torch.bfloat16, seed=7)
    cos, sin = turns(64, spec.rotary_dim)
    for found, wanted in zip(fused.before(hidden, cos, sin), plain.before(hidden, cos, sin), strict=True):
        assert (found == wanted).float().mean().item() > 0.99
    found, wanted = fused.after(hidden.clone(), attended), plain.after(hidden.clone(), attended)
    # torch rounds a residual's factor to bf16 before it multiplies.
    assert (found == wanted).float().mean().item() > (0.97 if spec.residual_scale == 1 else 0.7)


def test_structures_it_does_not_fuse(ops: CpuOpSet) -> None:
    weights = weights_for(SPEC, torch.float32)
    for changes in ({"num_experts": 4}, {"norm_order": "post"}, {"qk_norm": "flat"}):
        assert ops.block(msgspec.structs.replace(SPEC, **changes), weights) is None


# -- a row's bits are its own ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [96, 577, 2048])
def test_linear_rows_do_not_depend_on_the_batch(ops: CpuOpSet, dtype: torch.dtype, k: int) -> None:
    """Law 1: bitwise, for every number of rows up to 64, any subset in any order, one thread or two."""
    weight, x = noise(130, k, dtype=dtype), noise(300, k, dtype=dtype)
    assert ops.batch_invariant
    linear = ops.linear(weight, None)
    whole = linear(x)
    assert torch.equal(whole, CpuOpSet(num_threads=1, library=ops.library).linear(weight, None)(x))
    for rows in range(1, 65):
        assert torch.equal(linear(x[:rows]), whole[:rows]), f"{rows} rows"
    random = torch.Generator().manual_seed(1)
    for _ in range(20):
        chosen = torch.randperm(300, generator=random)[: int(torch.randint(1, 150, (1,), generator=random))]
        assert torch.equal(linear(x[chosen]), whole[chosen])


MANY_ROWS = 1_300


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma"])
def test_block_rows_do_not_depend_on_the_batch(ops: CpuOpSet, dtype: torch.dtype, name: str) -> None:
    """Law 1, for a whole layer, and for so many rows that they go through it in parts."""
    spec, biases = variant(name)
    block = ops.block(spec, weights_for(spec, dtype, biases=biases))
    assert block is not None
    hidden = noise(MANY_ROWS, spec.hidden_size, dtype=dtype)
    attended = noise(MANY_ROWS, spec.num_heads * spec.head_dim, dtype=dtype, seed=7)
    cos, sin = turns(MANY_ROWS, spec.rotary_dim)
    whole = [t.clone() for t in block.before(hidden, cos, sin)]
    after = block.after(hidden.clone(), attended)
    random = torch.Generator().manual_seed(1)
    for rows in (1, 2, 4, 5, 12, 13, 31, 64, 100, 700):
        chosen = torch.randperm(MANY_ROWS, generator=random)[:rows]
        parts = block.before(hidden[chosen], cos[chosen], sin[chosen])
        assert all(torch.equal(part, all_rows[chosen]) for part, all_rows in zip(parts, whole, strict=True))
        assert torch.equal(block.after(hidden[chosen], attended[chosen]), after[chosen])


# -- head ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [31, 320, 1000])
def test_head_logits_are_fp32_and_greedy_is_their_argmax(ops: CpuOpSet, dtype: torch.dtype, vocab: int) -> None:
    norm, weight = noise(96, dtype=dtype), noise(vocab, 96, dtype=dtype)
    head = ops.head(norm, weight, SPEC)
    assert head is not None
    for rows in (0, 1, 7, 40, 200):
        hidden = noise(rows, 96, dtype=dtype)
        logits, ids = head.logits(hidden), head.greedy(hidden)
        assert logits.dtype == torch.float32
        assert ids is not None
        assert torch.equal(ids, logits.argmax(-1))
        normed = ops.rms_norm(norm, SPEC.eps)(hidden)
        torch.testing.assert_close(logits.double(), normed.double() @ weight.double().t(), rtol=1e-4, atol=1e-3)


def test_greedy_takes_the_lowest_id_on_ties(ops: CpuOpSet) -> None:
    weight = noise(500, 32, dtype=torch.bfloat16).abs()
    weight[[77, 78, 300, 499]] = 4.0
    head = ops.head(None, weight, SPEC)
    assert head is not None
    assert head.greedy(torch.ones(3, 32, dtype=torch.bfloat16)).tolist() == [77, 77, 77]


def test_greedy_does_not_take_the_padding(ops: CpuOpSet) -> None:
    """Columns behind the vocabulary would have the logit 0."""
    weight = -noise(33, 32, dtype=torch.bfloat16).abs() - 1
    head = ops.head(None, weight, SPEC)
    assert head is not None
    assert 0 <= int(head.greedy(torch.ones(1, 32, dtype=torch.bfloat16))[0]) < 33


def test_two_engines_may_compute_at_once() -> None:
    """One team serves the process; who finds it taken works alone, with the same bits."""
    weight, x = noise(640, 192, dtype=torch.bfloat16), noise(40, 192, dtype=torch.bfloat16)
    linears = [CpuOpSet(num_threads=2).linear(weight, None) for _ in range(2)]
    expected, wrong = linears[0](x), []

    def work(linear: Any) -> None:
        for _ in range(300):
            if not torch.equal(linear(x), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work, args=(linear,)) for linear in linears]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
