"""A run's walk over its tasks: every place is known by its number alone."""

from types import SimpleNamespace
from typing import Any

import pytest

from lego.rollout.plan import GroupSpec, attempts, walk

TASKS: tuple[Any, ...] = tuple(SimpleNamespace(id=str(i)) for i in range(5))


def visits(groups: range, seed: int = 3) -> list[str]:
    return [walk(number, TASKS, seed).id for number in groups]


def test_each_pass_visits_every_task_once_in_an_order_of_its_own():
    first, second = visits(range(5)), visits(range(5, 10))
    assert sorted(first) == sorted(second) == ["0", "1", "2", "3", "4"]
    assert first != second
    assert [*first, *second] == visits(range(10)) != visits(range(10), seed=4)


@pytest.mark.parametrize("start", range(12))
def test_a_place_is_the_same_with_and_without_those_before_it_also_at_the_ends_of_passes(start: int):
    assert visits(range(start, 15)) == visits(range(15))[start:]


def test_no_two_attempts_of_a_groups_visits_share_a_number():
    groups = [GroupSpec(number=9 + visit, task=TASKS[0], visit=visit, size=3) for visit in range(4)]
    trials = [attempt for group in groups for attempt in group.attempts]
    assert [trial.number for trial in trials] == list(range(12))
    assert [trial.group for trial in trials] == [9] * 3 + [10] * 3 + [11] * 3 + [12] * 3


def test_a_measurement_has_so_many_attempts_of_each_task_side_by_side():
    assert [(a.task.id, a.number, a.group) for a in attempts(TASKS[:2], 2)] == [
        ("0", 0, None),
        ("0", 1, None),
        ("1", 0, None),
        ("1", 1, None),
    ]
