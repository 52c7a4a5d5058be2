"""The torch op set against plain formulas, and where its rows do not depend on each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from enginectl.builtin.native.block import PlainBlock, turn
from enginectl.builtin.ops_torch import PackedHead, TorchOpSet, best_of, packer
from enginectl.interfaces.ops import BlockSpec, BlockWeights
from enginectl.testing.tolerances import TOLERANCES

DTYPES = ["float32", "bfloat16", "float16"]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_linear(dtype: str, bias: bool, packed: bool) -> None:
    """Packed or not, whatever the CPU offers."""
    kind = getattr(torch, dtype)
    ops = TorchOpSet("cpu", kind)
    if not packed:
        ops._pack = None
    weight, shift = random(40, 24, dtype=kind, scale=0.2), random(40, seed=1, dtype=kind) if bias else None
    rows = random(5, 24, seed=2, dtype=kind)
    found = ops.linear(weight, shift)(rows)
    exact = rows.double() @ weight.double().T + (0 if shift is None else shift.double())
    tolerance = TOLERANCES[dtype]
    assert found.dtype == kind
    torch.testing.assert_close(found.double(), exact, rtol=tolerance.rtol, atol=tolerance.atol)
    assert ops.linear(weight, shift)(rows[:0]).shape == (0, 40)


def test_plain_linears_serve_where_packing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch whose private operator is gone, or has another signature."""

    class Gone:
        pass

    monkeypatch.setattr(torch.ops, "mkldnn", Gone())
    assert packer(torch.float32) is None
    ops = TorchOpSet("cpu", torch.float32)
    assert not ops.is_packed
    assert ops.linear(random(4, 3), None)(random(2, 3)).shape == (2, 4)


def test_packing_works_on_this_machine() -> None:
    """fp32 needs nothing of the CPU: without this the other tests would quietly test the fallback."""
    assert packer(torch.float32) is not None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plus_one", [False, True])
def test_rms_norm(dtype: str, plus_one: bool) -> None:
    """In fp32, rounded once."""
    kind = getattr(torch, dtype)
    weight, rows = random(32, dtype=kind, scale=0.5), random(6, 32, seed=1, dtype=kind, scale=3.0)
    found = TorchOpSet("cpu", kind).rms_norm(weight, 1e-5, plus_one=plus_one)(rows)
    exact = rows.double() / torch.sqrt(rows.double().square().mean(-1, keepdim=True) + 1e-5)
    exact *= weight.double() + plus_one
    tolerance = TOLERANCES[dtype]
    assert found.dtype == kind
    torch.testing.assert_close(found.double(), exact, rtol=tolerance.rtol, atol=tolerance.atol)


def test_turn_is_a_rotation_of_half_split_pairs() -> None:
    """Element i and i + half turn by one angle; what is beyond the rotary dimension stays."""
    x = random(3, 2, 10)
    angle = random(3, 1, 4, seed=1)
    found = turn(x, angle.cos().repeat(1, 1, 2), angle.sin().repeat(1, 1, 2))
    pairs = torch.complex(x[..., :4], x[..., 4:8]) * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(found, torch.cat((pairs.real, pairs.imag, x[..., 8:]), -1))


def block(hidden: int, intermediate: int, dtype: torch.dtype) -> PlainBlock:
    spec = BlockSpec(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        eps=1e-5,
        rotary_dim=16,
        qk_norm="head",
    )
    weights = BlockWeights(
        qkv=random(128, hidden, dtype=dtype, scale=0.1),
        qkv_bias=random(128, seed=1, dtype=dtype),
        output=random(hidden, 64, seed=2, dtype=dtype, scale=0.1),
        output_bias=None,
        gate_up=random(2 * intermediate, hidden, seed=3, dtype=dtype, scale=0.1),
        down=random(hidden, intermediate, seed=4, dtype=dtype, scale=0.1),
        attention_norm=random(hidden, seed=5, dtype=dtype),
        mlp_norm=random(hidden, seed=6, dtype=dtype),
        q_norm=random(16, seed=7, dtype=dtype),
        k_norm=random(16, seed=8, dtype=dtype),
    )
    return PlainBlock(spec, weights, TorchOpSet("cpu", dtype))


def rows_of(made: PlainBlock, hidden: Tensor, attended: Tensor, angle: Tensor) -> Tensor:
    """All that a block computes of each row, side by side."""
    q, k, v = made.before(hidden, angle.cos(), angle.sin())
    after = made.after(hidden.clone(), attended)
    return torch.cat([part.flatten(1) for part in (q, k, v, after)], dim=1)


@pytest.mark.parametrize("sizes", [(576, 960), (896, 640), (48, 96)])
def test_rows_do_not_depend_on_the_batch(sizes: tuple[int, int]) -> None:
    """Law 1: bf16 bits of a row alone and among 2, 8 and 33, where no linear sums over more than 1,000 elements.

    Beyond that oneDNN cuts the sum by the number of rows (1536 and 4864 elements differ from 8 rows on, 4096 from 2
    on), so that the op set does not claim to be batch-invariant.
    """
    if packer(torch.bfloat16) is None:
        pytest.skip("no packed bf16 linears on this machine")
    made = block(*sizes, torch.bfloat16)
    hidden = random(33, sizes[0], seed=10, dtype=torch.bfloat16)
    attended = random(33, 64, seed=11, dtype=torch.bfloat16)
    angle = random(33, 8, seed=12).repeat(1, 2)
    with torch.inference_mode():
        alone = torch.cat([rows_of(made, *(x[i : i + 1] for x in (hidden, attended, angle))) for i in range(33)])
        for count in (2, 8, 33):
            assert torch.equal(rows_of(made, hidden[:count], attended[:count], angle[:count]), alone[:count]), count
    assert not TorchOpSet.batch_invariant


@pytest.fixture(scope="module")
def head() -> PackedHead:
    pack = packer(torch.bfloat16)
    if pack is None:
        pytest.skip("no packed bf16 linears on this machine")
    return PackedHead(lambda rows: rows, random(1000, 32, dtype=torch.bfloat16), pack)


def test_greedy_of_the_packed_head_is_the_fp32_argmax(head: PackedHead) -> None:
    """Many rows, a vocabulary that is no multiple of the parts; rounded logits tie often enough to matter."""
    rows = random(500, 32, seed=1, dtype=torch.bfloat16)
    with torch.inference_mode():
        logits = head.logits(rows)
        rounded = logits.bfloat16()
        ties = (rounded == rounded.amax(-1, keepdim=True)).sum(-1) > 1
        assert ties.sum() > 5
        assert torch.equal(head.greedy(rows), logits.argmax(-1))  # type: ignore[arg-type]
        assert head.greedy(rows[:0]).shape == (0,)  # type: ignore[union-attr]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_greedy_where_the_short_cut_does_not_apply(value: float) -> None:
    """All logits equal: the lowest id. All negative: bits are not ordered like values. No numbers: some id all the same."""
    pack = packer(torch.bfloat16)
    if pack is None:
        pytest.skip("no packed bf16 linears on this machine")
    weight = random(300, 32, dtype=torch.bfloat16).abs()
    head = PackedHead(lambda rows: rows, weight, pack)
    rows = torch.full((2, 32), value, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert torch.equal(head.greedy(rows), head.logits(rows).argmax(-1))  # type: ignore[arg-type]


def test_equal_logits_go_to_the_lowest_id() -> None:
    """And rows do not mix."""
    row, token = torch.tensor([1, 0, 1, 0, 1]), torch.tensor([9, 7, 4, 3, 2])
    logit = torch.tensor([5.0, 1.0, 5.0, 0.5, 4.0])
    assert best_of(row, token, logit, 2).tolist() == [7, 4]
