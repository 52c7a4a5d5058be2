"""Adapters come, change and go under traffic: every answer is signed by the adapter that was asked for."""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginectl import Engine, SamplingParams
from enginectl.engine.router import Ticket
from enginectl.testing.stepping import ask, finish
from enginectl_lora_sgmv.library import PreparedAdapter

NUM_SLOTS = 4
SIGN = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def schedule(num_adapters: int, random: np.random.Generator) -> list[str]:
    """What is done, in turn: so many of each kind, however long answers take. Names are loaded before others go, and go
    before they are restored.
    """
    counts = Counter(load=num_adapters - 8, replace=num_adapters // 2, ask=num_adapters, ask_base=num_adapters // 8)
    counts["turn"] = num_adapters * 3 // 4
    turns = cycle(["unload", "restore", "unload"])
    later = random.permutation(sorted(counts.elements())).tolist()
    return ["load"] * 8 + [next(turns) if kind == "turn" else kind for kind in later]


@dataclass
class Traffic:
    """Who has which version now, and all it had; what is open, with the name, and how many versions that had then.

    recent: names something was done with lately. They are chosen half of the time, so that what changes is in use.
    """

    engine: Engine
    versions: list[Path]
    signatures: list[list[int]]
    prompt: list[int]
    random: np.random.Generator
    current: dict[int, int] = field(default_factory=dict)
    history: dict[int, list[int]] = field(default_factory=dict)
    opened: list[tuple[Ticket, int | None, int]] = field(default_factory=list)
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=NUM_SLOTS))
    num_answered: int = 0

    def act(self, kind: str) -> None:
        """On a name of those for which it can be done."""
        if kind == "load":
            self._load(len(self.history))
        elif kind == "restore":
            self._load(self._choose(self.history.keys() - self.current.keys()))
        elif kind == "replace":
            self._load(self._choose(self.current))
        elif kind == "unload":
            self.unload(self._choose(self.current))
        else:
            self._ask(self._choose(self.current) if kind == "ask" else None)

    def _choose(self, names: Iterable[int]) -> int:
        known = sorted(names)
        recent = [name for name in self.recent if name in known]
        name = int(self.random.choice(recent if recent and self.random.random() < 0.5 else known))
        self.recent.append(name)
        return name

    def _load(self, name: int) -> None:
        """A version that no other name has, in place if the name has one."""
        free = sorted(set(range(len(self.versions))) - set(self.current.values()))
        version = int(self.random.choice(free))
        self.engine.load_adapter(f"a{name}", str(self.versions[version]), replace=name in self.current)
        self.current[name] = version
        self.history.setdefault(name, []).append(version)

    def unload(self, name: int) -> None:
        del self.current[name]
        self.engine.unload_adapter(f"a{name}")

    def _ask(self, name: int | None) -> None:
        ticket = ask(self.engine, self.prompt, SIGN, adapter=None if name is None else f"a{name}")
        self.opened.append((ticket, name, 0 if name is None else len(self.history[name]) - 1))

    def check_done(self) -> None:
        """Signed by the version that was current when it was asked, or, where it waited, one after that."""
        for entry in [entry for entry in self.opened if entry[0].is_done]:
            self.opened.remove(entry)
            ticket, name, seen = entry
            (tokens,) = finish(self.engine, ticket)
            known = [-1] if name is None else self.history[name][seen:]
            assert tokens[0] in [self.signatures[version] for version in known]
            self.num_answered += 1


def check_traffic(
    engine: Engine, versions: list[Path], signatures: list[list[int]], prompt: list[int], num_adapters: int
) -> None:
    """Loads, replacements, unloads and evictions, a step after each: every answer is signed by its own adapter."""
    random = np.random.default_rng(8)
    traffic = Traffic(engine, versions, signatures, prompt, random)
    backend, num_alive = engine._assembled.parts["adapter"], num_prepared()
    contents: set[Any] = set()

    def step() -> None:
        engine._step()
        contents.update(slot.content for slot in backend.table.slots)
        assert backend.library.num_weights <= max(NUM_SLOTS, engine.config.max_cpu_loras or 0)
        traffic.check_done()

    for kind in schedule(num_adapters, random):
        traffic.act(kind)
        step()
        while len(traffic.opened) >= 16:
            step()
    while traffic.opened:
        step()
    assert traffic.num_answered == num_adapters + num_adapters // 8
    assert len(contents) > num_adapters / 4, "slots changed hands"
    assert len(engine.adapters) == len(traffic.current) == num_adapters * 3 // 4
    check_nothing_stays(engine, traffic)
    assert num_prepared() <= num_alive, "weights of adapters that were outlive them"


def num_prepared() -> int:
    """Adapters whose weights are anywhere in this process."""
    gc.collect()
    return sum(type(found) is PreparedAdapter for found in gc.get_objects())


def check_nothing_stays(engine: Engine, traffic: Traffic) -> None:
    """Once all are unloaded: no names, no weights, nothing that is being read."""
    library = engine._assembled.parts["adapter"].library
    for name in list(traffic.current):
        traffic.unload(name)
    assert (library.num_weights, library._known, library._ahead, library._again) == (0, {}, {}, {})


DEPTHS = pytest.mark.parametrize(
    "engine", [{"overlap_depth": 0}, {"overlap_depth": 1, "max_cpu_loras": 6}], indirect=True, ids=["depth0", "depth1"]
)


@DEPTHS
def test_forty_adapters_through_four_slots_under_traffic(
    engine: Engine, versions: list[Path], signatures: list[list[int]], prompt: list[int]
) -> None:
    """Laws 20, 21."""
    check_traffic(engine, versions, signatures, prompt, 40)


@pytest.mark.slow
@DEPTHS
def test_two_hundred_adapters_through_four_slots_under_traffic(
    engine: Engine, signed: Callable[[int], tuple[list[Path], list[list[int]]]], prompt: list[int]
) -> None:
    """Laws 20, 21."""
    check_traffic(engine, *signed(208), prompt, 200)
