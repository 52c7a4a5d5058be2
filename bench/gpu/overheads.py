"""Sections that ask what a feature costs a decode step: graphs, overlap, sampling, adapters, drafts."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from adapters import save_adapters
from engines import decode_step_s, engine_for
from harness import Bench
from numpy.typing import NDArray
from random_model import config_of

from enginectl import SamplingParams
from enginectl.interfaces.speculator import DraftBatch, Speculator

Kinds = dict[str, dict[str, Any]]
"""Name of a kind of engine to its options; `params` and `adapters` are those of the requests."""


def compare(bench: Bench, shape: str, batches: Sequence[int], kinds: Kinds) -> None:
    """A decode step of each kind of engine, beside the first kind's. Kinds with the same options share an engine."""
    first: dict[int, float] = {}
    for options, members in by_options(kinds):
        make = partial(engine_for, bench, shape, default_backend(bench), max(batches), **options)
        with bench.attempt(model=shape, kind=", ".join(members)), make() as engine:
            for kind, asked in members.items():
                for batch in batches:
                    seconds = decode_step_s(bench, engine, batch, **asked)
                    first.setdefault(batch, seconds)
                    row = {"model": shape, "kind": kind, "batch": batch, "step_ms": seconds * 1e3}
                    bench.add(**row, times=seconds / first[batch])


def by_options(kinds: Kinds) -> list[tuple[dict[str, Any], Kinds]]:
    """Options of an engine, and what is asked of it, by kind."""
    found: list[tuple[dict[str, Any], Kinds]] = []
    for kind, given in kinds.items():
        asked = {key: value for key, value in given.items() if key in ("params", "adapters")}
        options = {key: value for key, value in given.items() if key not in asked}
        if not found or found[-1][0] != options:
            found.append((options, {}))
        found[-1][1][kind] = asked
    return found


def default_backend(bench: Bench) -> str:
    """What a GPU gets when nothing is asked for; a dry run's engine has core's."""
    return bench.sizes("triton", "torch")


def graphs(bench: Bench) -> None:
    """Decode steps as CUDA graphs against kernel by kernel, and the host a step ahead against in turn."""
    kinds: Kinds = {
        "graphs, overlap": {},
        "eager, overlap": {"enforce_eager": True},
        "graphs, in turn": {"overlap_depth": 0},
        "eager, in turn": {"enforce_eager": True, "overlap_depth": 0},
    }
    compare(bench, bench.sizes("0.5B", "tiny"), bench.sizes([1, 64], [1, 2]), kinds)
    both = dict(list(kinds.items())[:2])
    for shape in bench.sizes(["8B", "1.5B"], []):
        compare(bench, shape, [1, 64], both)


def sampling(bench: Bench) -> None:
    """Greedy against temperature, and against top-k and top-p, over the whole vocabulary."""
    listed = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 1}
    asked = {"greedy": {"temperature": 0.0}, "temperature": {"temperature": 1.0, "seed": 1}, "top-k, top-p": listed}
    for sampler in bench.sizes(["triton", "torch"], ["torch"]):
        kinds: Kinds = {f"{kind}, {sampler}": {"params": given, "sampler": sampler} for kind, given in asked.items()}
        compare(bench, bench.sizes("0.5B", "tiny"), bench.sizes([1, 64], [2]), kinds)


def lora(bench: Bench) -> None:
    """Eight adapters in a batch, one, and none in an engine that could; against an engine without adapters."""
    shape = bench.sizes("0.5B", "tiny")
    with tempfile.TemporaryDirectory() as folder:
        serving = save_adapters(Path(folder), shape, 8)
        names = list(serving["lora_modules"])
        kinds: Kinds = {
            "without": {},
            "adapters loaded, none used": serving,
            "one adapter": {**serving, "adapters": names[:1]},
            "eight adapters": {**serving, "adapters": names},
            "eight adapters, eager": {**serving, "adapters": names, "enforce_eager": True},
        }
        compare(bench, shape, bench.sizes([1, 64], [2]), kinds)


class Guess(Speculator):
    """Drafts that are right or wrong at will, so that cost and gain are apart. The model's next token is the last one's
    successor.
    """

    is_adaptive = False

    def __init__(self, max_drafts: int, vocab_size: int) -> None:
        self.max_drafts = max_drafts
        self._vocab_size = vocab_size
        self.is_right = True

    def add_row(self, row: int, token_ids: NDArray[np.int32], params: SamplingParams) -> None:
        """Nothing to know."""

    def remove_row(self, row: int) -> None:
        """Nothing to forget."""

    def propose(self, batch: DraftBatch) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The successors of each row's last token, or those one further on."""
        last = batch.token_ids[batch.rows, batch.num_tokens - 1]
        ahead = np.arange(1, self.max_drafts + 1, dtype=np.int32) + (0 if self.is_right else 1)
        return (last[:, None] + ahead) % self._vocab_size, batch.limit


def speculation(bench: Bench) -> None:
    """Four drafts a row, all right and all wrong, against none: the gain at best, the loss at worst."""
    shape, batches = bench.sizes("1.5B", "tiny"), bench.sizes([1, 16], [2])
    plain: dict[int, float] = {}
    with engine_for(bench, shape, default_backend(bench), max(batches), successor=True) as engine:
        for batch in batches:
            plain[batch] = decode_step_s(bench, engine, batch)
            bench.add(model=shape, kind="no drafts", batch=batch, token_ms=plain[batch] * 1e3)
    guess = Guess(4, config_of(shape)["vocab_size"])
    options = {"speculator": guess, "successor": True}
    with engine_for(bench, shape, default_backend(bench), max(batches), **options) as engine:
        for guess.is_right in (True, False):
            for batch in batches:
                before = engine.stats()
                seconds = decode_step_s(bench, engine, batch)
                after = engine.stats()
                drafted = after.num_drafted - before.num_drafted
                accepted = after.num_accepted - before.num_accepted
                bench.add(
                    model=shape,
                    kind=f"4 drafts, all {'right' if guess.is_right else 'wrong'}",
                    batch=batch,
                    token_ms=seconds * 1e3,
                    times=seconds / plain[batch],
                    accepted=f"{accepted} of {drafted}",
                    ok=accepted == (drafted if guess.is_right else 0) and drafted > 0,
                )
