"""Puts what a run does on the disk, in the order that lets it go on: trials, then their group, then the step of it.

Groups are written beside the event loop, one at a time; a step waits until those it uses are there, or nobody writes
any more.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from lego.errors import UsageError
from lego.journal import Ended, Journal
from lego.observe.store import RunStore
from lego.rollout.collect import Group, StepGroups, solved_and_asked
from lego.rollout.curriculum import TaskRates
from lego.rollout.plan import GroupSpec
from lego.rollout.stored import Stored
from lego.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class Left:
    """What an earlier life of the run left to go on with."""

    rates: TaskRates
    """Visits and solve rates of its groups."""
    ready: tuple[Group, ...]
    """Groups that no step has used yet."""
    again: tuple[GroupSpec, ...]
    """Groups that were under way."""
    first: int
    """Number of the first new group."""


class Keeper:
    """The journal of a run and its groups on the disk."""

    def __init__(self, journal: Journal, stored: Stored, store: RunStore) -> None:
        self.journal, self._stored, self._store = journal, stored, store
        self._ended: asyncio.Queue[Group] = asyncio.Queue()
        self._over = asyncio.Event()

    def begin(self, spec: GroupSpec, version: int) -> None:
        """A group starts."""
        self.journal.begin(spec.number, spec.task.id, spec.visit, version)

    def end(self, group: Group) -> None:
        """A group has ended; it will be written."""
        self._ended.put_nowait(group)

    async def run(self) -> None:
        """Writes groups until it is cancelled, or cannot write one."""
        try:
            while True:
                await self._write(await self._ended.get())
                self._ended.task_done()
        finally:
            self._over.set()

    async def step(self, taken: StepGroups) -> None:
        """A step is done: its groups and its numbers are on the disk, and now the step is too.

        CancelledError where its groups will not be there, as `run` has ended: what ended that is the cause to tell.
        """
        await self._written()
        self._store.sync()
        self.journal.step(taken.step, [group.number for group in taken.groups])

    async def learned(self, step: int) -> None:
        """A checkpoint holds all steps before this one: groups that only they used may go."""
        past = self.journal.past
        gone = past.consumed - {number for groups in past.steps[step - past.first :] for number in groups}
        await asyncio.to_thread(self._stored.remove, gone)

    def taken(self, step: int) -> tuple[Group, ...]:
        """The groups that a step of an earlier life used."""
        past = self.journal.past
        return tuple(map(self._group, past.steps[step - past.first]))

    def left(self, tasks: Mapping[str, Task], group_size: int) -> Left:
        """What an earlier life left, all of it new for a new run."""
        past = self.journal.past
        return Left(
            rates=self._rates(),
            ready=tuple(map(self._group, past.waiting())),
            again=tuple(self._spec(number, tasks, group_size) for number in past.unfinished()),
            first=past.next_group,
        )

    async def _written(self) -> None:
        """Waits until all groups that have ended are on the disk."""
        written, over = asyncio.create_task(self._ended.join()), asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait((written, over), return_when=asyncio.FIRST_COMPLETED)
            if not written.done():
                raise asyncio.CancelledError
        finally:
            written.cancel()
            over.cancel()

    async def _write(self, group: Group) -> None:
        await asyncio.to_thread(self._stored.write, group.number, group.trajectories)
        self._store.sync()
        solved, asked = solved_and_asked(group.trajectories)
        ended = Ended(version=group.version, drop=group.drop, solved=solved, asked=asked, replaced=group.replaced)
        self.journal.end(group.number, ended)

    def _group(self, number: int) -> Group:
        past = self.journal.past
        begun, ended = past.begun[number], past.ended[number]
        return Group(
            number=number,
            task=begun.task,
            version=ended.version,
            trajectories=self._stored.read(number),
            drop=ended.drop,
            replaced=ended.replaced,
        )

    def _spec(self, number: int, tasks: Mapping[str, Task], group_size: int) -> GroupSpec:
        begun = self.journal.past.begun[number]
        if begun.task not in tasks:
            raise UsageError(f"tasks: {begun.task} of group {number} is none of them any more")
        return GroupSpec(number=number, task=tasks[begun.task], visit=begun.visit, size=group_size)

    def _rates(self) -> TaskRates:
        rates, past = TaskRates(), self.journal.past
        for begun in past.begun.values():
            rates.started(begun.task)
        for number, ended in past.ended.items():
            rates.finished(past.begun[number].task, ended.solved, ended.asked)
        return rates
