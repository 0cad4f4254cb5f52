"""Which harness runs a trial: drawn by weight for each group, or the task's own; for measurements one for all. Pure."""

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harnesses.base import Harness
from lego.errors import UsageError
from lego.rollout.plan import Attempt
from lego.tasks.task import Task
from sandbox.base import Mount


@dataclass(frozen=True, kw_only=True)
class Weighted:
    """A harness, and how often groups of trials run it."""

    harness: Harness
    weight: float = 1.0
    """Beside the weights of the others."""


def mix_problems(mix: Sequence[Weighted]) -> Iterator[str]:
    """Each thing that cannot be, as `field: value, wanted`."""
    names = Counter(part.harness.name for part in mix)
    for name, count in names.items():
        if count > 1:
            yield f"mix: {name} {count} times, wanted each harness once"
    for part in mix:
        if not 0 < part.weight < math.inf:
            yield f"mix: {part.harness.name}={part.weight:g}, wanted a weight of more than 0 and finite"


@dataclass(frozen=True, kw_only=True)
class Mounted:
    """A harness, and what it needs in a box."""

    harness: Harness
    mounts: tuple[Mount, ...]


def mounted(harnesses: Iterable[Harness], cache: Path) -> dict[str, Mounted]:
    """Harnesses by name; HarnessNotFetched for the first that `cache` does not hold."""
    return {harness.name: Mounted(harness=harness, mounts=harness.mounts(cache)) for harness in harnesses}


def named_by(tasks: Iterable[Task], known: Mapping[str, Harness]) -> dict[str, Harness]:
    """The harnesses that tasks name as theirs; UsageError for a name that nobody knows."""
    named: dict[str, Harness] = {}
    for task in tasks:
        if task.harness is None:
            continue
        if task.harness not in known:
            raise UsageError(f"task {task.id}: harness: {task.harness!r}, wanted one of {', '.join(sorted(known))}")
        named[task.harness] = known[task.harness]
    return named


@dataclass(frozen=True, kw_only=True)
class Mix:
    """The harness of every trial of a run: the same in each life of the run, and whatever order groups come in."""

    weights: Mapping[str, float]
    """By name, for groups whose task names no harness."""
    measured: str
    """Name of the one that all measurements run, so that their rates compare."""
    seed: int
    ready: Mapping[str, Mounted]
    """By name, those of weights, measurements and tasks."""

    def __post_init__(self) -> None:
        lacking = {*self.weights, self.measured} - self.ready.keys()
        if lacking or not self.weights:
            raise ValueError(f"ready: {sorted(self.ready)}, wanted {sorted(lacking) or 'weights'} too")

    def of(self, attempt: Attempt) -> Mounted:
        """What runs the attempt. All trials of a group run the same, as their rewards are compared."""
        if attempt.group is None:
            return self.ready[self.measured]
        return self.ready[attempt.task.harness or self._drawn(attempt.group)]

    def with_ready(self, more: Mapping[str, Mounted]) -> "Mix":
        """The same with more harnesses that tasks may name."""
        return replace(self, ready={**self.ready, **more})

    def _drawn(self, group: int) -> str:
        # By number, not in turn: groups are drawn ahead, left out, and drawn again when a run is resumed.
        return random.Random(f"{self.seed}/harness/{group}").choices(list(self.weights), [*self.weights.values()])[0]
