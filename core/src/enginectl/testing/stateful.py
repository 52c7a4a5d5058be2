"""Runs a Hypothesis state machine for so many steps. Needs `hypothesis`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def drive(
    machine: type[RuleBasedStateMachine],
    happened: Counter[str],
    *,
    num_steps: int,
    wanted: Iterable[str],
    least: int = 10,
    max_rounds: int = 100,
) -> None:
    """Rounds of 20 runs, with seeds 1, 2 …, until `happened["steps"]` is num_steps and each of `wanted` happened `least`
    times. The machine counts. Raises AssertionError after max_rounds.

    A fixed number of runs does not show the same in every test session: among the values that Hypothesis draws are
    constants of the modules that are loaded, and those depend on the tests that were collected.
    """
    fixed = settings(
        max_examples=20, stateful_step_count=40, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    for number in range(1, max_rounds + 1):
        run_state_machine_as_test(seed(number)(machine), settings=fixed)
        if happened["steps"] >= num_steps and all(happened[what] >= least for what in wanted):
            return
    raise AssertionError(f"after {max_rounds} rounds: {dict(happened)}; wanted {num_steps} steps, {sorted(wanted)}")
