"""What may start and what a step takes: the bound on staleness, for any order of events."""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lego.rollout.window import Pick, Slots, Window


def window(per_step: int = 2, **given) -> Window:
    return Window(groups_per_step=per_step, concurrency=8, **given)


def slots(per_step: int = 2, *, steps: int = 10, **given) -> Slots:
    return Slots(window(per_step, **given), range(steps))


def start(slots: Slots, *numbers: int) -> None:
    for number in numbers:
        slots.started(number)


def finish(slots: Slots, *numbers: int) -> None:
    for number in numbers:
        assert not slots.finished(number, dropped=False)


def fill(slots: Slots, first: int) -> list[int]:
    """Starts all that may start, with numbers from `first` on."""
    number = first
    while slots.may_start():
        slots.started(number)
        number += 1
    return list(range(first, number))


# Lockstep


def test_in_lockstep_a_step_starts_its_own_groups_and_nothing_more_until_the_next_weights_are_there():
    state = slots()
    assert fill(state, 0) == [0, 1]
    finish(state, 0)
    assert state.pick() is None
    finish(state, 1)
    assert state.pick() == Pick(taken=(0, 1))
    assert not state.may_start()
    state.moved(1)
    assert fill(state, 2) == [2, 3]


def test_no_step_is_taken_before_its_weights_are_there():
    state = slots(staleness=1)
    finish(state, *fill(state, 0))
    assert state.pick() == Pick(taken=(0, 1))
    assert state.pick() is None
    state.moved(1)
    assert state.pick() == Pick(taken=(2, 3))


# Ahead


def test_sampling_runs_so_many_steps_ahead_and_no_further():
    state = slots(staleness=2)
    finish(state, *fill(state, 0))
    assert state.unconsumed == 6
    assert state.pick() == Pick(taken=(0, 1))
    assert not state.may_start(), "the trainer still holds version 0"
    state.moved(1)
    assert fill(state, 6) == [6, 7]


def test_a_step_leaves_a_slow_group_behind_while_that_can_still_be_in_time():
    state = slots(staleness=1)
    fill(state, 0)
    finish(state, 1, 2, 3)
    assert state.pick() == Pick(taken=(1, 2)), "group 0 may be taken by step 1"
    state.moved(1)
    finish(state, *fill(state, 4))
    assert state.pick() is None, "3, 4, 5 are ready, but this is the last step that may take group 0"
    finish(state, 0)
    assert state.pick() == Pick(taken=(0, 3))


def test_a_step_waits_when_those_left_behind_would_be_too_many_for_the_later_steps():
    state = slots(per_step=1, staleness=2)
    fill(state, 0)
    finish(state, 2)
    assert state.pick() == Pick(taken=(2,)), "groups 0 and 1 have steps 1 and 2"
    state.moved(1)
    finish(state, *fill(state, 3))
    assert state.pick() is None, "3 is ready, but then 0 and 1 would both need step 2"
    finish(state, 1)
    assert state.pick() == Pick(taken=(1,))


# Replacements


def test_a_dropped_group_is_replaced_while_the_refills_of_the_step_last_and_then_fills_its_slot_empty():
    state = slots(refill=1)
    fill(state, 0)
    assert state.finished(0, dropped=True)
    assert fill(state, 2) == [2]
    assert not state.finished(1, dropped=True), "the step's refill is spent"
    assert not state.may_start()
    finish(state, 2)
    assert state.pick() == Pick(taken=(1, 2))
    state.moved(1)
    fill(state, 3)
    assert state.finished(3, dropped=True), "each step has its own"


def test_without_refills_a_dropped_group_fills_its_slot():
    state = slots()
    fill(state, 0)
    assert not state.finished(0, dropped=True)
    assert not state.may_start()


def test_oversampled_groups_take_the_place_of_dropped_ones_and_the_first_that_are_done_are_taken():
    state = slots(oversample=2)
    assert fill(state, 0) == [0, 1, 2, 3]
    assert state.finished(0, dropped=True)
    assert not state.may_start(), "an oversampled group has its slot"
    finish(state, 3, 2)
    assert state.pick() == Pick(taken=(2, 3), surplus=(1,))
    assert state.unconsumed == 0
    assert not state.may_start()
    state.moved(1)
    assert fill(state, 4) == [4, 5, 6, 7]


def test_oversampled_groups_that_have_not_started_when_others_are_dropped_are_not_started_beside_their_replacements():
    state = slots(oversample=1)
    start(state, 0, 1)
    assert state.finished(0, dropped=True)
    assert fill(state, 2) == [2]
    assert not state.finished(1, dropped=True)
    assert not state.may_start()


def test_a_step_in_a_hurry_replaces_nothing():
    state = slots(refill=5, oversample=5)
    start(state, 0, 1)
    state.hurry()
    assert not state.may_start()
    assert not state.finished(0, dropped=True)


# The end


def test_the_last_steps_start_no_group_that_no_step_could_take():
    state = slots(staleness=3, steps=2)
    assert fill(state, 0) == [0, 1, 2, 3]
    finish(state, 0, 1, 2, 3)
    state.pick()
    state.moved(1)
    assert not state.may_start()
    assert not state.over
    assert state.pick() == Pick(taken=(2, 3))
    assert state.over


def test_without_more_groups_steps_take_what_is_left():
    state = slots(per_step=3)
    start(state, 0, 1)
    state.close()
    assert not state.may_start()
    finish(state, 0)
    assert state.pick() is None
    assert not state.finished(1, dropped=True), "nothing could replace it"
    assert state.pick() == Pick(taken=(0, 1))
    state.moved(1)
    assert state.pick() == Pick(taken=())


# What a late step waits for


def test_a_step_awaits_the_oldest_groups_and_no_more_than_it_needs():
    state = slots(per_step=3, staleness=1)
    fill(state, 0)
    assert state.awaited() == (0, 1, 2)
    finish(state, 3, 4)
    assert state.awaited() == (0,)
    finish(state, 5)
    assert state.awaited() == ()


def test_a_step_awaits_the_group_whose_deadline_it_is_even_if_enough_others_are_ready():
    state = slots(staleness=1)
    fill(state, 0)
    finish(state, 1, 2, 3)
    state.pick()
    state.moved(1)
    finish(state, *fill(state, 4))
    assert state.awaited() == (0,)


# An earlier life


def test_groups_of_an_earlier_life_keep_their_deadlines():
    state = Slots(window(staleness=1), range(5, 9), ready=[(8, 4), (9, 5), (7, 4)])
    assert fill(state, 10) == [10]
    assert state.pick() == Pick(taken=(7, 8))


def test_groups_of_an_earlier_life_that_no_step_may_take_are_refused():
    with pytest.raises(ValueError, match="1 finished groups by weights of version 3 or older, wanted 2 at most"):
        Slots(window(staleness=1), range(5, 9), ready=[(7, 3)])
    with pytest.raises(ValueError, match=r"3 finished groups .* version 4 .* wanted 2 at most .* from 5 to 5"):
        Slots(window(staleness=1), range(5, 9), ready=[(6, 4), (7, 4), (8, 4)])


# The bound


@dataclass
class Run:
    """A whole run of the rules under events in random order; asserts the bound and the account on the way."""

    window: Window
    steps: int
    random: random.Random
    order: str
    drop: float
    number: int = 0
    running: dict[int, int] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    ends: Counter[int] = field(default_factory=Counter)
    replaced: Counter[int] = field(default_factory=Counter)

    def play(self) -> None:
        self.slots = Slots(self.window, range(self.steps))
        training = False
        for _ in range(100_000):
            if self.slots.step == self.steps and not training:
                break
            moves = [self.finish] if self.running else []
            if self.slots.may_start() and len(self.running) < self.window.concurrency:
                moves.append(self.start)
            if training:
                moves.append(self.push)
            elif self.random.random() < 0.5 or not moves:
                training = self.take()
                assert training or moves, "the step waits, and nothing will ever happen"
                continue
            move = self.random.choice(moves)
            move()
            training = training and move != self.push
            if move == self.finish and self.window.oversample:
                training = self.take()
        self.check()

    def start(self) -> None:
        self.slots.started(self.number)
        self.running[self.number] = self.versions[self.number] = self.slots.version
        self.number += 1

    def finish(self) -> None:
        pick = {"first": min, "last": max, "any": lambda numbers: self.random.choice(list(numbers))}[self.order]
        number = pick(self.running)
        del self.running[number]
        if self.slots.finished(number, dropped=self.random.random() < self.drop):
            self.ends[number] += 1
            self.replaced[self.slots.step] += 1

    def push(self) -> None:
        self.slots.moved(self.slots.version + 1)

    def take(self) -> bool:
        step, pick = self.slots.step, self.slots.pick()
        if pick is None:
            return False
        assert len(pick.taken) == self.window.groups_per_step
        for number in pick.taken:
            assert 0 <= step - self.versions[number] <= self.window.staleness
        for number in pick.surplus:
            self.running.pop(number, None)
            self.replaced[step] += 1
        self.ends.update(pick.taken + pick.surplus)
        return True

    def check(self) -> None:
        assert self.slots.step == self.steps, "the run did not come to its end"
        assert self.ends == Counter(range(self.number)), "every group has one end"
        assert self.slots.unconsumed == 0
        assert self.number == self.steps * self.window.groups_per_step + self.replaced.total()
        assert max(self.replaced.values(), default=0) <= self.window.refill + self.window.oversample


WINDOWS = st.builds(
    Window,
    groups_per_step=st.integers(1, 5),
    staleness=st.integers(0, 4),
    concurrency=st.integers(1, 30),
    refill=st.integers(0, 4),
) | st.builds(
    Window,
    groups_per_step=st.integers(1, 5),
    concurrency=st.integers(1, 12),
    refill=st.integers(0, 4),
    oversample=st.integers(0, 4),
)


@settings(deadline=None, max_examples=300)
@given(
    window=WINDOWS,
    steps=st.integers(1, 12),
    seed=st.integers(0, 2**32),
    order=st.sampled_from(["any", "first", "last"]),
    drop=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_no_order_of_events_breaks_the_bound_the_account_or_the_progress(window, steps, seed, order, drop):
    Run(window=window, steps=steps, random=random.Random(seed), order=order, drop=drop).play()


def test_the_bound_is_reached_by_groups_that_younger_ones_overtake():
    state, ages = slots(per_step=1, staleness=3, steps=40), set[int]()
    versions, running = dict[int, int](), list[int]()
    for step in range(40):
        state.moved(step)
        started = fill(state, len(versions))
        versions |= dict.fromkeys(started, step)
        running += started
        while (pick := state.pick()) is None:
            finish(state, running.pop())
        ages |= {step - versions[number] for number in pick.taken}
    assert max(ages) == 3
