"""The loaded model: kept rows, logits, 16-bit agreement, adapters' access, and what it does not import."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from enginectl.builtin.native.block import PlainBlock
from enginectl.builtin.native.family import NativeFamily
from enginectl.builtin.native.rope import RopeTable, frequencies, rope_spec
from enginectl.builtin.ops_torch import PackedHead, TorchOpSet
from enginectl.interfaces.model import ForwardInput, Kept, Model
from enginectl.interfaces.ops import Block, BlockSpec, BlockWeights
from enginectl.provider import Provider, Role
from enginectl.testing.greedy import allocate
from enginectl.testing.paging import Pages
from enginectl.testing.tolerances import TOLERANCES

TORCH = Provider(Role.ATTENTION, "torch", "enginectl.builtin.attention_torch:build")
IDS = [5, 9, 200, 31, 77, 12, 3, 250, 18, 64]


def one_step(model: Model, ctx: Any, keep: list[int], ids: list[int] = IDS) -> Kept:
    """One sequence from its start, in one step."""
    attention = TORCH.build(ctx.with_(model_spec=model.spec))
    dtype = getattr(torch, ctx.dtype)
    attention.bind(allocate(model.spec, num_blocks=9, block_size=4, dtype=dtype, device="cpu"))
    model.use_attention(attention)
    batch = Pages(block_size=4, num_blocks=9).advance([(0, len(ids))])
    step = ForwardInput(torch.tensor(ids), torch.arange(len(ids)), torch.tensor(keep).long(), attention.prepare(batch))
    with torch.inference_mode():
        return model.forward(step)


@pytest.mark.parametrize("case", ["llama", "gemma2", "granite", "mixtral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kept_rows(case: str, dtype: str, checkpoint: Callable[..., Any], context: Callable[..., Any]) -> None:
    """Only kept rows finish the last layer, in the order asked for; logits are fp32 and the caller's own."""
    ctx = context(dtype=dtype)
    model = NativeFamily().load(checkpoint(case), ctx)
    tolerance = TOLERANCES[dtype]
    whole = model.logits(one_step(model, ctx, list(range(10))))
    kept = one_step(model, ctx, [9, 1, 4])
    assert kept.hidden is not None
    assert kept.hidden.shape == (3, model.spec.hidden_size)
    logits = model.logits(kept)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, whole[[9, 1, 4]], rtol=tolerance.rtol, atol=tolerance.atol * 10)
    torch.testing.assert_close(model.logits(kept, torch.tensor([2, 0])), logits[[2, 0]], rtol=1e-5, atol=1e-5)
    logits.zero_()
    assert model.logits(kept).abs().max() > 0, "the caller's tensor is not the model's"


@pytest.mark.parametrize("case", ["llama", "qwen3_moe", "gemma2"])
def test_no_kept_rows(case: str, checkpoint: Callable[..., Any], context: Callable[..., Any]) -> None:
    """A step in the middle of a prompt wants no logits, and still writes its keys and values."""
    ctx = context()
    model = NativeFamily().load(checkpoint(case), ctx)
    kept = one_step(model, ctx, [])
    assert model.logits(kept).shape == (0, model.spec.vocab_size)


@pytest.mark.parametrize("case", ["llama_biased", "qwen3", "gemma3", "granite", "olmo2", "qwen2_window"])
def test_bf16_log_probabilities_agree_with_transformers(
    case: str, checkpoint: Callable[..., Any], context: Callable[..., Any]
) -> None:
    """Law 5: teacher-forced, both in bf16, against the distance of either from fp32."""
    from enginectl.builtin.transformers_family.family import TransformersFamily

    def logprobs(model: Model, ctx: Any) -> Tensor:
        every = list(range(len(IDS)))
        return torch.log_softmax(model.logits(one_step(model, ctx, every)), -1)

    narrow, wide = context(dtype="bfloat16"), context()
    exact = logprobs(NativeFamily().load(checkpoint(case), wide), wide)
    native = logprobs(NativeFamily().load(checkpoint(case), narrow), narrow)
    theirs = logprobs(TransformersFamily().load(checkpoint(case), narrow), narrow)
    likely = exact > math.log(1e-4)
    bound = TOLERANCES["bfloat16"].atol + 2 * (theirs - exact)[likely].abs().max()
    assert (native - theirs)[likely].abs().max() < bound
    assert (native - exact)[likely].abs().mean() <= 1.25 * (theirs - exact)[likely].abs().mean()


def test_adapters_may_wrap_linears(checkpoint: Callable[..., Any], context: Callable[..., Any]) -> None:
    """By name, after loading; the next forward calls the wrapper."""
    ctx = context()
    model = NativeFamily().load(checkpoint("llama"), ctx)
    before = one_step(model, ctx, [9]).hidden
    assert [set(block.linears) for block in model.blocks] == [{"qkv", "output", "gate_up", "down"}] * 3
    plain = model.blocks[1].linears["down"]
    model.blocks[1].linears["down"] = lambda rows: plain(rows) + 1
    after = one_step(model, ctx, [9]).hidden
    assert before is not None
    assert after is not None
    assert not torch.equal(before, after)


class Fused(Block):
    """A block in one piece."""

    def __init__(self, inner: Block) -> None:
        self.linears = {}
        self._inner = inner

    def before(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._inner.before(hidden, cos, sin)

    def after(self, hidden: Tensor, attended: Tensor) -> Tensor:
        return self._inner.after(hidden, attended)


class FusingOps(TorchOpSet):
    """An op set with fused blocks."""

    def block(self, spec: BlockSpec, weights: BlockWeights) -> Block:
        return Fused(PlainBlock(spec, weights, self))


@pytest.mark.parametrize("enable_lora", [False, True])
def test_fused_blocks_serve_unless_adapters_need_linears(
    enable_lora: bool, checkpoint: Callable[..., Any], context: Callable[..., Any]
) -> None:
    """An op set's own blocks win, but adapters must find the linears."""
    ctx = context(enable_lora=enable_lora)
    ctx.parts["op_set"] = FusingOps("cpu", torch.float32)
    model = NativeFamily().load(checkpoint("llama"), ctx)
    assert {type(block) for block in model.blocks} == {PlainBlock if enable_lora else Fused}


@pytest.mark.parametrize("case", ["llama", "llama_tied", "qwen3"])
def test_greedy_is_the_argmax(case: str, checkpoint: Callable[..., Any], context: Callable[..., Any]) -> None:
    """The short cut over packed weights finds what the full logits say."""
    ctx = context(dtype="bfloat16")
    model = NativeFamily().load(checkpoint(case), ctx)
    kept = one_step(model, ctx, list(range(10)))
    with torch.inference_mode():
        best = model.greedy(kept)
        if best is None:
            assert not isinstance(model._head, PackedHead)
            pytest.skip("no packed head here")
        assert torch.equal(best, model.logits(kept).argmax(-1))
        rows = torch.tensor([3, 0])
        assert torch.equal(model.greedy(kept, rows), best[rows])  # type: ignore[arg-type]


def test_greedy_is_not_offered_under_a_soft_cap(checkpoint: Callable[..., Any], context: Callable[..., Any]) -> None:
    """The cap ties what is far beyond it, and ties go to the lowest id."""
    ctx = context(dtype="bfloat16")
    model = NativeFamily().load(checkpoint("gemma2"), ctx)
    assert model.greedy(one_step(model, ctx, [9])) is None


def test_rope_bits_do_not_depend_on_the_step() -> None:
    """A position has one row of the table, alone or among many."""
    table = RopeTable(rope_spec({"rope_theta": 10000.0}, rotary_dim=16, longest=64), 64, "cpu")
    many = table.at(torch.arange(64))
    for position in (0, 7, 63):
        alone = table.at(torch.tensor([position]))
        assert all(torch.equal(one[0], all_[position]) for one, all_ in zip(alone, many, strict=True))


def test_frequencies_follow_their_definition() -> None:
    """theta ** (-2i / dim), in radians a position."""
    spec = rope_spec({"rope_theta": 100.0}, rotary_dim=4, longest=64)
    assert frequencies(spec).tolist() == pytest.approx([1.0, 0.1])


_NO_IMPORT = """
import sys
from enginectl import Engine, SamplingParams
with Engine(sys.argv[1], model_family="native", attention="torch", op_set="torch", num_threads=1) as engine:
    out = engine.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=4))
    assert len(out[0].outputs[0].token_ids) == 4
print(sorted(name for name in sys.modules if name.partition(".")[0] == "transformers"))
"""


def test_serving_natively_imports_no_transformers(tiny: Callable[[str], Path]) -> None:
    """Start-up does not pay for a library that is not used."""
    done = subprocess.run(
        [sys.executable, "-c", _NO_IMPORT, str(tiny("llama"))], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "[]"
