"""A LoRA backend that is slow and obvious, a model of a few linears to attach it to, and mutants that the kit must catch.

Weights are kept in float64 as they lie in the checkpoint; each token is computed by itself.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from enginectl.errors import NotFoundError, RequestError
from enginectl.interfaces.adapter import AdapterBackend, AdapterInfo
from enginectl.interfaces.attention import AttentionBackend
from enginectl.interfaces.model import ForwardInput, Kept, LinearSite, Model, ModelSpec

SITES: tuple[tuple[tuple[str, ...], int, tuple[int, ...]], ...] = (
    (("layers.0.q_proj", "layers.0.k_proj", "layers.0.v_proj"), 40, (48, 16, 24)),
    (("layers.0.o_proj",), 48, (40,)),
    (("layers.1.gate_proj", "layers.1.up_proj"), 40, (72, 72)),
    (("layers.1.down_proj",), 72, (40,)),
)
"""Modules, width of the input, widths of the outputs."""

Weights = dict[str, tuple[Tensor, Tensor, float]]
"""Module to lora_A, lora_B and the scale."""


class SiteModel(Model):
    """Linears and nothing else: `run` sends rows through each of them."""

    def __init__(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        self.spec = ModelSpec(architecture="Sites", layers=(), vocab_size=8, hidden_size=40, max_model_len=64)
        random = torch.Generator().manual_seed(1)
        self.weights = [
            (torch.randn(sum(out_sizes), in_size, generator=random) / in_size**0.5).to(dtype).to(device)
            for _, in_size, out_sizes in SITES
        ]
        self._add: dict[int, Callable[[Tensor, Tensor], Tensor]] = {}

    def linear_sites(self) -> Sequence[LinearSite]:
        """One for each of SITES."""
        return [LinearSite(*site, self._connector(i)) for i, site in enumerate(SITES)]

    def _connector(self, index: int) -> Callable[[Callable[[Tensor, Tensor], Tensor]], None]:
        def connect(add: Callable[[Tensor, Tensor], Tensor]) -> None:
            self._add[index] = add

        return connect

    def run(self, rows: Sequence[Tensor], *, adapted: bool) -> list[Tensor]:
        """The output of each linear. rows: by site, [num_tokens, in_size]."""
        found = []
        for i, (own, weight) in enumerate(zip(rows, self.weights, strict=True)):
            out = own @ weight.t()
            found.append(self._add[i](own, out) if adapted else out)
        return found

    def use_attention(self, attention: AttentionBackend) -> None:
        """It has none."""

    def forward(self, step: ForwardInput) -> Kept:
        """Not a language model."""
        raise NotImplementedError("this model has linears only")

    def logits(self, kept: Kept, rows: Tensor | None = None) -> Tensor:
        """Not a language model."""
        raise NotImplementedError("this model has linears only")


def write_adapter(
    directory: Path, rank: int, *, seed: int = 0, modules: Sequence[str] | None = None, **config: Any
) -> Path:
    """A random PEFT checkpoint for `SiteModel`. config: fields of adapter_config.json."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for names, in_size, out_sizes in SITES:
        for name, out_size in zip(names, out_sizes, strict=True):
            if modules is not None and name.rpartition(".")[2] not in modules:
                continue
            for side, shape in (("A", (rank, in_size)), ("B", (out_size, rank))):
                tensor = torch.randn(shape, generator=random) / shape[1] ** 0.5
                tensors[f"base_model.model.{name}.lora_{side}.weight"] = tensor
    targets = sorted({name.rpartition(".")[2] for names, _, _ in SITES for name in names})
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(modules or targets)}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(fields | config))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def read_weights(path: Path) -> Weights:
    """What the checkpoint says, in float64."""
    config = json.loads((path / "adapter_config.json").read_text())
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    tensors = {name.removeprefix("base_model.model."): t.double() for name, t in load_file(path / _FILE).items()}
    modules = {name.partition(".lora_")[0] for name in tensors}
    return {m: (tensors[f"{m}.lora_A.weight"], tensors[f"{m}.lora_B.weight"], scale) for m in modules}


_FILE = "adapter_model.safetensors"


def added(weights: Weights, site: int, row: Tensor) -> Tensor:
    """What an adapter adds to one row of one linear, float64 [sum(out_sizes)]."""
    names, _, out_sizes = SITES[site]
    parts = []
    for name, out_size in zip(names, out_sizes, strict=True):
        if name in weights:
            down, up, scale = weights[name]
            parts.append(scale * (up @ (down @ row.double().cpu())))
        else:
            parts.append(torch.zeros(out_size, dtype=torch.float64))
    return torch.cat(parts)


class LoopAdapters(AdapterBackend):
    """One token after another."""

    def __init__(self, num_slots: int = 3, max_rank: int = 16) -> None:
        self._max_rank = max_rank
        self._known: dict[str, tuple[AdapterInfo, Weights]] = {}
        self._slots: list[tuple[AdapterInfo, Weights] | None] = [None] * num_slots
        self._references = [0] * num_slots
        self._users: dict[str, int] = {}
        self._leaving: set[str] = set()
        self._step: list[int] = []

    def attach(self, model: Model) -> None:
        """Loop over the tokens behind each linear."""
        for index, site in enumerate(model.linear_sites()):
            site.connect(functools.partial(self.add, index))

    def add(self, site: int, rows: Tensor, out: Tensor) -> Tensor:
        """The definition."""
        for i, slot in enumerate(self._step):
            if slot >= 0:
                held = self._slots[slot]
                assert held is not None, "a row names an empty slot"
                out[i] += added(held[1], site, rows[i]).to(out)
        return out

    def load(self, name: str, path: str, *, replace: bool = False) -> AdapterInfo:
        """Nothing is checked but what the kit asks for."""
        if name in self._known and not replace and name not in self._leaving:
            raise RequestError(f"adapter {name!r} is loaded")
        weights = self.read(Path(path))
        rank = max(down.shape[0] for down, _, _ in weights.values())
        if rank > self._max_rank:
            raise RequestError(f"rank {rank} is over {self._max_rank}")
        version = str(hash(tuple(p.read_bytes() for p in sorted(Path(path).iterdir()))))
        info = AdapterInfo(name, path, rank, version)
        self._known[name] = info, weights
        self._leaving.discard(name)
        return info

    def read(self, path: Path) -> Weights:
        """A seam for mutants."""
        return read_weights(path)

    def unload(self, name: str) -> None:
        """Off the list; gone with the last user."""
        if name not in self._known or name in self._leaving:
            raise NotFoundError(f"no adapter {name!r}")
        self._leaving.add(name)
        self._tidy(name)

    def _tidy(self, name: str) -> None:
        if name in self._leaving and not self._users.get(name):
            self._leaving.discard(name)
            del self._known[name]

    def list(self) -> tuple[AdapterInfo, ...]:
        """Those that may be named."""
        return tuple(info for name, (info, _) in self._known.items() if name not in self._leaving)

    def version(self, name: str) -> str | None:
        """Also of one that only has users."""
        return self._known[name][0].version if name in self._known else None

    def add_user(self, name: str) -> None:
        """One more."""
        self._users[name] = self._users.get(name, 0) + 1

    def remove_user(self, name: str) -> None:
        """One less."""
        self._users[name] -= 1
        self._tidy(name)

    def acquire(self, name: str) -> int | None:
        """A slot that holds this version, or a free one."""
        if name not in self._known:
            raise NotFoundError(f"no adapter {name!r}")
        held = self._known[name]
        for slot, other in enumerate(self._slots):
            if other is not None and other[0] == held[0]:
                self._references[slot] += 1
                return slot
        if 0 not in self._references:
            return None
        slot = self._references.index(0)
        self._slots[slot] = held
        self._references[slot] = 1
        return slot

    def release(self, slot: int) -> None:
        """One reference less."""
        assert self._references[slot] > 0, f"slot {slot} is released twice"
        self._references[slot] -= 1

    def begin_step(self, slots: Tensor | None) -> None:
        """Keep the slots."""
        self._step = [] if slots is None else slots.tolist()


class ShiftsSegments(LoopAdapters):
    """The first token of each run of one adapter is taken for one of the run before it."""

    def begin_step(self, slots: Tensor | None) -> None:
        """Off by one."""
        super().begin_step(slots)
        step = self._step
        self._step = [step[max(i - 1, 0)] for i in range(len(step))]


class ForgetsScale(LoopAdapters):
    """Multiplies by alpha / rank, whatever the checkpoint says."""

    def read(self, path: Path) -> Weights:
        """The scale of plain LoRA."""
        config = json.loads((path / "adapter_config.json").read_text())
        scale = config["lora_alpha"] / config["r"]
        return {module: (down, up, scale) for module, (down, up, _) in super().read(path).items()}


class SwapsSlots(LoopAdapters):
    """Tokens of the first two slots read each other's weights."""

    def begin_step(self, slots: Tensor | None) -> None:
        """0 for 1 and 1 for 0."""
        super().begin_step(slots)
        if self._slots[0] is not None and self._slots[1] is not None:
            self._step = [slot ^ 1 if slot in (0, 1) else slot for slot in self._step]


class ReplacesUnderRows(LoopAdapters):
    """Rows that run get the new weights when an adapter is replaced."""

    def load(self, name: str, path: str, *, replace: bool = False) -> AdapterInfo:
        """Into the slots that are in use."""
        info = super().load(name, path, replace=replace)
        self._slots = [self._known[name] if held is not None and held[0].name == name else held for held in self._slots]
        return info


class ForgetsUsers(LoopAdapters):
    """Unloads at once, under choices that wait."""

    def add_user(self, name: str) -> None:
        """Nobody is counted."""

    def remove_user(self, name: str) -> None:
        """Nobody is counted."""


class LendsFullSlots(LoopAdapters):
    """Gives a slot that is in use to another adapter."""

    def acquire(self, name: str) -> int | None:
        """The first one, if all are in use."""
        slot = super().acquire(name)
        if slot is None:
            self._slots[0] = self._known[name]
            self._references[0] += 1
            return 0
        return slot
