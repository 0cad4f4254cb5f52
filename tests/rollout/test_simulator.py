"""The simulator of tools/bench: a clock that jumps, an engine that gets slow, and our own collector between them."""

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, replace
from itertools import count

import pytest

from lego.rollout.curriculum import Course, TaskRates, Walk
from lego.rollout.cuts import Patience
from lego.rollout.window import Slots, Window
from tools.bench.simulator.clock import Stuck, run_virtual
from tools.bench.simulator.engine import Capacity, SharedEngine, Span
from tools.bench.simulator.shape import Shape
from tools.bench.simulator.world import Result, Setting, random_setting, simulate, tasks

DAY_S = 86_400.0
TENTH = Capacity(slots=2, step_s=0.1, per_answer_s=0.0)
"""Ten tokens a second each, whatever the load; two answers at a time."""


# The clock


def test_timers_fire_in_the_order_of_their_times_and_nobody_waits() -> None:
    heard: list[tuple[str, float]] = []

    async def after(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        heard.append((name, asyncio.get_running_loop().time()))

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for name, seconds in (("c", 3 * DAY_S), ("a", 0.5), ("b", 0.7)):
                group.create_task(after(name, seconds))

    start = time.monotonic()
    run_virtual(main())
    assert time.monotonic() - start < 1.0
    assert [name for name, _ in heard] == ["a", "b", "c"]
    assert [at for _, at in heard] == pytest.approx([0.5, 0.7, 3 * DAY_S])


def test_timers_of_one_moment_fire_in_the_same_order_each_time() -> None:
    async def main() -> list[int]:
        heard: list[int] = []
        for number in range(50):
            asyncio.get_running_loop().call_later(1.0, heard.append, number)
        await asyncio.sleep(2.0)
        return heard

    assert sorted(run_virtual(main())) == list(range(50))
    assert run_virtual(main()) == run_virtual(main())


def test_a_timeout_cuts_what_takes_longer_on_the_virtual_clock() -> None:
    async def main() -> tuple[float, bool]:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(DAY_S):
            await asyncio.sleep(DAY_S - 1)
        try:
            async with asyncio.timeout_at(loop.time() + 10):
                await asyncio.sleep(11)
        except TimeoutError:
            return loop.time(), True
        return loop.time(), False

    assert run_virtual(main()) == (pytest.approx(DAY_S + 9), True)


def test_a_cancelled_sleep_ends_at_once() -> None:
    async def main() -> float:
        task = asyncio.get_running_loop().create_task(asyncio.sleep(DAY_S))
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(1.0)


def test_tasks_that_wait_for_each_other_are_told_instead_of_hanging() -> None:
    async def main() -> None:
        async with asyncio.timeout_at(float("inf")):
            await asyncio.Event().wait()

    with pytest.raises(Stuck, match="all tasks wait"):
        run_virtual(main())


# The engine


def test_answers_share_the_speed_of_the_engine() -> None:
    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        engine = SharedEngine(Capacity(slots=8, step_s=0.0, per_answer_s=0.01))
        await engine.answer(100)
        alone = loop.time()
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(engine.answer(100))
        return alone, loop.time() - alone

    assert run_virtual(main()) == (pytest.approx(1.0), pytest.approx(4.0))


def test_an_answer_waits_for_a_slot_and_a_cancelled_one_frees_its_own() -> None:
    async def main() -> float:
        engine = SharedEngine(TENTH)
        async with asyncio.TaskGroup() as group:
            long = [group.create_task(engine.answer(1000)) for _ in range(2)]
            last = group.create_task(engine.answer(10))
            await asyncio.sleep(5.0)
            long[1].cancel()
            await last
            at = asyncio.get_running_loop().time()
            long[0].cancel()
        assert engine.tokens == pytest.approx(50 + 50 + 10 + 10)
        return at

    assert run_virtual(main()) == pytest.approx(6.0)


def test_answers_that_are_cancelled_together_leave_an_engine_that_works() -> None:
    async def main() -> float:
        engine = SharedEngine(TENTH)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0), asyncio.TaskGroup() as group:
                for _ in range(5):
                    group.create_task(engine.answer(1000))
        await engine.answer(10)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(2.0)


def test_new_weights_keep_running_answers_or_wait_for_them() -> None:
    async def updated(keep: bool) -> tuple[Span, float, float]:
        engine, loop = SharedEngine(TENTH), asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(engine.answer(100))
            await asyncio.sleep(4.0)
            await engine.update(1, 2.0, keep=keep)
            loaded = loop.time()
            span = await answer
        return span, loaded, loop.time()

    assert run_virtual(updated(True)) == (Span(0, 1), pytest.approx(6.0), pytest.approx(12.0))
    assert run_virtual(updated(False)) == (Span(0, 0), pytest.approx(12.0), pytest.approx(12.0))


# The trials


def test_the_work_of_trials_has_the_tail_that_the_docs_state() -> None:
    shape = Shape()
    work = sorted(shape.work(f"t{n}", n % 8) for n in range(40_000))
    median, high, highest = (work[int(len(work) * share)] for share in (0.5, 0.99, 0.999))
    assert median == pytest.approx(1.0, abs=0.05)
    assert 6.5 < high / median < 9.0
    assert highest > 14 and work[-1] == shape.most


# Whole runs

SMALL = Setting(name="small", window=Window(groups_per_step=8, concurrency=64), steps=12)


def ahead(setting: Setting, staleness: int) -> Setting:
    return replace(setting, window=replace(setting.window, staleness=staleness))


def test_a_run_gives_the_same_numbers_each_time() -> None:
    first, second = (simulate(ahead(SMALL, 2)) for _ in range(2))
    assert first == second
    assert simulate(replace(ahead(SMALL, 2), shape=Shape(seed=1))) != first


def test_lockstep_takes_the_slowest_trial_of_each_step_and_then_trains() -> None:
    free = replace(SMALL, turns=0.0, tools_s=0.0, capacity=Capacity(per_answer_s=0.0), partial=False)
    result, shape = simulate(free), free.shape
    course = Course(Walk(), tasks(free.tasks), group_size=free.group_size, seed=0, rates=TaskRates())
    slowest = [
        max(shape.work(a.task.id, a.number) for _ in range(8) for a in course.next_group().attempts)
        for _ in range(free.steps)
    ]
    sampling = sum(slowest) * free.tokens * free.capacity.step_s
    assert result.seconds == pytest.approx(sampling + free.steps * (free.train_s + free.push_s))
    assert result.staleness == Counter({0: 8 * 8 * free.steps})


def test_running_ahead_beats_lockstep_and_uses_all_the_age_it_may() -> None:
    lockstep, one, four = (simulate(ahead(SMALL, depth)) for depth in (0, 1, 4))
    assert (max(one.staleness), max(four.staleness)) == (1, 4)
    assert lockstep.trained == one.trained == four.trained
    assert 1.2 * lockstep.per_hour < one.per_hour < four.per_hour
    assert 1.5 * lockstep.per_hour < four.per_hour


def test_an_update_that_waits_for_answers_costs_time() -> None:
    long = replace(ahead(SMALL, 2), turns=0.0, tools_s=0.0)
    assert simulate(replace(long, partial=False)).per_hour < simulate(long).per_hour


def test_no_token_is_older_than_the_bound_in_twenty_thousand_trials_of_random_settings() -> None:
    trained, odd = 0, Counter[str]()
    for number in count():
        result = simulate(random_setting(random.Random(f"test/{number}")))
        trained += result.trained
        odd += result.dropped
        odd["cut"] += result.cut
        if trained >= 20_000:
            break
    assert min(odd[each] for each in ("cut", "surplus", "short", "all_zero", "all_one")) > 0


def test_a_window_that_passes_over_old_groups_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slots, "_suffices", lambda self, wanted, ready_of: ready_of.total() >= wanted)
    with pytest.raises(ExceptionGroup) as raised:
        simulate(ahead(SMALL, 1))
    assert raised.group_contains(AssertionError, match="trains version")


@dataclass(frozen=True, kw_only=True)
class OneStuck(Shape):
    """One trial never ends."""

    def work(self, task: str, attempt: int) -> float:
        """A median trial's, or more than anyone lives."""
        return 1e12 if (task, attempt) == ("t7", 3) else 1.0


@pytest.mark.parametrize("staleness", [0, 1])
def test_one_stuck_trial_of_four_thousand_costs_its_deadline_and_itself(staleness: int) -> None:
    window = Window(groups_per_step=512, staleness=staleness, concurrency=4096)
    stuck = Setting(
        name="stuck",
        window=window,
        steps=2,
        tasks=1024,
        turns=0.0,
        tools_s=0.0,
        patience=Patience(group_s=1000.0),
        capacity=Capacity(replicas=16),
        shape=OneStuck(),
    )
    result = simulate(stuck)
    assert (result.started, result.cut, result.trained) == (8192, 1, 8191)
    assert result.seconds < 1000.0 + 2 * (stuck.train_s + stuck.push_s) + 500.0


def test_the_cpu_time_of_a_trial_does_not_grow_with_those_beside_it() -> None:
    def least_s(concurrent: int) -> float:
        window = Window(groups_per_step=256, staleness=1, concurrency=concurrent)
        setting = Setting(name="", window=window, steps=2, turns=0.0, tools_s=0.0, capacity=Capacity(slots=2048))
        return min(_cpu_s(setting) for _ in range(2))

    # A collector that looked at all groups, or all trials, for each event would need some ten times as much.
    assert least_s(2048) < 3 * least_s(8)


def _cpu_s(setting: Setting) -> float:
    start = time.process_time()
    result: Result = simulate(setting)
    return (time.process_time() - start) / result.started
