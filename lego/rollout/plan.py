"""The groups of a run and their attempts, each known by its number alone. Pure."""

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


def walk(number: int, tasks: Sequence[Task], seed: int) -> Task:
    """The task of group `number`, counted from 0, on an endless walk: passes through all tasks, each shuffled anew.

    It is known without those before it: a run that starts again goes on where it was.
    """
    epoch, place = divmod(number, len(tasks))
    return tasks[_order(len(tasks), seed, epoch)[place]]


@lru_cache(maxsize=8)
def _order(tasks: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Places of the tasks in one pass. Kept for a few passes: a group at a time would shuffle them all each time."""
    order = list(range(tasks))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return tuple(order)
