"""What a run's groups wait for on their way to the disk, and what becomes of a step whose groups cannot get there."""

import asyncio
import errno
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from lego.journal import Journal
from lego.keeper import Keeper
from lego.observe.store import RunStore, open_run
from lego.records import Trajectory
from lego.rollout.collect import Group, StepGroups
from lego.rollout.plan import GroupSpec
from lego.rollout.stored import Stored
from lego.structured import unhurried
from lego.tasks.task import Script, Task
from tests.factories import trajectory

GRACE_S = 6.0
TASK = Task(
    id="t", package="t", split="train", digest="1", base=Path("/base"), instruction="do",
    verifier=Script(folder=Path("/tests")),
)  # fmt: skip
GROUP = Group(number=0, task="t", version=0, trajectories=(trajectory("t", 1.0),), drop=None)
TAKEN = StepGroups(step=0, groups=(GROUP,), replaced=(), waited_s=0.0)


class Full(Stored):
    """A disk without room."""

    def write(self, group: int, trajectories: Iterable[Trajectory]) -> None:
        time.sleep(0.05)
        raise OSError(errno.ENOSPC, "No space left on device")


class Slow(Stored):
    """A disk that takes its time."""

    def write(self, group: int, trajectories: Iterable[Trajectory]) -> None:
        time.sleep(0.05)
        super().write(group, trajectories)


def begun(folder: Path, kind: type[Stored], store: RunStore) -> Keeper:
    keeper = Keeper(Journal(folder), kind(folder=folder / "groups"), store)
    keeper.begin(GroupSpec(number=0, task=TASK, visit=0, size=1), version=0)
    keeper.end(GROUP)
    return keeper


async def trained(keeper: Keeper, beside: Any = None) -> None:
    """A step as the loop makes it, with its writer and others beside; it may take its grace only where it has hope."""
    start = time.monotonic()
    try:
        async with asyncio.TaskGroup() as group:
            writer = group.create_task(keeper.run())
            if beside is not None:
                group.create_task(beside())
            await unhurried(keeper.step(TAKEN), GRACE_S)
            writer.cancel()
    finally:
        assert time.monotonic() - start < GRACE_S / 2


async def test_a_step_is_told_once_its_groups_are_there(tmp_path: Path):
    with open_run(tmp_path) as store:
        keeper = begun(tmp_path, Slow, store)
        await trained(keeper)
    assert keeper.journal.past.steps == [(0,)]
    assert [group.number for group in keeper.taken(0)] == [0]


async def test_a_group_that_cannot_be_written_ends_the_run_at_once_with_its_cause(tmp_path: Path):
    with open_run(tmp_path) as store:
        keeper = begun(tmp_path, Full, store)
        with pytest.raises(ExceptionGroup) as caught:
            await trained(keeper)
    assert caught.group_contains(OSError, match="No space left") and len(caught.value.exceptions) == 1
    assert keeper.journal.past.steps == []


async def test_a_step_whose_groups_nobody_writes_any_more_is_not_waited_for(tmp_path: Path):
    async def fails() -> None:
        raise ZeroDivisionError

    with open_run(tmp_path) as store:
        keeper = begun(tmp_path, Slow, store)
        with pytest.raises(ExceptionGroup) as caught:
            await trained(keeper, fails)
        assert caught.group_contains(ZeroDivisionError) and len(caught.value.exceptions) == 1
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(5):
                await keeper.step(TAKEN)
    assert keeper.journal.past.steps == []
