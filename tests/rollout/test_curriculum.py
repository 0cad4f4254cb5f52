"""The next task follows from seed, group number and what the policy solved; the same past gives the same future."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from lego.rollout.curriculum import HALF_LIFE_TRIALS, Band, Course, Curriculum, TaskRates, Walk
from lego.rollout.plan import walk

TASKS: tuple[Any, ...] = tuple(SimpleNamespace(id=name) for name in ("never", "rarely", "often", "always", "broken"))
SOLVED = {"never": 0, "rarely": 2, "often": 6, "always": 8}
"""Of 8 trials; those of `broken` are all spoiled by the environment."""


def course(curriculum: Curriculum, seed: int = 0, rates: TaskRates | None = None, **rest: Any) -> Course:
    return Course(curriculum, TASKS, group_size=8, seed=seed, rates=rates or TaskRates(), **rest)


def taken(course: Course, groups: int) -> list[tuple[int, str, int]]:
    """Number, task and visit of the next groups, each done before the next one starts."""
    out = []
    for _ in range(groups):
        spec = course.next_group()
        name = spec.task.id
        course.rates.finished(name, SOLVED.get(name, 0), 8 if name in SOLVED else 0)
        out.append((spec.number, name, spec.visit))
    return out


def test_a_walk_passes_through_all_tasks_whatever_was_solved():
    got = taken(course(Walk(), seed=3), 23)
    assert got == [(n, walk(n, TASKS, 3).id, n // len(TASKS)) for n in range(23)]


@pytest.mark.parametrize("curriculum", [Walk(), Band()])
def test_the_first_pass_visits_every_task_before_any_result_is_known(curriculum: Curriculum):
    ours = course(curriculum)
    specs = [ours.next_group() for _ in TASKS]
    assert sorted(s.task.id for s in specs) == sorted(t.id for t in TASKS)
    assert [s.visit for s in specs] == [0] * len(TASKS)


def test_the_first_pass_of_a_band_is_a_shuffled_one_without_exploring():
    n = len(TASKS)
    for seed in range(5):
        assert taken(course(Band(explore=1.0), seed=seed), n) == taken(course(Walk(), seed=seed), n)


def test_when_to_explore_follows_from_the_seed():
    rates = TaskRates()
    for task in TASKS:
        rates.started(task.id)
        rates.finished(task.id, 4 if task.id == "often" else 0, 8)
    band = Band(explore=0.5)
    first, second = ([band.task(n, TASKS, seed, rates).id for n in range(10, 60)] for seed in (1, 2))
    assert set(first) == set(second) == {"often", "never"}, "of those outside, the one whose visit is longest ago"
    assert first != second and first == [band.task(n, TASKS, 1, rates).id for n in range(10, 60)]


def test_tasks_in_the_band_take_turns_and_those_outside_come_as_often_as_told():
    names = Counter(name for _, name, _ in taken(course(Band(low=0.1, high=0.9, explore=0.2)), 1005))
    outside = names["never"] + names["always"]
    assert 150 < outside < 250, f"{outside} of 1000, wanted about 200"
    assert abs(names["never"] - names["always"]) <= 1
    inside = [names[name] for name in ("rarely", "often", "broken")]
    assert max(inside) - min(inside) <= 1, "one without a rate is in the band"


def test_a_task_that_is_solved_more_leaves_the_band_and_comes_back_when_it_is_forgotten():
    rates = TaskRates()
    for task in TASKS:
        rates.started(task.id)
        rates.finished(task.id, 4 if task.id == "often" else 0, 8)
    band = Band(explore=1e-9)
    assert band.task(100, TASKS, 0, rates).id == "often"
    rates.finished("often", 400, 400)
    assert band.task(100, TASKS, 0, rates).id != "often", "with nothing inside the band the others come"
    rates.finished("often", 0, 32)
    assert band.task(100, TASKS, 0, rates).id == "often"


def test_the_bounds_are_in_the_band():
    rates = TaskRates()
    for task in TASKS:
        rates.started(task.id)
        rates.finished(task.id, {"never": 0, "rarely": 2, "often": 6}.get(task.id, 8), 8)
    band = Band(low=0.25, high=0.75, explore=1e-9)
    picked = set()
    for _ in range(4):
        name = band.task(100, TASKS, 0, rates).id
        rates.started(name)
        picked.add(name)
    assert picked == {"rarely", "often"}


def test_groups_that_run_at_once_are_of_different_tasks():
    walk = course(Band())
    taken(walk, 10)
    at_once = [walk.next_group().task.id for _ in range(3)]
    assert len(set(at_once)) == 3


def test_visits_count_up_for_each_task_so_that_attempts_never_repeat():
    walk = course(Band(explore=0.3))
    numbers: Counter[tuple[str, int]] = Counter()
    for _ in range(60):
        spec = walk.next_group()
        walk.rates.finished(spec.task.id, SOLVED.get(spec.task.id, 0), 8)
        numbers.update((spec.task.id, attempt.number) for attempt in spec.attempts)
    assert set(numbers.values()) == {1}


def test_the_same_seed_gives_the_same_groups_and_another_one_others():
    assert taken(course(Band(), seed=1), 60) == taken(course(Band(), seed=1), 60)
    assert taken(course(Band(), seed=1), 60) != taken(course(Band(), seed=2), 60)


@pytest.mark.parametrize("curriculum", [Walk(), Band(explore=0.3)])
@pytest.mark.parametrize("stopped", range(1, 14))
def test_a_run_that_goes_on_takes_the_groups_that_it_would_have_taken(curriculum: Curriculum, stopped: int):
    whole = taken(course(curriculum), 20)
    rates = TaskRates()
    for _, name, _ in whole[:stopped]:
        rates.started(name)
    for _, name, _ in whole[:stopped]:
        rates.finished(name, SOLVED.get(name, 0), 8 if name in SOLVED else 0)
    assert taken(course(curriculum, rates=rates, first=stopped), 20 - stopped) == whole[stopped:]


def test_groups_that_were_under_way_come_first_and_are_not_visited_twice():
    before = course(Walk())
    specs = [before.next_group() for _ in range(7)]
    after = course(Walk(), rates=before.rates, first=7, again=(specs[2], specs[5]))
    got = [after.next_group() for _ in range(4)]
    assert [s.number for s in got] == [2, 5, 7, 8]
    assert got[:2] == [specs[2], specs[5]]
    assert [s.visit for s in got[2:]] == [1, 1]


def test_a_running_rate_is_a_mean_over_trials_in_which_older_ones_fade():
    rates = TaskRates()
    assert rates.rate("t") is None
    rates.finished("t", 0, 0)
    assert rates.rate("t") is None, "spoiled trials say nothing"
    rates.finished("t", 3, 4)
    assert rates.rate("t") == 0.75
    rates.finished("t", 0, 0)
    assert rates.rate("t") == 0.75
    many = TaskRates()
    many.finished("t", HALF_LIFE_TRIALS, HALF_LIFE_TRIALS)
    many.finished("t", 0, HALF_LIFE_TRIALS)
    assert many.rate("t") == pytest.approx(0.5 / 1.5)


@pytest.mark.parametrize(("solved", "asked"), [(-1, 4), (5, 4)])
def test_more_solved_than_asked_is_refused(solved: int, asked: int):
    with pytest.raises(ValueError, match=f"solved: {solved}, wanted 0 to {asked}"):
        TaskRates().finished("t", solved, asked)


@pytest.mark.parametrize(
    ("band", "told"),
    [
        (Band(), ""),
        (Band(low=-0.1), "low: -0.1, wanted 0 to 1"),
        (Band(low=0.6, high=0.5), "high: 0.5, wanted rollout.curriculum.low 0.6 to 1"),
        (Band(high=1.1), "high: 1.1, wanted rollout.curriculum.low 0.1 to 1"),
        (Band(explore=0.0), "explore: 0.0, wanted more than 0"),
    ],
)
def test_a_band_that_cannot_be_is_told_by_field(band: Band, told: str):
    problems = list(band.problems())
    assert len(problems) == bool(told)
    assert not told or problems[0].startswith(f"rollout.curriculum.{told}")
    assert not list(Walk().problems())
