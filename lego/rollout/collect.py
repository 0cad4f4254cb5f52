"""Runs a step's trials, some at a time, and refuses to go on when too many of them had no verdict."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from lego.errors import GateError
from lego.records import Outcome, Trajectory
from lego.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The k-th trial of a task under one version of the weights."""

    task: Task
    number: int


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


async def collect(
    wanted: Sequence[Attempt],
    run: Callable[[Attempt], Awaitable[Trajectory]],
    *,
    concurrency: int,
    done: Callable[[Trajectory], None],
) -> list[Trajectory]:
    """The trajectories of `wanted`, in its order; `done` hears of each as it ends."""
    free = asyncio.Semaphore(concurrency)

    async def one(attempt: Attempt) -> Trajectory:
        async with free:
            trajectory = await run(attempt)
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
