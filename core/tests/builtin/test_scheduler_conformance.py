"""The conformance kit over core's own policies."""

from __future__ import annotations

import pytest

from enginectl.builtin.scheduler_fair import FairScheduler
from enginectl.builtin.scheduler_fcfs import FcfsScheduler
from enginectl.builtin.scheduler_priority import PriorityScheduler
from enginectl.testing.scheduler import MakeScheduler, SchedulerConformance


class TestFcfs(SchedulerConformance):
    @pytest.fixture
    def make_scheduler(self) -> MakeScheduler:
        return FcfsScheduler


class TestPriority(SchedulerConformance):
    @pytest.fixture
    def make_scheduler(self) -> MakeScheduler:
        return PriorityScheduler


class TestFair(SchedulerConformance):
    @pytest.fixture
    def make_scheduler(self) -> MakeScheduler:
        return FairScheduler
