"""A run's walk over its tasks: every place is known by its number alone."""

from types import SimpleNamespace

import pytest

from lego.rollout.plan import Plan, attempts

TASKS = tuple(SimpleNamespace(id=str(i)) for i in range(5))


def plan(seed: int = 3, tasks=TASKS, size: int = 2) -> Plan:
    return Plan(tasks=tasks, group_size=size, seed=seed)


def visits(groups) -> list[str]:
    return [spec.task.id for spec in groups]


def test_each_pass_visits_every_task_once_in_an_order_of_its_own():
    walk = visits(plan().group(number) for number in range(10))
    assert sorted(walk[:5]) == sorted(walk[5:]) == ["0", "1", "2", "3", "4"]
    assert walk[:5] != walk[5:]
    assert walk == visits(plan().group(number) for number in range(10))
    assert walk != visits(plan(seed=4).group(number) for number in range(10))


@pytest.mark.parametrize("start", range(12))
def test_a_place_is_the_same_with_and_without_those_before_it_also_at_the_ends_of_passes(start: int):
    whole = [plan().group(number) for number in range(15)]
    assert [plan().group(number) for number in range(start, 15)] == whole[start:]


def test_no_two_attempts_at_a_task_share_a_number():
    trials = [attempt for number in range(20) for attempt in plan(size=3).group(number).attempts]
    assert len({(trial.task.id, trial.number) for trial in trials}) == len(trials) == 60
    assert sorted(trial.number for trial in trials if trial.task.id == "0") == list(range(12))
    assert [trial.group for trial in trials[:6]] == [0, 0, 0, 1, 1, 1]


def test_a_plan_of_nothing_is_refused():
    with pytest.raises(ValueError, match="0 tasks in groups of 2, wanted 1 or more"):
        plan(tasks=())
    with pytest.raises(ValueError, match="5 tasks in groups of 0, wanted 1 or more"):
        plan(size=0)


def test_a_measurement_has_so_many_attempts_of_each_task_side_by_side():
    assert [(a.task.id, a.number, a.group) for a in attempts(TASKS[:2], 2)] == [
        ("0", 0, None),
        ("0", 1, None),
        ("1", 0, None),
        ("1", 1, None),
    ]
