"""Trials run some at a time, groups as the window allows, and each step gets its own."""

import asyncio
import math
import random
import time
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lego.records import Outcome
from lego.rollout.collect import Collector, Group, StepGroups, collect, solved_and_asked
from lego.rollout.cuts import FOREVER, Cut, Patience
from lego.rollout.plan import Attempt, GroupSpec, attempts, walk
from lego.rollout.window import Window
from tests.factories import trajectory
from tools.bench.simulator.clock import run_virtual

TASKS = [SimpleNamespace(id=str(i)) for i in range(5)]


async def test_no_more_trials_run_at_once_than_asked_and_results_keep_their_order():
    alive, most, heard = 0, 0, []

    async def run(attempt, cut):
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        await asyncio.sleep(0.001 * (5 - int(attempt.task.id)))
        alive -= 1
        return trajectory(f"{attempt.task.id}#{attempt.number}", 1.0)

    got = await collect(attempts(TASKS, 2), run, concurrency=3, done=lambda t: heard.append(t.task), cut=Cut())
    assert most == 3
    assert [t.task for t in got] == [f"{i}#{k}" for i in range(5) for k in range(2)]
    assert sorted(heard) == sorted(t.task for t in got)


async def test_a_bug_in_one_trial_ends_the_others():
    ended = []

    async def run(attempt, cut):
        if attempt.number == 1:
            raise ZeroDivisionError
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(attempt.number)

    with pytest.raises(ExceptionGroup):
        await collect(attempts(TASKS[:1], 3), run, concurrency=3, done=lambda t: None, cut=Cut())
    assert sorted(ended) == [0, 2]


async def test_what_is_not_done_at_the_cut_ends_then_and_the_rest_at_once():
    async def run(attempt, cut):
        async with cut.limit():
            await asyncio.sleep(0.0 if attempt.task.id == "0" else 60.0)
        return trajectory(attempt.task.id, 1.0)

    async def cancelled(attempt, cut):
        try:
            return await run(attempt, cut)
        except TimeoutError:
            return replace(trajectory(attempt.task.id, None, outcome=Outcome.CANCELLED), detail=cut.cause)

    cut = Cut(at=asyncio.get_running_loop().time() + 0.1, cause="late")
    got = await collect(attempts(TASKS[:3], 1), cancelled, concurrency=1, done=lambda t: None, cut=cut)
    assert [t.detail for t in got] == ["", "late", "late"]
    assert solved_and_asked(got) == (1, 1), "what was cut says nothing about the policy"


def test_a_solve_rate_leaves_out_what_the_environment_spoiled_and_counts_what_the_agent_spoiled():
    ends = [
        trajectory("t", 1.0),
        trajectory("t", 0.0),
        trajectory("t", None, outcome=Outcome.TURN_LIMIT),
        trajectory("t", None, outcome=Outcome.ENGINE_ERROR),
    ]
    assert solved_and_asked(ends) == (1, 3)


# The collector


@dataclass
class Play:
    """A collector on a virtual clock: what its trials take, and what was heard of them."""

    window: Window
    steps: int = 3
    size: int = 2
    lengths: dict[tuple[int, int], float] = field(default_factory=dict)
    """Seconds by group and place in it; 1 for the others, and a little more for each later group."""
    unscored: tuple[tuple[int, int], ...] = ()
    train_s: float = 10.0
    patience: Patience = FOREVER
    drops: dict[int, str] = field(default_factory=dict)
    source: object = None
    ready: tuple[Group, ...] = ()
    heard: list[tuple[float, str]] = field(default_factory=list)
    alive: int = 0
    most: int = 0

    def play(self) -> list[StepGroups]:
        return run_virtual(self.run())

    async def run(self) -> list[StepGroups]:
        collector, taken = self.collector(), []
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(collector.run())
            for step in range(self.steps):
                taken.append(await collector.step(step))
                self.hear(f"step {step} takes {[group.number for group in taken[-1].groups]}")
                await asyncio.sleep(self.train_s)
        assert self.alive == 0
        return taken

    def collector(self) -> Collector:
        return Collector(
            self.source or Endless(self.size),
            self.window,
            self.trial,
            self.judge,
            steps=range(self.steps),
            patience=self.patience,
            on_start=lambda spec, version: self.hear(f"group {spec.number} by {version}"),
            on_group=lambda group: self.hear(f"group {group.number} done" + f": {group.drop}" * bool(group.drop)),
            ready=self.ready,
        )

    def hear(self, what: str) -> None:
        self.heard.append((round(asyncio.get_running_loop().time(), 1), what))

    def starts(self) -> list[tuple[float, str]]:
        return [(at, what) for at, what in self.heard if " by " in what]

    async def trial(self, attempt: Attempt, cut: Cut, *, version: int):
        self.alive += 1
        self.most = max(self.most, self.alive)
        place = (attempt.group, attempt.number % self.size)
        ended = await timed(self.lengths.get(place, 1.0 + place[0] / 10_000), cut)
        self.alive -= 1
        reward = None if ended or place in self.unscored else float(place[1] == 0)
        outcome = None if reward is not None else Outcome.CANCELLED if ended else Outcome.SANDBOX_ERROR
        own = trajectory(attempt.task.id, reward, outcome=outcome)
        return replace(own, attempt=attempt.number, group=attempt.group, version=version, detail=ended)

    def judge(self, trajectories) -> str | None:
        if sum(one.reward is not None for one in trajectories) < 2:
            return "short"
        return self.drops.get(trajectories[0].group)


class Endless:
    """Groups of ever new tasks, up to `stop`."""

    def __init__(self, size: int, first: int = 0, stop: int | None = None) -> None:
        self.size, self.number, self.stop = size, first, stop

    def next_group(self) -> GroupSpec | None:
        if self.number == self.stop:
            return None
        self.number += 1
        task = SimpleNamespace(id=f"t{self.number - 1}")
        return GroupSpec(number=self.number - 1, task=task, visit=0, size=self.size)


async def timed(seconds: float, cut: Cut) -> str:
    """Waits so long, or to the cut; the cause of that, or nothing."""
    try:
        async with cut.limit():
            await asyncio.sleep(seconds)
    except TimeoutError:
        return cut.cause
    return ""


def window(per_step: int = 2, concurrency: int = 64, **given) -> Window:
    return Window(groups_per_step=per_step, concurrency=concurrency, **given)


def numbers(taken: list[StepGroups]) -> list[list[int]]:
    return [[group.number for group in step.groups] for step in taken]


def test_lockstep_samples_and_trains_in_turn():
    play = Play(window())
    assert numbers(play.play()) == [[0, 1], [2, 3], [4, 5]]
    assert play.starts() == [
        (0.0, "group 0 by 0"),
        (0.0, "group 1 by 0"),
        (11.0, "group 2 by 1"),
        (11.0, "group 3 by 1"),
        (22.0, "group 4 by 2"),
        (22.0, "group 5 by 2"),
    ]


def test_a_step_ahead_samples_while_training_and_no_group_is_too_old():
    play = Play(window(staleness=1))
    taken = play.play()
    assert numbers(taken) == [[0, 1], [2, 3], [4, 5]]
    assert [[group.version for group in step.groups] for step in taken] == [[0, 0], [0, 0], [1, 1]]
    assert play.starts()[-2:] == [(11.0, "group 4 by 1"), (11.0, "group 5 by 1")]
    assert [step.waited_s for step in taken] == pytest.approx([1.0, 0.0, 0.0], abs=0.01)


def test_a_group_that_started_by_old_weights_keeps_their_version_though_its_last_trial_has_newer_ones():
    play = Play(window(1, concurrency=1, staleness=1), lengths={(1, 0): 30.0}, steps=2)
    (group,) = play.play()[1].groups
    assert (group.version, [one.version for one in group.trajectories]) == (0, [0, 1])


def test_trials_of_the_oldest_group_go_first_and_no_more_run_at_once_than_asked():
    play = Play(window(3, concurrency=3), lengths={(0, 0): 5.0}, steps=1)
    play.play()
    assert play.most == 3
    assert play.heard[:3] == [(0.0, "group 0 by 0"), (0.0, "group 1 by 0"), (1.0, "group 2 by 0")]


def test_a_group_has_its_trials_in_the_order_of_their_attempts():
    play = Play(window(1), lengths={(0, 0): 5.0, (0, 1): 2.0}, size=3, steps=1)
    ((group,),) = [step.groups for step in play.play()]
    assert [one.attempt for one in group.trajectories] == [0, 1, 2]


def test_a_slow_group_is_left_behind_and_taken_by_the_last_step_that_may():
    play = Play(window(staleness=1), lengths={(0, 0): 100.0})
    assert numbers(play.play()) == [[1, 2], [0, 3], [4, 5]]
    assert (100.0, "step 1 takes [0, 3]") in play.heard


# What takes too long


def test_one_trial_that_never_returns_costs_its_own_sample_and_the_step_goes_on():
    """On a real clock: 4 tasks x 4 trials, a second for each group."""
    play = Play(window(4), size=4, lengths={(1, 2): math.inf}, steps=1, train_s=0.0, patience=Patience(group_s=1.0))
    play.lengths |= {(g, k): 0.05 for g in range(4) for k in range(4) if (g, k) != (1, 2)}
    start = time.monotonic()
    (taken,) = asyncio.run(play.run())
    assert time.monotonic() - start < 3.0
    assert [len(group.trajectories) for group in taken.groups] == [4, 4, 4, 4]
    (cut,) = [one for group in taken.groups for one in group.trajectories if one.reward is None]
    assert (cut.group, cut.attempt, cut.outcome) == (1, 2, Outcome.CANCELLED)
    assert cut.detail == "the trials of its group took longer than budget.group_s 1"
    assert [group.drop for group in taken.groups] == [None] * 4, "three survivors are a group"


def test_the_clock_of_a_group_starts_with_its_first_trial_not_with_its_step():
    play = Play(window(2, concurrency=2), steps=1, lengths={(g, k): 5.0 for g in range(2) for k in range(2)})
    play.patience = Patience(group_s=6.0)
    (taken,) = play.play()
    assert all(one.reward is not None for group in taken.groups for one in group.trajectories)


def test_a_step_that_waits_too_long_cuts_what_it_cannot_go_on_without_and_nothing_else():
    play = Play(window(staleness=1), lengths={(0, 0): 500.0, (1, 0): 500.0, (2, 1): 500.0}, steps=2, train_s=1.0)
    play.patience = Patience(step_s=20.0)
    taken = play.play()
    assert numbers(taken) == [[0, 3], [1, 2]], "3 is ready; the oldest of the others is cut for the second slot"
    assert [(at, what) for at, what in play.heard if "step" in what] == [
        (20.0, "step 0 takes [0, 3]"),
        (41.0, "step 1 takes [1, 2]"),
    ]
    (cut,) = [one for one in taken[0].groups[0].trajectories if one.reward is None]
    assert cut.detail == "the trials of its step took longer than budget.step_s 20"


def test_a_late_step_lets_groups_that_are_yet_to_start_end_at_once_and_replaces_none():
    lengths = {(0, 0): 500.0, (0, 1): 500.0}
    play = Play(window(3, concurrency=2, refill=5), lengths=lengths, steps=1, patience=Patience(step_s=20.0))
    (taken,) = play.play()
    assert [group.drop for group in taken.groups] == ["short"] * 3
    assert play.heard[-1] == (20.0, "step 0 takes [0, 1, 2]")
    assert play.starts()[1:] == [(20.0, "group 1 by 0"), (20.0, "group 2 by 0")]


def test_the_next_step_has_its_whole_time_again():
    lengths = {(0, 0): 500.0, (2, 0): 15.0, (3, 0): 15.0}
    taken = Play(window(refill=1), lengths=lengths, steps=2, patience=Patience(step_s=20.0)).play()
    assert [group.drop for group in taken[0].groups] == ["short", None]
    assert [group.drop for group in taken[1].groups] == [None, None]


def test_the_time_of_a_step_that_went_on_cuts_nothing_later():
    play = Play(window(), lengths={(0, 0): 15.0, (2, 0): 15.0}, steps=2, train_s=0.0, patience=Patience(step_s=20.0))
    assert [group.drop for step in play.play() for group in step.groups] == [None] * 4


# Groups that are not trained


def test_a_group_with_too_few_survivors_is_dropped_and_a_smaller_one_is_not():
    play = Play(window(), size=3, unscored=((0, 0), (0, 1), (1, 1)), steps=1)
    (taken,) = play.play()
    assert [(group.number, group.drop, len(group.trajectories)) for group in taken.groups] == [
        (0, "short", 3),
        (1, None, 3),
    ]


def test_a_dropped_group_is_replaced_as_often_as_the_step_allows():
    play = Play(window(refill=2), drops=dict.fromkeys(range(20), "flat"), steps=2)
    first, second = play.play()
    assert [(group.number, group.drop, group.replaced) for group in first.replaced] == [
        (0, "flat", True),
        (1, "flat", True),
    ]
    assert [(group.number, group.drop, group.replaced) for group in first.groups] == [
        (2, "flat", False),
        (3, "flat", False),
    ]
    assert numbers([second]) == [[6, 7]]
    assert play.starts()[2:4] == [(1.0, "group 2 by 0"), (1.0, "group 3 by 0")]


def test_oversampled_groups_are_cut_when_enough_are_done():
    play = Play(window(oversample=2), lengths={(0, 0): 50.0, (2, 1): 70.0}, steps=2, train_s=5.0)
    first, second = play.play()
    assert numbers([first, second]) == [[1, 3], [4, 5]]
    assert play.most == 8
    surplus = [group for step in (first, second) for group in step.replaced]
    assert [(group.number, group.drop) for group in surplus] == [(0, "surplus"), (2, "surplus")]
    (cut,) = [one for one in surplus[0].trajectories if one.reward is None]
    assert (cut.outcome, cut.detail) == (Outcome.CANCELLED, "its step had enough other groups (rollout.oversample)")
    assert (1.0, "group 0 done: surplus") in play.heard


# The end, and a second life


def test_the_run_ends_by_itself_and_starts_no_group_that_no_step_takes():
    play = Play(window(staleness=3), steps=2)
    assert numbers(play.play()) == [[0, 1], [2, 3]]
    assert len(play.starts()) == 4


def test_without_more_groups_the_steps_get_what_there_is():
    play = Play(window(staleness=1), source=Endless(2, stop=3), steps=3)
    assert numbers(play.play()) == [[0, 1], [2], []]


def test_a_step_that_waits_hears_that_there_are_no_more_groups():
    assert numbers(Play(window(concurrency=2), source=Endless(2, stop=1), steps=1).play()) == [[0]]


def test_groups_of_an_earlier_life_are_taken_first_and_keep_their_version():
    ready = [Group(number=n, task="t", version=0, trajectories=(), drop=drop) for n, drop in ((3, None), (1, "flat"))]
    play = Play(window(staleness=1), source=Endless(2, first=4), ready=tuple(ready), steps=2)
    taken = play.play()
    assert numbers(taken) == [[1, 3], [4, 5]]
    assert taken[0].groups[0] is ready[1]
    assert play.starts() == [(0.0, "group 4 by 0"), (0.0, "group 5 by 0")]


SIX = tuple(SimpleNamespace(id=f"t{n}") for n in range(6))


def group(number: int) -> GroupSpec:
    return GroupSpec(number=number, task=walk(number, SIX, 1), visit=number // len(SIX), size=2)


@dataclass
class Journal:
    """What of a run outlives it, as its lives tell it."""

    begun: dict[int, GroupSpec] = field(default_factory=dict)
    ended: dict[int, Group] = field(default_factory=dict)
    steps: list[tuple[int, ...]] = field(default_factory=list)

    async def live(self, play: Play) -> None:
        """One life of the run, from where the last one ended."""
        used = {number for step in self.steps for number in step}
        ready = [group for number, group in self.ended.items() if number not in used]
        left = [number for number in self.begun if number not in self.ended]
        numbers = iter([*left, *range(len(self.begun), 10_000)])
        collector = Collector(
            SimpleNamespace(next_group=lambda: group(next(numbers))),
            play.window,
            play.trial,
            play.judge,
            steps=range(len(self.steps), play.steps),
            on_start=lambda spec, version: self.begun.update({spec.number: spec}),
            on_group=lambda group: self.ended.update({group.number: group}),
            ready=ready,
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(collector.run())
            for step in range(len(self.steps), play.steps):
                taken = await collector.step(step)
                await asyncio.sleep(play.train_s)
                self.steps.append(tuple(group.number for group in taken.groups))

    def trained(self) -> list[tuple[str, int]]:
        groups = [self.ended[number] for step in self.steps for number in step]
        return sorted((one.task, one.attempt) for group in groups for one in group.trajectories)


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("life_s", [0.5, 2.2, 5.0, 7.7])
def test_a_run_that_dies_again_and_again_trains_on_what_one_that_lives_trains_on(staleness: int, life_s: float):
    """6 tasks, 3 a step: over the ends of passes, with a slow group, killed in trials and in training."""

    async def lives(life_s: float) -> Journal:
        journal = Journal()
        while len(journal.steps) < 5:
            # Each life is longer than the one before, or a step that takes longer than a life would never be done.
            life_s *= 1.3
            try:
                async with asyncio.timeout(life_s):
                    lengths = {(4, 1): 6.0, (7, 0): 9.0}
                    await journal.live(Play(window(3, staleness=staleness), lengths=lengths, steps=5, train_s=2.0))
            except TimeoutError:
                continue
        return journal

    once, often = run_virtual(lives(1e6)), run_virtual(lives(life_s))
    assert often.trained() == once.trained()
    assert len(set(often.trained())) == 5 * 3 * 2
    ages = [step - often.ended[number].version for step, taken in enumerate(often.steps) for number in taken]
    assert 0 <= min(ages) <= max(ages) <= staleness


def test_a_bug_in_a_trial_ends_the_run():
    play = Play(window())

    async def broken(attempt, cut, *, version):
        if attempt.group == 1:
            raise ZeroDivisionError
        await asyncio.sleep(1000.0)

    play.trial = broken
    with pytest.raises(ExceptionGroup) as error:
        play.play()
    assert error.group_contains(ZeroDivisionError)


def test_a_step_that_is_cancelled_takes_nothing():
    async def main():
        play = Play(window())
        collector = play.collector()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(collector.run()), (asked := tasks.create_task(collector.step(0)))
            await asyncio.sleep(0.5)
            asked.cancel()
            await asyncio.sleep(1.0)
            taken = await collector.step(0)
            assert [group.number for group in taken.groups] == [0, 1]
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run_virtual(main())


# Cuts


def test_a_cut_that_comes_sooner_reaches_what_runs_and_what_is_yet_to_start():
    async def main():
        cut, loop = Cut(at=100.0, cause="late"), asyncio.get_running_loop()
        loop.call_at(3.0, cut.soon, 5.0, "sooner")
        loop.call_at(4.0, cut.soon, 50.0, "later")
        first = await timed(200.0, cut)
        at = loop.time()
        return first, at, await timed(200.0, cut), loop.time()

    assert run_virtual(main()) == ("sooner", 5.0, "sooner", 5.0)


def test_a_cut_is_not_heard_after_a_trial_ended():
    async def main():
        cut = Cut()
        assert await timed(1.0, cut) == ""
        cut.soon(asyncio.get_running_loop().time(), "over")
        await asyncio.sleep(1.0)

    run_virtual(main())


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    per_step=st.integers(1, 4),
    staleness=st.integers(0, 3),
    concurrency=st.integers(1, 20),
    refill=st.integers(0, 3),
    oversample=st.integers(0, 3),
    patience=st.sampled_from([FOREVER, Patience(group_s=20.0), Patience(step_s=25.0)]),
)
def test_whatever_trials_take_every_group_has_one_end_and_no_step_is_too_far_behind(
    seed, per_step, staleness, concurrency, refill, oversample, patience
):
    luck = random.Random(seed)
    shape = window(per_step, concurrency, staleness=staleness, refill=refill, oversample=0 if staleness else oversample)
    play = Play(shape, steps=6, train_s=luck.choice([0.0, 3.0, 30.0]), patience=patience)
    play.lengths = {(g, k): luck.paretovariate(0.7) for g in range(200) for k in range(2)}
    play.drops = {g: "flat" for g in range(200) if luck.random() < 0.3}
    taken = play.play()
    assert [len(step.groups) for step in taken] == [per_step] * 6
    assert all(0 <= step.step - group.version <= staleness for step in taken for group in step.groups)
    assert all(one.version >= group.version for step in taken for group in step.groups for one in group.trajectories)
    ends = [int(what.split()[1]) for _, what in play.heard if what.startswith("group") and "done" in what]
    assert sorted(ends) == list(range(len(play.starts()))), "each group that started has one end"
    slots = [group.number for step in taken for group in step.groups]
    replaced = [group.number for step in taken for group in step.replaced]
    assert len(set(slots + replaced)) == len(slots + replaced)
    assert play.most <= concurrency
