"""The kernels keep the contract on ragged segments, and mutants of them do not.

bfloat16 is not tested here: the interpreter computes with its bit patterns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from enginectl.testing.adapter import AdapterConformance, MakeBackend, write_kinds
from enginectl_lora_sgmv.backend import Kernels, SgmvAdapters
from enginectl_lora_sgmv.config import SgmvConfig
from enginectl_lora_sgmv.triton_store import DeviceSegments, TritonStore, device_segments

KIT = AdapterConformance()


def maker(directory: Path, kernels: Kernels, dtype: torch.dtype = torch.float32) -> MakeBackend:
    def make(num_slots: int, max_rank: int) -> SgmvAdapters:
        config = SgmvConfig(roots=(str(directory),))
        return SgmvAdapters(
            max_loras=num_slots, max_lora_rank=max_rank, max_cpu_loras=8, dtype=dtype, config=config, kernels=kernels
        )

    return make


class TestTriton(AdapterConformance):
    @pytest.fixture
    def make_backend(self, tmp_path: Path) -> MakeBackend:
        return maker(tmp_path, Kernels(TritonStore, device_segments), getattr(torch, self.dtype_name))


class TestTritonFloat16(TestTriton):
    dtype_name = "float16"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_tokens", [3, 150])
def test_inputs_cut_into_parts_and_ranks_of_several_blocks(num_tokens: int, dtype: torch.dtype) -> None:
    """A wide input is split, a high rank is read in pieces, and neither fills its blocks."""
    random = torch.Generator().manual_seed(0)
    num_slots, rank, in_size, out_sizes = 3, 72, 1100, (130, 33)
    store = TritonStore(num_slots, rank, in_size, out_sizes, dtype=dtype, device="cpu")
    parts = [
        [
            (
                (torch.randn(own, in_size, generator=random) / in_size**0.5).to(dtype),
                (torch.randn(out, own, generator=random) / own**0.5).to(dtype),
            )
            for out in out_sizes
        ]
        for own in (72, 5, 65)
    ]
    for slot in range(num_slots):
        store.write(slot, parts[(slot + 1) % num_slots])
        store.write(slot, parts[slot])
    slots = torch.randint(-1, num_slots, (num_tokens,), generator=random, dtype=torch.int32)
    slots[0] = 1
    rows = torch.randn(num_tokens, in_size, generator=random).to(dtype)
    out = torch.randn(num_tokens, sum(out_sizes), generator=random).to(dtype)
    expected = out.double()
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[i] += torch.cat([up.double() @ (down.double() @ rows[i].double()) for down, up in parts[slot]])
    found = store.add(rows, out.clone(), device_segments(slots, [0] * num_slots))
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(found[slots < 0], out[slots < 0])


def test_rows_of_padding_alone_add_nothing() -> None:
    """As when a decode step is recorded as a CUDA graph, before anybody has a slot."""
    store = TritonStore(2, 8, 64, (32,), dtype=torch.float32, device="cpu")
    store.down.fill_(float("nan"))
    rows, out = torch.ones(5, 64), torch.ones(5, 32)
    found = store.add(rows, out.clone(), device_segments(torch.full((5,), -1, dtype=torch.int32), [0, 0]))
    assert torch.equal(found, out)


def test_ordering_tokens_never_looks_at_slots_on_the_host() -> None:
    """What a graph records must not depend on the slots it was recorded with; a tensor without contents shows it."""
    step = device_segments(torch.empty(5, dtype=torch.int32, device="meta"), [0, 0, 0])
    assert step.tokens.is_meta
    assert step.starts.shape == (4,)


def shifted(slots: Tensor, ranks: Sequence[int]) -> DeviceSegments:
    """Each segment begins and ends a token late."""
    step = device_segments(slots, ranks)
    starts = (step.starts + 1).clamp_max(step.num_tokens)
    return DeviceSegments(step.num_tokens, step.tokens, starts)


def swapped(slots: Tensor, ranks: Sequence[int]) -> DeviceSegments:
    """The first two slots for each other."""
    turned = torch.where(slots == 0, 1, torch.where(slots == 1, 0, slots)).to(torch.int32)
    return device_segments(turned, ranks)


class DoubledScale(TritonStore):
    """Adds everything twice."""

    def add(self, rows: Tensor, out: Tensor, step: DeviceSegments) -> Tensor:
        return super().add(rows, super().add(rows, out, step), step)


class MixedParts(TritonStore):
    """Takes a part's columns for those of the part before it."""

    def write(self, slot: int, parts: Sequence[tuple[Tensor, Tensor] | None] | None) -> None:
        super().write(slot, parts)
        self.down[slot] = self.down[slot].roll(self._rank, 0)


@pytest.mark.parametrize(
    "mutant",
    [
        Kernels(TritonStore, shifted),
        Kernels(TritonStore, swapped),
        Kernels(DoubledScale, device_segments),
        Kernels(MixedParts, device_segments),
    ],
    ids=["segment off by one", "slot swap", "wrong scale", "mixed parts"],
)
def test_a_mutant_fails(mutant: Kernels, tmp_path: Path) -> None:
    check: Callable[[MakeBackend, list[Path]], None] = KIT.test_rows_equal_the_reference
    with pytest.raises(AssertionError):
        check(maker(tmp_path, mutant), write_kinds(tmp_path))
