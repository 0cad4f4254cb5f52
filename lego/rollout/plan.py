"""Which task each group of a run works on, by the group's number alone: an endless walk over the tasks. Pure.

Plan(tasks=…, group_size=8, seed=0).group(17) -> GroupSpec
Supply(plan, first=17, again=(12, 15)).next_group() -> GroupSpec: 12, 15, 17, 18, 19, …
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from lego.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One trial of a task; no two attempts of a run at one task share a number."""

    task: Task
    number: int
    group: int | None = None
    """Number of its group in the run's plan; None for a measurement."""


def attempts(tasks: Sequence[Task], each: int) -> list[Attempt]:
    """`each` attempts of every task, a task's own side by side."""
    return [Attempt(task=task, number=k) for task in tasks for k in range(each)]


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """A group before it runs: so many trials of one task."""

    number: int
    task: Task
    visit: int
    """How often the run visited the task before."""
    size: int

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """Its trials; their numbers go on where those of the task's earlier visits ended."""
        first = self.visit * self.size
        return tuple(Attempt(task=self.task, number=first + k, group=self.number) for k in range(self.size))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An endless walk over the tasks, shuffled anew for each pass; any place of it is known without those before.

    The same tasks, size and seed give the same groups, so a run that starts again goes on where it was.
    """

    tasks: tuple[Task, ...]
    group_size: int
    seed: int

    def __post_init__(self) -> None:
        if not self.tasks or self.group_size < 1:
            raise ValueError(f"{len(self.tasks)} tasks in groups of {self.group_size}, wanted 1 or more of both")

    def group(self, number: int) -> GroupSpec:
        """Group `number`, counted from 0; each pass visits every task once, so the pass is the visit."""
        visit, place = divmod(number, len(self.tasks))
        task = self.tasks[_order(len(self.tasks), self.seed, visit)[place]]
        return GroupSpec(number=number, task=task, visit=visit, size=self.group_size)


@lru_cache(maxsize=8)
def _order(tasks: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Places of the tasks in one pass. Kept for a few passes: a group at a time would shuffle them all each time."""
    order = list(range(tasks))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return tuple(order)
