"""How long each part of a run may take: call < harness < trial < group < step, with verdict and boxes inside. Pure."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

from lego.errors import UsageError
from lego.tasks.task import PytestSuite, Task

MARGIN_S = 60.0
"""What a box may take beside its one long command: to open, to be filled, to be read, to close."""


VERDICT_RUNS = 3
"""Boxes of one verdict at most, in turn: a killed run is repeated, and one that passes, to see that it can fail."""


def box_s(work_s: float) -> float:
    """How long a box lives whose longest command may take `work_s`."""
    return work_s + MARGIN_S


def whole_verdict_s(verdict_s: float) -> float:
    """How long a verdict may take whose tests take up to `verdict_s` in each run."""
    return VERDICT_RUNS * box_s(verdict_s)


@dataclass(frozen=True, kw_only=True)
class Crew:
    """What the longer times follow from."""

    group_size: int
    tasks_per_step: int
    concurrency: int


@dataclass(frozen=True, kw_only=True)
class Times:
    """A budget with every time filled in; ValueError for one that does not hold what is inside it."""

    call_s: float
    harness_s: float
    verdict_s: float
    trial_s: float
    group_s: float
    step_s: float

    def __post_init__(self) -> None:
        for problem in self.problems():
            raise ValueError(problem)

    def problems(self) -> Iterator[str]:
        """Each rule that is broken, as `budget.field: value, wanted …`."""
        yield from _problems(**{f.name: getattr(self, f.name) for f in fields(self)})


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Time limits. Name the first one or two; the others follow from them unless they are named too."""

    harness_s: float = 60.0
    """One harness run; a longer one ends as `timeout`. A task that names a shorter time for the agent gets that."""
    verdict_s: float = 120.0
    """The longest time that a task may ask for one run of its tests; a verdict without an end by then, with the time
    that its boxes take, is a `verifier_error`."""
    call_s: float | None = None
    """One model call, with pauses for new weights; a longer one ends the trial as `engine_error`. By default half of
    `harness_s`, so that a hanging engine is not taken for a slow agent."""
    trial_s: float | None = None
    """One trial with its boxes and its verdict; a longer one ends as `sandbox_error`, or in its verdict as
    `verifier_error`. By default the sum of its parts."""
    group_s: float | None = None
    """A group's trials in training, from the first start; what is not done then ends as `cancelled`, and the group
    goes on with the rest. By default what slots that are taken by other trials can cost it at worst."""
    step_s: float | None = None
    """How long a step waits for its groups; then the oldest that it cannot go on without are cut, end as `cancelled`,
    and the step goes on with the rest, unless that breaks `rollout.max_unscored`. By default what trials that all take
    `trial_s` need."""

    def problems(self, crew: Crew) -> Iterator[str]:
        """Each rule that is broken, as `budget.field: value, wanted …`."""
        yield from _problems(**self._filled(crew))

    def times(self, crew: Crew) -> Times:
        """All times; ValueError with the first problem."""
        return Times(**self._filled(crew))

    def _filled(self, crew: Crew) -> dict[str, float]:
        call = self.harness_s / 2 if self.call_s is None else self.call_s
        trial = _least_trial_s(self.harness_s, self.verdict_s) if self.trial_s is None else self.trial_s
        group = _group_s(trial, crew) if self.group_s is None else self.group_s
        step = _step_s(trial, group, crew) if self.step_s is None else self.step_s
        return {
            "call_s": call,
            "harness_s": self.harness_s,
            "verdict_s": self.verdict_s,
            "trial_s": trial,
            "group_s": group,
            "step_s": step,
        }


def check_tasks(tasks: Iterable[Task], budget: Budget) -> None:
    """UsageError that names the first task that asks for more time than there is."""
    for problem in _too_long(tasks, budget):
        raise UsageError(problem)


def _too_long(tasks: Iterable[Task], budget: Budget) -> Iterator[str]:
    for task in tasks:
        verifier = task.verifier
        tests_s = verifier.wall_s if isinstance(verifier, PytestSuite) else verifier.timeout_s
        name = "wall_s" if isinstance(verifier, PytestSuite) else "timeout_s"
        if not 0 < tests_s <= budget.verdict_s:
            told = f"more than 0 and at most budget.verdict_s {budget.verdict_s}"
            yield f"task {task.id}: verifier.{name}: {tests_s}, wanted {told}"
        if task.harness_s is not None and not 0 < task.harness_s <= budget.harness_s:
            told = f"more than 0 and at most budget.harness_s {budget.harness_s}"
            yield f"task {task.id}: harness_s: {task.harness_s}, wanted {told}"


def _least_trial_s(harness_s: float, verdict_s: float) -> float:
    """The agent's box and those of the verdict, one after the other."""
    return box_s(harness_s) + whole_verdict_s(verdict_s)


def _group_s(trial_s: float, crew: Crew) -> float:
    """Trials start in their order, so the last of a group waits at most for those before it, slot by slot."""
    waits = math.ceil((crew.group_size - 1) / max(crew.concurrency, 1))
    return (waits + 1) * trial_s + MARGIN_S


def _step_s(trial_s: float, group_s: float, crew: Crew) -> float:
    rounds = math.ceil(crew.tasks_per_step * crew.group_size / max(crew.concurrency, 1))
    return max(rounds * trial_s, group_s) + MARGIN_S


def _problems(
    *, call_s: float, harness_s: float, verdict_s: float, trial_s: float, group_s: float, step_s: float
) -> Iterator[str]:
    named = {"harness_s": harness_s, "verdict_s": verdict_s, "call_s": call_s}
    named |= {"trial_s": trial_s, "group_s": group_s, "step_s": step_s}
    odd = {name for name, value in named.items() if not 0 < value < math.inf}
    # A time that follows from an odd one is odd too: name the cause alone.
    causes = odd & {"harness_s", "verdict_s"} or odd
    yield from (f"budget.{name}: {named[name]}, wanted more than 0 and finite" for name in named if name in causes)
    if odd:
        return
    if not call_s < harness_s:
        yield f"budget.call_s: {call_s}, wanted less than budget.harness_s {harness_s}"
    least = _least_trial_s(harness_s, verdict_s)
    if trial_s < least:
        yield (
            f"budget.trial_s: {trial_s}, wanted {least} or more: harness_s {harness_s} + {VERDICT_RUNS} x verdict_s "
            f"{verdict_s} + {MARGIN_S:g} s for each of their boxes"
        )
    if not trial_s < group_s:
        yield f"budget.group_s: {group_s}, wanted more than budget.trial_s {trial_s}"
    if not group_s < step_s:
        yield f"budget.step_s: {step_s}, wanted more than budget.group_s {group_s}"
