"""Core's policies in the real loop: order, bounded skip-ahead, preemption, slower reading, shares."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from enginectl.builtin.scheduler_fair import FairScheduler
from enginectl.builtin.scheduler_fcfs import FcfsScheduler
from enginectl.builtin.scheduler_priority import PriorityScheduler
from enginectl.builtin.scheduler_queue import QueueScheduler
from enginectl.engine.admission import Admission
from enginectl.engine.request import Request
from enginectl.interfaces.scheduler import RunningRows, StepBudget, first_come
from enginectl.plugins import PluginHost
from enginectl.provider import Role
from enginectl.testing.free_executor import FreeLoop, free_core, free_request, free_tokens

POLICIES = {"fcfs": FcfsScheduler, "priority": PriorityScheduler, "fair": FairScheduler}
Make = Callable[..., QueueScheduler]


@pytest.fixture(params=POLICIES)
def make(request: pytest.FixtureRequest) -> Make:
    return POLICIES[request.param]


def waiting(key: int, *, length: int = 4, **given: Any) -> Request:
    return Request(free_request(key, [1] * length, 4, **given))


def running(pending: list[int], **columns: Any) -> RunningRows:
    n = len(pending)
    found = {"priority": [0] * n, "arrival_s": range(n), "tenant": [0] * n, "tenants": ("",), **columns}
    return RunningRows(
        np.arange(n, dtype=np.int32),
        np.array(pending, np.int32),
        np.array(pending, np.int32),
        np.array(found["priority"], np.int32),
        np.array(found["arrival_s"], np.float64),
        np.array(found["tenant"], np.int32),
        found["tenants"],
    )


def keys(scheduler: QueueScheduler, now: float = 0.0) -> list[int]:
    return [request.key for request in scheduler.candidates(now)]


# -- every policy ------------------------------------------------------------------------------------------------------


def test_they_come_through_the_same_door_and_fcfs_is_the_default() -> None:
    host = PluginHost()
    machine: Any = SimpleNamespace(device="cpu")
    assert set(POLICIES) <= set(host.catalogue[Role.SCHEDULER])
    assert host.select(Role.SCHEDULER, machine).chosen[0].provider.name == "fcfs"
    options = host.options(host.plugins["fair"], {"fair": {"skip-ahead": "3", "output-weight": "1.5"}})
    context: Any = SimpleNamespace(options=options)
    built = host.entry(Role.SCHEDULER, "fair").provider.build(context)
    assert (type(built), built._skip_ahead, built._output_weight) == (FairScheduler, 3, 1.5)


def test_one_that_does_not_wait_cannot_leave(make: Make) -> None:
    scheduler = make()
    scheduler.add(waiting(1), resumed=False)
    with pytest.raises(KeyError):
        scheduler.remove(waiting(2))
    assert len(scheduler) == 1
    assert keys(scheduler) == [1]


def test_equals_are_served_as_they_came_and_preempted_ones_first(make: Make) -> None:
    """Law 15."""
    scheduler = make()
    for key in range(5):
        scheduler.add(waiting(key, arrival_s=float(key)), resumed=False)
    for key in (8, 7):  # newest first, as core preempts
        scheduler.add(waiting(key, arrival_s=float(key) - 20), resumed=True)
    assert keys(scheduler) == [7, 8, 0, 1, 2, 3, 4]


def test_candidates_may_be_removed_on_the_way(make: Make) -> None:
    scheduler = make()
    requests = [waiting(key, arrival_s=float(key)) for key in range(200)]
    for request in requests:
        scheduler.add(request, resumed=False)
    seen = []
    for request in scheduler.candidates(0.0):
        seen.append(request.key)
        if request.key % 3:
            scheduler.remove(request)
        else:
            assert scheduler.refused(request, "grammar", 0.0)
    assert seen == list(range(200))
    assert keys(scheduler) == list(range(0, 200, 3))


def test_a_big_request_is_passed_by_so_many_and_no_more(make: Make) -> None:
    """Law 12: small ones do not wait behind it for ever, and do not starve it."""
    scheduler = make(skip_ahead=3, skip_ahead_s=100.0)
    scheduler.add(waiting(0), resumed=False)
    passed = 0
    for key in range(1, 10):
        small = waiting(key, arrival_s=float(key))
        scheduler.add(small, resumed=False)
        for request in scheduler.candidates(float(key)):
            if request.key == 0:
                if not scheduler.refused(request, "blocks", float(key)):
                    break
            else:
                scheduler.remove(request)
                passed += 1
    assert passed == 3
    assert len(scheduler) == 7


def test_a_big_request_is_passed_for_so_long_and_no_longer(make: Make) -> None:
    """Law 12; the same bounds the wait for an adapter slot, and a grammar is never waited for by others."""
    scheduler = make(skip_ahead=99, skip_ahead_s=2.0)
    request = waiting(0)
    scheduler.add(request, resumed=False)
    for reason in ("blocks", "adapter"):
        assert scheduler.refused(request, reason, 10.0)
    assert scheduler.refused(request, "blocks", 11.9)
    assert not scheduler.refused(request, "blocks", 12.0)
    assert not scheduler.refused(request, "adapter", 12.0)
    assert scheduler.refused(request, "grammar", 99.0)


def test_nobody_passes_a_preempted_request_that_waits_for_blocks(make: Make) -> None:
    """Law 15."""
    scheduler = make()
    request = waiting(0)
    request.num_preemptions = 1
    scheduler.add(request, resumed=True)
    assert not scheduler.refused(request, "blocks", 0.0)


def test_the_latest_arrival_gives_way_first(make: Make) -> None:
    """Law 15: not the row admitted last, which may be one that has just resumed."""
    rows = running([1, 1, 1], arrival_s=[5.0, 9.0, 1.0])
    assert make().victims(rows, 0.0).tolist() == [1, 0, 2]


def test_grants_stay_within_the_budget(make: Make) -> None:
    random = np.random.default_rng(0)
    scheduler = make()
    for _ in range(300):
        n = int(random.integers(1, 12))
        rows = running(
            random.integers(1, 40, n).tolist(), priority=random.integers(0, 3, n), tenant=random.integers(0, 3, n),
            tenants=("a", "b", "c"),
        )  # fmt: skip
        slow = None if random.random() < 0.5 else int(random.integers(1, 20))
        budget = StepBudget(int(random.integers(1, 60)), int(random.integers(1, 40)), slow)
        counts = scheduler.grant(rows, budget, 0.0)
        assert counts.sum() <= budget.num_tokens
        assert (counts >= 0).all()
        assert (counts <= np.minimum(rows.num_pending, budget.max_chunk)).all()
        assert counts.any()
        reads = rows.num_pending > 1
        if slow is not None and (counts[~reads] > 0).any():
            assert counts[(counts > 1)].sum() <= slow


@pytest.mark.parametrize("depth", [0, 1])
def test_every_request_gets_its_tokens_under_preemption(make: Make, depth: int) -> None:
    """Laws 1 and 15: whatever the policy, and it preempts."""
    loop = free_core(num_blocks=20, max_model_len=60, scheduler=make(), overlap_depth=depth)
    random = np.random.default_rng(3)
    prompts = [random.integers(1, 60, int(random.integers(1, 20))).tolist() for _ in range(40)]
    for key, prompt in enumerate(prompts):
        tenant, priority = f"tenant {key % 3}", key % 2
        loop.core.add(free_request(key, prompt, 24, tenant=tenant, priority=priority, arrival_s=float(key)))
    loop.run()
    assert 3 < loop.core.stats().num_preemptions < 80
    for key, prompt in enumerate(prompts):
        assert loop.answers.tokens[key] == free_tokens(prompt, 24, vocab_size=64)
    assert len(loop.core.scheduler) == 0
    loop.close()


# -- core's part -------------------------------------------------------------------------------------------------------


def reading_per_step(threshold: int | None) -> list[int]:
    """Prompt tokens of each step while a row decodes and a prompt of 60 is read."""
    loop = free_core(max_num_batched_tokens=32, num_blocks=64)
    loop.core._planner.budget.max_prefill = threshold
    loop.core.add(free_request(0, [1], 40))
    loop.step()
    loop.core.add(free_request(1, [2] * 60, 2))
    loop.core.add(free_request(2, [3] * 30, 2))
    sizes = []
    while 1 not in loop.answers.finished:
        before = loop.core.table.num_computed[:3].sum()
        loop.step()
        sizes.append(int(loop.core.table.num_computed[:3].sum() - before))
    return sizes


def test_prompts_are_read_slower_while_others_decode() -> None:
    """A step with a long prompt takes no longer than the limit lets it, so tokens of running requests keep coming."""
    assert reading_per_step(None)[:2] == [32, 32]
    assert all(size <= 8 + 2 for size in reading_per_step(8))


def test_prompts_alone_are_read_at_full_speed() -> None:
    counts = first_come(np.array([50, 50], np.int32), StepBudget(64, 64, 8))
    assert counts.tolist() == [50, 14]
    assert first_come(np.array([1, 50, 50], np.int32), StepBudget(64, 64, 8)).tolist() == [1, 8, 0]


def test_a_preempted_request_comes_back_when_there_is_room_to_grow() -> None:
    """Law 15: it waits for a block for every running row, more the oftener it gave way; alone it always runs."""
    loop = free_core(num_blocks=20)
    admission: Admission = loop.core.admission
    request = waiting(1, length=16)  # 5 blocks with the next token
    loop.core.pool.take(8)
    assert not isinstance(admission.try_acquire(request, 99, 4, 0), str)
    loop.core.pool.take(0)
    request.num_preemptions = 2
    assert admission.try_acquire(request, 99, 4, 0) == "blocks"  # 8 left: 5, the watermark of 1, and 2 times 4 rows
    assert not isinstance(admission.try_acquire(request, 99, 0, 0), str)


def test_indices_of_tenants_are_used_again() -> None:
    """They grew with every tenant that came while anybody ran."""
    loop: FreeLoop = free_core(num_blocks=64, max_num_seqs=4)
    loop.core.add(free_request(0, [1], 100, tenant="stays"))
    for key in range(1, 200):
        loop.core.add(free_request(key, [1], 1, tenant=f"tenant {key}"))
        loop.step()
    table = loop.core.table
    assert len(table._tenant_names) <= 4
    assert set(table._tenants) <= {"stays", "tenant 199", "tenant 198", "tenant 197"}
    loop.run()
    assert table._tenants == {}


# -- priority ----------------------------------------------------------------------------------------------------------


def test_lower_numbers_first_and_resumed_ones_among_equals() -> None:
    scheduler = PriorityScheduler()
    for key, priority, resumed in ((1, 5, False), (2, 0, False), (3, 5, True), (4, -1, False), (5, 0, False)):
        scheduler.add(waiting(key, priority=priority, arrival_s=float(key)), resumed=resumed)
    assert keys(scheduler) == [4, 2, 5, 3, 1]


def test_the_worst_priority_then_the_newest_gives_way() -> None:
    rows = running([1] * 4, priority=[1, 2, 2, 0], arrival_s=[9.0, 1.0, 3.0, 10.0])
    assert PriorityScheduler().victims(rows, 0.0).tolist() == [2, 1, 0, 3]


def test_prompts_are_read_by_priority_after_decodes() -> None:
    rows = running([30, 1, 30, 30], priority=[1, 9, 0, 1])
    assert PriorityScheduler().grant(rows, StepBudget(41, 64), 0.0).tolist() == [10, 1, 30, 0]


# -- fair --------------------------------------------------------------------------------------------------------------


def served(loop: FreeLoop, tenants: dict[int, str]) -> dict[str, int]:
    found = dict.fromkeys(tenants.values(), 0)
    for key, tokens in loop.answers.tokens.items():
        found[tenants[key]] += len(tokens)
    return found


def flood(scheduler: Any, num_steps: int) -> dict[str, int]:
    """Output tokens after some steps of a tenant with short answers and one with long ones, both with a long queue."""
    loop = free_core(num_blocks=200, max_num_seqs=4, scheduler=scheduler)
    tenants = {}
    for key in range(400):
        tenants[key] = "many" if key < 300 else "few"
        loop.core.add(free_request(key, [1] * 4, 4 if key < 300 else 12, tenant=tenants[key]))
    for _ in range(num_steps):
        loop.step()
    return served(loop, tenants)


def test_tenants_get_equal_tokens_whatever_they_send() -> None:
    got = flood(FairScheduler(output_weight=1.0, burst=0.0), 200)
    assert got["few"] > 100
    assert 0.5 < got["many"] / got["few"] < 2.0
    assert flood(FcfsScheduler(), 200)["few"] == 0


def test_a_light_tenant_is_served_at_once() -> None:
    scheduler = FairScheduler()
    for key in range(50):
        scheduler.add(waiting(key, tenant="heavy", arrival_s=float(key)), resumed=False)
    for request in scheduler.candidates(0.0):
        scheduler.remove(request)
        if request.key == 5:
            break
    scheduler.add(waiting(99, tenant="light", arrival_s=99.0), resumed=False)
    assert keys(scheduler)[0] == 99


def test_idle_time_is_not_saved_up() -> None:
    """A tenant that was away gets its burst ahead of the others, and then its share."""
    scheduler = FairScheduler(burst=10.0)
    for key in range(100):
        scheduler.add(waiting(key, tenant="always", arrival_s=float(key)), resumed=False)
    for request in scheduler.candidates(0.0):
        scheduler.remove(request)
        if request.key == 50:
            break
    for key in range(200, 300):
        scheduler.add(waiting(key, tenant="back", arrival_s=float(key)), resumed=False)
    order = keys(scheduler)[:20]
    ahead = next(place for place, key in enumerate(order) if key < 100)
    assert 2 <= ahead <= 4
    assert 8 <= sum(key < 100 for key in order) <= 10


def test_output_counts_and_reading_leaves_room_for_who_has_had_less() -> None:
    scheduler = FairScheduler(output_weight=2.0)
    tenants = ("heavy",)
    rows = running([1] * 10 + [200], tenant=[0] * 11, tenants=tenants)
    scheduler.grant(rows, StepBudget(100, 100, num_free_rows=5), 0.0)
    assert scheduler.service("heavy") == 20.0 - 4096.0
    scheduler._service["heavy"] = 10_000.0
    scheduler.add(waiting(1, length=30, tenant="heavy"), resumed=False)
    scheduler.add(waiting(2, length=30, tenant="light"), resumed=False)
    assert scheduler.grant(rows, StepBudget(100, 100, num_free_rows=5), 0.0).tolist() == [1] * 10 + [60]
    assert scheduler.grant(rows, StepBudget(100, 100, num_free_rows=0), 0.0).tolist() == [1] * 10 + [90]


def test_a_step_that_is_planned_anew_is_paid_for_once() -> None:
    """Blocks ran out, a row gave way, and what the first answer had granted stayed on the counters."""
    scheduler = FairScheduler(output_weight=1.0)
    rows = running([1, 1, 1], tenant=[0, 0, 1], tenants=("a", "b"))
    budget = StepBudget(100, 100)
    scheduler.grant(rows, budget, 1.0)
    scheduler.grant(rows, budget, 2.0)
    scheduler.victims(rows, 2.0)
    scheduler.finished(waiting(1, tenant="a"), 2.0)
    scheduler.grant(running([1, 1], tenant=[0, 1], tenants=("a", "b")), budget, 2.0)
    assert (scheduler.service("a") + 4096, scheduler.service("b") + 4096) == (3.0, 2.0)
    scheduler.grant(running([1], tenant=[1], tenants=("a", "b")), budget, 3.0)
    scheduler.grant(running([1], tenant=[1], tenants=("a", "b")), budget, 3.0)
    assert (scheduler.service("a") + 4096, scheduler.service("b") + 4096) == (3.0, 3.0)


def test_what_is_taken_back_is_taken_from_who_had_it() -> None:
    """The last row of `a` ended while a step was planned anew, and a resumed one of `c` got its index."""
    scheduler, names, budget = FairScheduler(output_weight=1.0), ["a", "b"], StepBudget(100, 100)
    scheduler.grant(running([1, 1], tenant=[0, 1], tenants=names), budget, 1.0)
    scheduler.finished(waiting(1, tenant="a"), 1.0)
    scheduler.grant(running([1], tenant=[1], tenants=names), budget, 1.0)
    resumed = waiting(1, tenant="c")
    scheduler.add(resumed, resumed=True)
    assert next(iter(scheduler.candidates(1.0))) is resumed
    scheduler.remove(resumed)
    names[0] = "c"
    assert [scheduler.service(name) + 4096 for name in "ab"] == [0.0, 1.0]
    assert scheduler.service("c") == 0.0


def test_what_is_paid_is_what_was_made_under_preemption() -> None:
    """Law 15: every output token is on a counter once, however often steps were planned anew."""
    scheduler = FairScheduler(output_weight=1.0)
    paid = dict.fromkeys("abc", 0.0)
    loop = free_core(num_blocks=20, max_model_len=60, scheduler=scheduler)
    for key in range(30):
        loop.core.add(free_request(key, [1 + key] * 8, 24, tenant="abc"[key % 3], arrival_s=float(key)))
    start = {name: scheduler.service(name) for name in paid}
    loop.run()
    assert loop.core.stats().num_preemptions > 3
    for name in paid:
        paid[name] = scheduler.service(name) - start[name] - 10 * 8
        # A prompt's last chunk makes a token too, and so does a resumed row's: they are reading, not decoding.
        assert paid[name] <= 10 * 24
    assert sum(paid.values()) > 0.5 * 30 * 24
    loop.close()


def test_rows_of_the_most_served_tenant_give_way() -> None:
    scheduler = FairScheduler()
    scheduler._service = {"a": 5.0, "b": 50.0}
    rows = running([1] * 4, tenant=[0, 1, 1, 0], arrival_s=[9.0, 1.0, 3.0, 10.0], tenants=("a", "b"))
    assert scheduler.victims(rows, 0.0).tolist() == [2, 1, 3, 0]


def test_accounts_do_not_grow_with_tenants() -> None:
    """Law 14: 30,000 tenants, each once."""
    scheduler = FairScheduler()
    for key in range(30_000):
        request = waiting(key, tenant=f"tenant {key}")
        scheduler.add(request, resumed=False)
        for offered in scheduler.candidates(0.0):
            scheduler.remove(offered)
    assert len(scheduler._service) <= 3 * 4096
    assert scheduler._queues == {}
    assert scheduler._refusals == {}
