"""Runs a step's trials, some at a time and up to a time, and refuses to go on when too many had no verdict."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from lego.errors import GateError
from lego.records import Outcome, Trajectory
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


def tasks_of_step(tasks: Sequence[Task], per_step: int, step: int, seed: int) -> list[Task]:
    """The tasks that step number `step` visits: shuffled anew for each pass through all of them."""
    out: list[Task] = []
    for position in range(step * per_step, (step + 1) * per_step):
        epoch, place = divmod(position, len(tasks))
        order = list(tasks)
        random.Random(f"{seed}/{epoch}").shuffle(order)
        out.append(order[place])
    return out


@dataclass(frozen=True, kw_only=True)
class Cut:
    """When a trial is cut short, in the event loop's time, and why."""

    at: float = math.inf
    cause: str = ""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a group's trials and all of them may take; the default waits for each to end by itself."""

    group_s: float = math.inf
    step_s: float = math.inf


class Cuts:
    """Says when each trial of one step is cut: by its group's clock, which starts with its first trial, or the step's.

    Nothing else is stopped: a straggler costs its own sample, and a step that lost too many is refused afterwards.
    """

    def __init__(self, patience: Patience, start: float) -> None:
        self._patience, self._groups = patience, dict[str, float]()
        self._step = Cut(at=start + patience.step_s, cause=_over("step", patience.step_s))

    def next(self, attempt: Attempt, now: float) -> Cut:
        """The cut of a trial that starts now."""
        first = self._groups.setdefault(attempt.task.id, now)
        patience = self._patience.group_s
        return min(Cut(at=first + patience, cause=_over("group", patience)), self._step, key=lambda cut: cut.at)


def _over(what: str, seconds: float) -> str:
    return f"the trials of its {what} took longer than budget.{what}_s {seconds:g}"


async def collect(
    wanted: Sequence[Attempt],
    run: Callable[[Attempt, Cut], Awaitable[Trajectory]],
    *,
    concurrency: int,
    done: Callable[[Trajectory], None],
    patience: Patience = Patience(),
) -> list[Trajectory]:
    """The trajectories of `wanted`, in its order; `done` hears of each as it ends.

    `run` ends a trial at its cut; one whose turn comes after its cut is run all the same, and ends at once.
    """
    free, loop = asyncio.Semaphore(concurrency), asyncio.get_running_loop()
    cuts = Cuts(patience, loop.time())

    async def one(attempt: Attempt) -> Trajectory:
        async with free:
            trajectory = await run(attempt, cuts.next(attempt, loop.time()))
        done(trajectory)
        return trajectory

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(attempt)) for attempt in wanted]
    return [task.result() for task in running]


def refuse_unscored(trajectories: Sequence[Trajectory], most: float) -> None:
    """GateError with counts and the first cause when more than a share `most` has no reward."""
    bad = [t for t in trajectories if t.reward is None]
    if len(bad) > most * len(trajectories):
        counts = Counter(t.outcome.value for t in bad)
        raise GateError(
            f"{len(bad)} of {len(trajectories)} trials had no verdict (rollout.max_unscored {most}): "
            f"{dict(counts)}; first: {bad[0].task}: {bad[0].outcome.value}: {bad[0].detail}"
        )


def refuse_faulty(trajectories: Sequence[Trajectory], most: float) -> None:
    """GateError with counts and the first cause when more than a share `most` of all turns failed a cross-check."""
    turns = sum(t.fidelity.turns for t in trajectories)
    counts = sum((Counter(t.fidelity.faults) for t in trajectories), Counter())
    if counts.total() > most * turns:
        first = next(t for t in trajectories if t.fidelity.faults)
        raise GateError(
            f"{counts.total()} of {turns} turns failed a cross-check (fidelity.max_faults {most}): {dict(counts)}; "
            f"first: {first.task}#{first.attempt}: {next(iter(first.fidelity.faults))}"
        )


AGENT_ENDS = frozenset({Outcome.TIMEOUT, Outcome.TURN_LIMIT, Outcome.TOKEN_LIMIT, Outcome.CONTEXT_EXCEEDED})
"""Ends without a reward that are the policy's own doing: not solved, in a solve rate."""


def solved_and_asked(trajectories: Sequence[Trajectory]) -> tuple[int, int]:
    """Solved trials, and all but those that the environment spoiled."""
    asked = [t for t in trajectories if t.reward is not None or t.outcome in AGENT_ENDS]
    return sum(t.outcome is Outcome.SOLVED for t in asked), len(asked)
