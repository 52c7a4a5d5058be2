"""The fcfs scheduler conforms, and serves in the order of arrival."""

from __future__ import annotations

import pytest

from enginectl.builtin.scheduler_fcfs import FcfsScheduler
from enginectl.testing.scheduler import MakeScheduler, SchedulerConformance, running, waiting


class TestFcfs(SchedulerConformance):
    @pytest.fixture
    def make_scheduler(self) -> MakeScheduler:
        return FcfsScheduler


def test_first_come_first_served() -> None:
    """Preempted ones first, the oldest of them before the others, whenever they were preempted."""
    scheduler = FcfsScheduler()
    for key in (4, 5, 6):
        scheduler.add(waiting(key), resumed=False)
    for key in (3, 2, 1):  # preempted newest first, one after the other
        scheduler.add(waiting(key), resumed=True)
    assert [r.key for r in scheduler.candidates(9.0)] == [1, 2, 3, 4, 5, 6]


def test_the_newest_row_gives_way() -> None:
    assert FcfsScheduler().victims(running([1, 1, 1]), 0.0).tolist() == [2, 1, 0]
