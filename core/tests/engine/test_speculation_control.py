"""Draft lengths follow what steps cost and what is accepted. Times are made up, so every decision is reproducible."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from enginectl.engine.speculation import SpeculationController, StepCosts
from enginectl.types import SamplingParams

Cost = Callable[[int], float]
K, BUDGET = 4, 256


def flat(num_tokens: int) -> float:
    """A step that costs the same whatever is in it: memory-bound."""
    return 0.010 + 0.00001 * num_tokens


def linear(num_tokens: int) -> float:
    """A step that costs what its tokens cost: compute-bound."""
    return 0.001 + 0.002 * num_tokens


class World:
    """Rows whose drafts are accepted with a fixed chance each, in an engine with made-up step times."""

    def __init__(
        self, num_rows: int, cost: Cost, accept: float | list[float], *, pass_s: float = 0.0, overhead_s: float = 0.0
    ) -> None:
        self.controller = SpeculationController(num_rows, K, BUDGET)
        self.rows = np.arange(num_rows, dtype=np.int32)
        self.accept = np.full(num_rows, accept) if isinstance(accept, float) else np.array(accept)
        self.cost, self.pass_s, self.overhead_s = cost, pass_s, overhead_s
        self.supply = 1.0
        self.room = np.full(num_rows, K, np.int32)
        self.random = np.random.default_rng(1)
        self.drafts = np.zeros(num_rows, np.int32)
        self.num_tokens = 0
        self.seconds = 0.0
        self.set_speculation(*["auto"] * num_rows)

    def set_speculation(self, *words: str | int) -> None:
        for row, word in enumerate(words):
            self.controller.open_row(row, SamplingParams(speculation=word))

    def limits(self, num_busy: int = 0) -> NDArray[np.int32]:
        """As the planner asks."""
        if self.controller.is_off(self.rows.size, num_busy):
            return np.zeros_like(self.rows)
        return self.controller.limits(self.rows, self.room, num_busy)

    def step(self, num_busy: int = 0) -> NDArray[np.int32]:
        limits = self.limits(num_busy)
        longest = int(limits.max())
        right = self.random.random((self.rows.size, K)) < self.accept[:, None]
        accepted = np.minimum(np.cumprod(right, axis=1).sum(1), self.drafts).astype(np.int32)
        size, drafting_s = int(self.rows.size + self.drafts.sum()), longest * self.pass_s
        seconds = self.cost(size) + drafting_s + (self.overhead_s if longest or self.drafts.any() else 0.0)
        self.controller.observe_step(size, int(self.drafts.sum()), seconds, drafting_s, longest)
        given = np.where(self.random.random(self.rows.size) < self.supply, limits, 0).astype(np.int32)
        self.controller.observe_proposals(self.rows, limits, given)
        self.controller.observe_verified(self.rows, self.drafts, accepted)
        self.num_tokens += int(accepted.sum()) + self.rows.size
        self.seconds += seconds
        self.drafts = given
        return limits

    def run(self, num_steps: int) -> NDArray[np.float64]:
        """Mean chosen length of each row over the second half."""
        lengths = np.array([self.step() for _ in range(num_steps)])
        mean: NDArray[np.float64] = lengths[num_steps // 2 :].mean(0)
        return mean


def test_cheap_and_right_drafts_are_taken_whole() -> None:
    assert World(1, flat, 0.95).run(200)[0] > 3.8


def test_drafts_that_are_never_right_are_given_up() -> None:
    assert World(1, lambda n: 0.010 + 0.0003 * n, 0.0).run(400)[0] < 0.1


def test_off_under_load() -> None:
    """Fair drafts pay for one stream and not for many: the same drafts, another price."""
    few = World(1, lambda n: flat(n) + 0.0005 * n, 0.6).run(200)[0]
    many = World(64, linear, 0.6).run(200)
    assert few > 1.5
    assert many.mean() < 0.05


def test_off_is_taken_at_once_when_load_comes() -> None:
    world = World(32, lambda n: flat(n) if n <= 40 else linear(n), 0.7)
    everyone, room = world.rows, world.room
    world.rows, world.room, world.drafts = everyone[:2], room[:2], np.zeros(2, np.int32)
    world.accept = world.accept[:2]
    assert world.run(100).mean() > 2
    world.rows, world.room = everyone, room
    assert not world.limits(num_busy=BUDGET).any(), "a prompt that fills the step leaves no room for drafts"


def test_rows_differ() -> None:
    lengths = World(8, lambda n: 0.004 + 0.001 * n, [0.95, 0.0] * 4).run(300)
    assert lengths[::2].min() > 1.5
    assert lengths[1::2].max() < 0.3


def test_it_comes_back() -> None:
    """Off is probed now and then: a text that begins to repeat is noticed."""
    world = World(4, flat, 0.0)
    world.run(300)
    world.accept[:] = 0.95
    assert world.run(400).mean() > 3.0


def test_probing_is_cheap() -> None:
    world = World(16, linear, 0.1)
    world.run(400)
    tokens, seconds = world.num_tokens, world.seconds
    world.run(400)
    speed = (world.num_tokens - tokens) / (world.seconds - seconds)
    assert speed > 0.99 * 16 / linear(16)


def test_a_slow_drafter_is_asked_for_less() -> None:
    fast = World(1, flat, 0.7).run(200)[0]
    slow = World(1, flat, 0.7, pass_s=0.004).run(200)[0]
    useless = World(1, flat, 0.7, pass_s=0.05).run(200)[0]
    assert fast > slow > useless
    assert useless < 0.2


@pytest.mark.parametrize(("overhead_s", "is_on"), [(0.0, True), (0.0005, False)])
def test_asking_in_vain_has_a_price(overhead_s: float, is_on: bool) -> None:
    """Drafts are seldom there: asking is right while it costs nothing, and wrong when it delays every step."""
    world = World(4, flat, 0.5, overhead_s=overhead_s)
    world.supply = 0.03
    assert (world.run(600).mean() > 1.0) == is_on


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize(
    "cost", [flat, linear, lambda n: 0.01 if n < 20 else 0.0005 * n], ids=["flat", "linear", "knee"]
)
@pytest.mark.parametrize("accept", [0.05, 0.5, 0.9])
def test_auto_is_about_as_good_as_the_best_fixed_length(rows: int, cost: Cost, accept: float) -> None:
    def speed(*words: str | int) -> float:
        world = World(rows, cost, accept)
        world.set_speculation(*words)
        world.run(600)
        return world.num_tokens / world.seconds

    best = max(speed(*[length] * rows) for length in range(K + 1))
    assert speed(*["auto"] * rows) > 0.93 * best


def test_a_request_says_its_length() -> None:
    world = World(5, linear, 0.0)
    world.set_speculation("off", 0, 1, 3, 99)
    assert world.run(20).tolist() == [0, 0, 1, 3, K]


def test_lengths_keep_to_the_room_and_the_budget() -> None:
    world = World(128, flat, 0.99)
    world.room = world.random.integers(0, K + 1, 128).astype(np.int32)
    for _ in range(50):
        limits = world.step()
        assert (limits <= world.room).all()
        assert 128 + int(limits.sum()) <= BUDGET
    world.set_speculation(*[4] * 128)
    assert 128 + int(world.step().sum()) <= BUDGET


def test_costs_interpolate_and_shrug_off_a_hiccup() -> None:
    costs = StepCosts(512)
    for _ in range(9):
        for size in (1, 5, 64):
            costs.observe(size, linear(size))
    costs.observe(5, 3.0)
    sizes = np.array([1.0, 3.0, 5.0, 30.0, 64.0, 200.0])
    np.testing.assert_allclose(costs.estimate(sizes), [linear(int(size)) for size in sizes], rtol=1e-9)


def test_cost_when_off() -> None:
    """Choosing no drafts for 64 rows takes a small part of a step. Far from the figure: a test machine is busy."""
    world = World(64, linear, 0.05)
    world.run(100)
    controller, none = world.controller, np.zeros(64, np.int32)
    taken = []
    for _ in range(300):
        start = time.perf_counter()
        limits = controller.limits(world.rows, world.room)
        controller.observe_step(64, 0, 0.1, 0.0, int(limits.max()))
        controller.observe_proposals(world.rows, limits, none)
        taken.append(time.perf_counter() - start)
    assert np.median(taken) < 200e-6
