"""Which task comes next: in turn, or those that the policy sometimes solves. Pure by seed, group number and rates.

    course = Course(Band(), tasks, group_size=8, seed=0, rates=TaskRates())
    course.next_group() -> GroupSpec
    course.rates.finished(task.id, solved=3, asked=8)

Under `Walk` the groups of a run are the same however it goes. Under `Band` they depend on which results were known when
a group started; those that had started stay what they were when a run goes on after a crash.
"""

import random
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from lego.rollout.plan import GroupSpec, walk
from lego.tasks.task import Task

HALF_LIFE_TRIALS = 32
"""Trials of a task after which an earlier result counts half in its running solve rate."""


class TaskRates:
    """How often and when each task was visited and, as a running mean, solved.

    Told the same starts in the same order and the same ends in the same order, it is in the same state: a run that
    goes on tells it those of its journal.
    """

    def __init__(self) -> None:
        self._visits, self._started = Counter[str](), 0
        self._latest: dict[str, int] = {}
        self._means: dict[str, tuple[float, float]] = {}

    def started(self, task: str) -> None:
        """A group of this task has started."""
        self._visits[task] += 1
        self._started += 1
        self._latest[task] = self._started

    def finished(self, task: str, solved: int, asked: int) -> None:
        """So many trials were solved of those asked; ones that the environment spoiled are in neither number.

        ValueError unless 0 <= solved <= asked.
        """
        if not 0 <= solved <= asked:
            raise ValueError(f"solved: {solved}, wanted 0 to {asked}, the trials asked of {task}")
        keep = 0.5 ** (asked / HALF_LIFE_TRIALS)
        before, weight = self._means.get(task, (0.0, 0.0))
        self._means[task] = (keep * before + solved, keep * weight + asked)

    def visits(self, task: str) -> int:
        """Groups of this task that have started."""
        return self._visits[task]

    def latest(self, task: str) -> int:
        """How many groups of all tasks had started once this task's last one had; 0 before its first."""
        return self._latest.get(task, 0)

    def rate(self, task: str) -> float | None:
        """The running solve rate, an exponential mean over trials; None where none was asked."""
        solved, asked = self._means.get(task, (0.0, 0.0))
        return solved / asked if asked else None


class Curriculum(Protocol):
    """A recipe's frozen choice of the order of tasks."""

    def problems(self) -> Iterator[str]:
        """Each thing that cannot be, as `rollout.curriculum.field: value, wanted …`."""
        ...

    def task(self, number: int, tasks: tuple[Task, ...], seed: int, rates: TaskRates) -> Task:
        """The task of the group with this number; the same for the same arguments, `rates` included."""
        ...


@dataclass(frozen=True, kw_only=True)
class Walk:
    """Pass after pass through all tasks, each in an order of its own; solve rates change nothing."""

    def problems(self) -> Iterator[str]:
        """None."""
        return iter(())

    def task(self, number: int, tasks: tuple[Task, ...], seed: int, rates: TaskRates) -> Task:
        """The next one of the walk."""
        return walk(number, tasks, seed)


@dataclass(frozen=True, kw_only=True)
class Band:
    """A first pass through all tasks, then mostly those that are solved sometimes."""

    low: float = 0.1
    """Least running solve rate of the band."""
    high: float = 0.9
    """Greatest running solve rate of the band."""
    explore: float = 0.1
    """Share of groups for tasks outside the band, which may have become easier or harder."""

    def problems(self) -> Iterator[str]:
        """Each thing that cannot be, as `rollout.curriculum.field: value, wanted …`."""
        if not 0 <= self.low <= 1:
            yield f"rollout.curriculum.low: {self.low}, wanted 0 to 1"
        if not self.low <= self.high <= 1:
            yield f"rollout.curriculum.high: {self.high}, wanted rollout.curriculum.low {self.low} to 1"
        if not 0 < self.explore <= 1:
            yield f"rollout.curriculum.explore: {self.explore}, wanted more than 0, up to 1: or no rate is ever renewed"

    def task(self, number: int, tasks: tuple[Task, ...], seed: int, rates: TaskRates) -> Task:
        """That of the walk in the first pass; then, in the band or outside it, the one visited longest ago.

        A task without a rate is in the band. Where one side is empty the other is taken.
        """
        if number < len(tasks):
            return walk(number, tasks, seed)
        inside, outside = list[Task](), list[Task]()
        for task in tasks:
            (inside if self._holds(rates.rate(task.id)) else outside).append(task)
        exploring = random.Random(f"{seed}/explore/{number}").random() < self.explore
        first, second = (outside, inside) if exploring else (inside, outside)
        return min(first or second, key=lambda task: rates.latest(task.id))

    def _holds(self, rate: float | None) -> bool:
        return rate is None or self.low <= rate <= self.high


class Course:
    """Hands out a run's groups, one after another: those of `again`, left unfinished by an earlier life, come first."""

    def __init__(
        self,
        curriculum: Curriculum,
        tasks: Sequence[Task],
        *,
        group_size: int,
        seed: int,
        rates: TaskRates,
        first: int = 0,
        again: Iterable[GroupSpec] = (),
    ) -> None:
        """`rates` knows every group that has started before, those of `again` too; `first` is the next new number."""
        self.rates = rates
        self._curriculum, self._tasks, self._size, self._seed = curriculum, tuple(tasks), group_size, seed
        self._next, self._again = first, deque(again)

    def next_group(self) -> GroupSpec:
        """The next group; there is always one."""
        if self._again:
            return self._again.popleft()
        task = self._curriculum.task(self._next, self._tasks, self._seed, self.rates)
        spec = GroupSpec(number=self._next, task=task, visit=self.rates.visits(task.id), size=self._size)
        self.rates.started(task.id)
        self._next += 1
        return spec
