"""Conformance of LoRA backends: `class TestMine(AdapterConformance)` with its own `make_backend` fixture.

Adapters are PEFT checkpoints for `SiteModel`, whose linears are called directly. That a whole engine gives PEFT's tokens
is for tests of the backend's own (`enginectl.testing.tiny_adapters` makes adapters for tiny models).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from enginectl.errors import NotFoundError, RequestError
from enginectl.interfaces.adapter import AdapterBackend
from enginectl.testing.adapter_reference import SITES, SiteModel, Weights, added, read_weights, write_adapter
from enginectl.testing.tolerances import TOLERANCES

MakeBackend = Callable[[int, int], AdapterBackend]

KINDS: tuple[dict[str, Any], ...] = (
    {"rank": 4},
    {"rank": 16, "use_rslora": True},
    {"rank": 7, "lora_alpha": 3},
    {"rank": 1, "modules": ("v_proj", "up_proj")},
    {"rank": 12, "modules": ("q_proj", "k_proj", "o_proj", "down_proj"), "use_rslora": True},
)
"""Adapters of different ranks and scales, some of which leave modules alone."""

SEGMENTS: dict[str, tuple[tuple[int, int], ...]] = {
    "one token": ((0, 1),),
    "one adapter": ((1, 9),),
    "one adapter and the base": ((-1, 3), (2, 2), (-1, 1)),
    "decodes": tuple((slot, 1) for slot in (0, 2, -1, 1, 4, 0, -1, 3, 3, 2)),
    "ragged": ((0, 1), (-1, 5), (1, 17), (2, 33), (0, 2), (4, 16), (-1, 1), (3, 15)),
    "two long": ((3, 70), (1, 64)),
}
"""Runs of tokens: (adapter of KINDS, or -1 for none; number of tokens)."""


class AdapterConformance:
    """What every LoRA backend must do.

    make_backend: the fixture to override, `make_backend(num_slots, max_rank) -> AdapterBackend`, not attached yet, which
    may load from anywhere. dtype_name, device: what it computes in, and where.
    """

    dtype_name = "float32"
    device = "cpu"

    @pytest.fixture
    def make_backend(self) -> MakeBackend:
        raise NotImplementedError("override make_backend in the subclass")

    @pytest.fixture
    def kinds(self, tmp_path: Path) -> list[Path]:
        return write_kinds(tmp_path)

    def test_rows_equal_the_reference(self, make_backend: MakeBackend, kinds: list[Path]) -> None:
        for runs in SEGMENTS.values():
            backend, model = self.attached(make_backend, len(KINDS))
            slots = self.acquired(backend, kinds)
            self.check_rows(backend, model, kinds, slots, runs)

    def test_rows_do_not_depend_on_which_slot_is_whose(self, make_backend: MakeBackend, kinds: list[Path]) -> None:
        backend, model = self.attached(make_backend, len(KINDS))
        slots = self.acquired(backend, kinds)
        for slot in slots:
            backend.release(slot)
        for i in (3, 0, 4):  # used again, in another order, by other weights
            backend.load(f"n{i}", str(kinds[i]), replace=False)
        backend.unload("a1")
        again = [backend.acquire(name) for name in ("n3", "a0", "n0", "a2", "n4")]
        assert None not in again
        assert len(set(again)) == len(again)
        order = [kinds[i] for i in (3, 0, 0, 2, 4)]
        self.check_rows(backend, model, order, [slot for slot in again if slot is not None], SEGMENTS["ragged"])

    def test_a_slot_is_shared_and_waited_for(self, make_backend: MakeBackend, kinds: list[Path]) -> None:
        backend, _ = self.attached(make_backend, 2)
        for i in range(3):
            backend.load(f"a{i}", str(kinds[i]))
        first, second = backend.acquire("a0"), backend.acquire("a1")
        assert first is not None
        assert second is not None
        assert first != second
        assert backend.acquire("a0") == first
        assert backend.acquire("a2") is None
        backend.release(first)
        assert backend.acquire("a2") is None, "one reference is left"
        backend.release(first)
        assert self.patient(backend, "a2") == first
        for slot in (first, second):
            backend.release(slot)
        with pytest.raises(AssertionError):
            backend.release(first)

    def test_an_unknown_name_is_an_error(self, make_backend: MakeBackend, kinds: list[Path]) -> None:
        backend, _ = self.attached(make_backend, 2)
        backend.load("mine", str(kinds[0]))
        for name in ("Mine", "mine ", "min"):
            assert backend.version(name) is None
            with pytest.raises(NotFoundError):
                backend.acquire(name)
            with pytest.raises(NotFoundError):
                backend.unload(name)

    def test_a_refusal_changes_nothing(self, make_backend: MakeBackend, kinds: list[Path], tmp_path: Path) -> None:
        backend, model = self.attached(make_backend, 2)
        backend.load("mine", str(kinds[0]))
        known = backend.list()
        high = write_adapter(tmp_path / "high", 17)
        for name, path, replace in (("mine", kinds[1], False), ("other", high, False), ("mine", high, True)):
            with pytest.raises(RequestError):
                backend.load(name, str(path), replace=replace)
            assert backend.list() == known
        slot = backend.acquire("mine")
        assert slot is not None
        self.check_rows(backend, model, kinds, [slot], SEGMENTS["one token"])

    def test_replacing_leaves_running_rows_alone(self, make_backend: MakeBackend, kinds: list[Path]) -> None:
        backend, model = self.attached(make_backend, 2)
        first = backend.load("mine", str(kinds[0]))
        old = backend.acquire("mine")
        second = backend.load("mine", str(kinds[1]), replace=True)
        assert first.version != second.version == backend.version("mine")
        new = backend.acquire("mine")
        assert old is not None
        assert new is not None
        assert old != new
        self.check_rows(backend, model, kinds, [old, new], ((0, 3), (1, 2), (0, 1)))

    def test_versions_follow_contents(self, make_backend: MakeBackend, kinds: list[Path], tmp_path: Path) -> None:
        backend, _ = self.attached(make_backend, 2)
        same = write_adapter(tmp_path / "same", 4, seed=0)
        other = write_adapter(tmp_path / "other", 4, seed=0, lora_alpha=9)
        versions = [backend.load(str(i), str(path)).version for i, path in enumerate((kinds[0], same, other))]
        assert versions[0] == versions[1] != versions[2]

    def test_unload_waits_for_the_last_user(self, make_backend: MakeBackend, kinds: list[Path]) -> None:
        backend, model = self.attached(make_backend, 1)
        backend.load("mine", str(kinds[0]))
        for _ in range(2):
            backend.add_user("mine")
        slot = backend.acquire("mine")
        backend.unload("mine")
        assert backend.list() == ()
        assert slot is not None
        self.check_rows(backend, model, kinds, [slot], SEGMENTS["one token"])
        backend.release(slot)
        backend.remove_user("mine")
        assert backend.acquire("mine") == slot, "a choice of the request still waited"
        backend.release(slot)
        backend.remove_user("mine")
        with pytest.raises(NotFoundError):
            backend.acquire("mine")
        backend.load("mine", str(kinds[1]))

    def test_a_recorded_step_is_replayed_for_other_slots(self, make_backend: MakeBackend, kinds: list[Path]) -> None:
        backend, model = self.attached(make_backend, len(KINDS))
        if not (backend.graph_capture and self.device.startswith("cuda")):
            pytest.skip("nothing is recorded")
        slots = self.acquired(backend, kinds)
        random, dtype = torch.Generator().manual_seed(8), getattr(torch, self.dtype_name)
        rows = [torch.randn(6, in_size, generator=random).to(dtype).to(self.device) for _, in_size, _ in SITES]
        recorded = torch.full((6,), -1, dtype=torch.int32, device=self.device)

        def run(of_tokens: Tensor) -> list[Tensor]:
            backend.begin_step(of_tokens)
            return model.run(rows, adapted=True)

        run(recorded)  # kernels are compiled
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run(recorded)
        for owner in ((0, 1, -1, 2, 0, -1), (3,) * 6, (-1,) * 6, (4, 3, 2, 1, 0, -1)):
            own = torch.tensor([slots[a] if a >= 0 else -1 for a in owner], dtype=torch.int32, device=self.device)
            recorded.copy_(own)
            graph.replay()
            assert all(torch.equal(mine, exact) for mine, exact in zip(found, run(own), strict=True)), owner

    # -- helpers -------------------------------------------------------------------------------------------------

    def attached(self, make_backend: MakeBackend, num_slots: int) -> tuple[AdapterBackend, SiteModel]:
        backend, model = make_backend(num_slots, 16), SiteModel(getattr(torch, self.dtype_name), self.device)
        backend.attach(model)
        return backend, model

    def acquired(self, backend: AdapterBackend, kinds: Sequence[Path]) -> list[int]:
        """A slot for each kind, not in their order."""
        for i, path in enumerate(kinds):
            backend.load(f"a{i}", str(path))
        slots = {i: self.patient(backend, f"a{i}") for i in (2, 0, 4, 1, 3)}
        return [slots[i] for i in range(len(kinds))]

    @staticmethod
    def patient(backend: AdapterBackend, name: str) -> int:
        """The slot, asked for until weights that are read meanwhile are there."""
        for _ in range(1000):
            if (slot := backend.acquire(name)) is not None:
                return slot
            time.sleep(0.001)
        raise AssertionError(f"no slot for {name!r}")

    def check_rows(
        self,
        backend: AdapterBackend,
        model: SiteModel,
        paths: Sequence[Path],
        slots: Sequence[int],
        runs: Sequence[tuple[int, int]],
    ) -> None:
        """paths, slots: by adapter number."""
        owner = [adapter for adapter, count in runs for _ in range(count)]
        random = torch.Generator().manual_seed(7)
        dtype = getattr(torch, self.dtype_name)
        rows = [torch.randn(len(owner), in_size, generator=random).to(dtype).to(self.device) for _, in_size, _ in SITES]
        base = model.run(rows, adapted=False)
        backend.begin_step(
            torch.tensor([slots[a] if a >= 0 else -1 for a in owner], dtype=torch.int32, device=self.device)
        )
        found = model.run(rows, adapted=True)
        backend.begin_step(None)
        weights = {a: read_weights(paths[a]) for a in set(owner) if a >= 0}
        for site, (mine, plain) in enumerate(zip(found, base, strict=True)):
            expected = torch.stack(
                [self._expected(weights, a, site, rows[site][i], plain[i]) for i, a in enumerate(owner)]
            )
            atol = TOLERANCES[self.dtype_name].atol * 4
            torch.testing.assert_close(mine.double().cpu(), expected, rtol=TOLERANCES[self.dtype_name].rtol, atol=atol)
            untouched = torch.tensor([a < 0 for a in owner])
            assert torch.equal(mine.cpu()[untouched], plain.cpu()[untouched]), "rows without an adapter keep their bits"

    @staticmethod
    def _expected(weights: dict[int, Weights], adapter: int, site: int, row: Tensor, base: Tensor) -> Tensor:
        exact = base.double().cpu()
        return exact if adapter < 0 else exact + added(weights[adapter], site, row)


def write_kinds(directory: Path) -> list[Path]:
    """KINDS as checkpoints."""
    return [write_adapter(directory / f"kind{i}", seed=i, **kind) for i, kind in enumerate(KINDS)]
