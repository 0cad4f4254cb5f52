"""Runs groups of trials beside training: starts them as the window allows, gives each step its groups.

    collector = Collector(course, window, trials.run, judge, steps=range(0, 100), patience=…, on_start=…, …)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(collector.run())              # ends by itself after the last step's groups
        for step in range(0, 100):
            taken = await collector.step(step)          # StepGroups; the engine holds version `step`
            … train, push version step + 1 …

What may start and what a step takes is decided in `window.py`; this module only runs it. All calls of `on_…` come from
the event loop, in the order in which things happen, and must not block.
"""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from lego.records import Outcome, Trajectory
from lego.rollout.cuts import FOREVER, Cut, Patience
from lego.rollout.plan import Attempt, GroupSpec
from lego.rollout.window import Slots, Window

SURPLUS = "surplus"
"""Why an oversampled group is not trained: its step had enough others."""
SURPLUS_CAUSE = "its step had enough other groups (rollout.oversample)"


class Source(Protocol):
    """Where groups come from, such as `curriculum.Course`."""

    def next_group(self) -> GroupSpec | None:
        """The next group to start; None if there will be no more."""
        ...


class RunTrial(Protocol):
    """Runs one trial to its end or to its cut (`async with cut.limit()`), and raises bugs only."""

    def __call__(self, attempt: Attempt, cut: Cut, *, version: int) -> Awaitable[Trajectory]:
        """`version` is that of the newest weights when the trial starts."""
        ...


@dataclass(frozen=True, kw_only=True)
class Group:
    """A finished group."""

    number: int
    task: str
    version: int
    """Of the newest weights when its first trial started: no token of it is by older ones."""
    trajectories: tuple[Trajectory, ...]
    """In the order of their attempts, whatever became of each."""
    drop: str | None
    """Why it is not trained on; None if it is."""
    replaced: bool = False
    """It fills no slot of a step: dropped, and another group has its place."""


@dataclass(frozen=True, kw_only=True)
class StepGroups:
    """What a training step gets."""

    step: int
    groups: tuple[Group, ...]
    """One for each slot, oldest first; those with a `drop` leave theirs empty. Fewer only if the source ended."""
    replaced: tuple[Group, ...]
    """Dropped groups that fill no slot, since the step before."""
    waited_s: float
    """How long the step waited for its groups."""


@dataclass(kw_only=True)
class _Live:
    """A group whose trials run."""

    spec: GroupSpec
    version: int
    cut: Cut
    done: dict[int, Trajectory] = field(default_factory=dict)
    surplus: bool = False

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        return tuple(self.done[number] for number in sorted(self.done))


class Collector:
    """Runs a source's groups as the window allows. One `run`, and one `step` at a time for each step in turn."""

    def __init__(
        self,
        source: Source,
        window: Window,
        run: RunTrial,
        judge: Callable[[Sequence[Trajectory]], str | None],
        *,
        steps: range,
        patience: Patience = FOREVER,
        on_start: Callable[[GroupSpec, int], None] = lambda spec, version: None,
        on_trial: Callable[[Trajectory], None] = lambda trajectory: None,
        on_group: Callable[[Group], None] = lambda group: None,
        ready: Sequence[Group] = (),
    ) -> None:
        """`judge` says why a finished group is dropped, None to keep it.

        `steps` are those still to be made, and `ready` the groups that an earlier life of the run finished for them
        (those with `replaced` are none of them); ValueError if these do not fit into the window. `on_start` hears of
        a group and the version it starts by, `on_trial` of each trial, `on_group` of each finished group.
        """
        self._source, self._concurrency, self._run, self._judge = source, window.concurrency, run, judge
        self._on_start, self._on_trial, self._on_group = on_start, on_trial, on_group
        self._patience = patience
        self._slots = Slots(window, steps, ((group.number, group.version) for group in ready))
        self._ready = {group.number: group for group in ready}
        self._replaced: list[Group] = []
        self._running: dict[int, _Live] = {}
        self._waiting: deque[tuple[_Live, Attempt]] = deque()
        self._alive, self._late = 0, False
        self._may_start = asyncio.Event()
        self._asked: asyncio.Future[tuple[Group, ...]] | None = None

    async def run(self) -> None:
        """Runs groups until the last step has its own and every trial has ended, or the source is empty."""
        async with asyncio.TaskGroup() as tasks:
            while self._running or not self._slots.over:
                self._may_start.clear()
                while self._alive < self._concurrency and (trial := self._next_trial()):
                    self._alive += 1
                    tasks.create_task(self._trial(*trial, self._slots.version))
                if self._running or not self._slots.over:
                    await self._may_start.wait()

    async def step(self, version: int) -> StepGroups:
        """The groups of the step that trains weights `version`, which the engine holds now; waits for them."""
        assert version == self._slots.step, f"step {version} asked for, {self._slots.step} is next"
        loop = asyncio.get_running_loop()
        start, self._asked = loop.time(), loop.create_future()
        self._slots.moved(version)
        self._may_start.set()
        with self._limited_wait(loop, start):
            self._serve()
            groups = await self._asked
        replaced, self._replaced = tuple(self._replaced), []
        return StepGroups(step=version, groups=groups, replaced=replaced, waited_s=loop.time() - start)

    def _serve(self) -> None:
        """Gives the step that waits its groups as soon as it may have them."""
        if self._asked is None or self._asked.done() or (pick := self._slots.pick()) is None:
            return
        for number in pick.surplus:
            self._running[number].surplus = True
            self._running[number].cut.soon(asyncio.get_running_loop().time(), SURPLUS_CAUSE)
        self._asked.set_result(tuple(self._ready.pop(number) for number in pick.taken))
        self._may_start.set()

    def _next_trial(self) -> tuple[_Live, Attempt] | None:
        """The next trial of the group that started last, or the first of one that may start now."""
        if not self._waiting and self._slots.may_start():
            self._start_group()
        return self._waiting.popleft() if self._waiting else None

    def _start_group(self) -> None:
        spec, version, now = self._source.next_group(), self._slots.version, asyncio.get_running_loop().time()
        if spec is None:
            self._slots.close()
            self._serve()
            return
        live = _Live(spec=spec, version=version, cut=self._patience.group_cut(now))
        self._slots.started(spec.number)
        self._running[spec.number] = live
        self._waiting.extend((live, attempt) for attempt in spec.attempts)
        self._on_start(spec, version)
        if self._late:
            self._cut_awaited(now)

    async def _trial(self, live: _Live, attempt: Attempt, version: int) -> None:
        trajectory = await self._run(attempt, live.cut, version=version)
        self._alive -= 1
        self._may_start.set()
        self._on_trial(trajectory)
        live.done[attempt.number] = trajectory
        if len(live.done) == live.spec.size:
            self._finish(live)

    def _finish(self, live: _Live) -> None:
        number, trajectories = live.spec.number, live.trajectories
        del self._running[number]
        drop = SURPLUS if live.surplus else self._judge(trajectories)
        replaced = live.surplus or self._slots.finished(number, dropped=drop is not None)
        group = Group(
            number=number,
            task=live.spec.task.id,
            version=live.version,
            trajectories=trajectories,
            drop=drop,
            replaced=replaced,
        )
        if replaced:
            self._replaced.append(group)
        else:
            self._ready[number] = group
        self._on_group(group)
        self._serve()

    @contextmanager
    def _limited_wait(self, loop: asyncio.AbstractEventLoop, start: float) -> Iterator[None]:
        """While it lasts, the step's own time runs."""
        if math.isinf(self._patience.step_s):
            yield
            return
        timer = loop.call_at(start + self._patience.step_s, self._hurry, start + self._patience.step_s)
        try:
            yield
        finally:
            timer.cancel()
            self._late = False

    def _hurry(self, now: float) -> None:
        """The step has waited long enough: what it cannot go on without is cut, running or yet to start."""
        self._late = True
        self._slots.hurry()
        self._cut_awaited(now)

    def _cut_awaited(self, now: float) -> None:
        for number in self._slots.awaited():
            self._running[number].cut.soon(now, self._patience.step_cause)


async def collect(
    wanted: Sequence[Attempt],
    run: Callable[[Attempt, Cut], Awaitable[Trajectory]],
    *,
    concurrency: int,
    done: Callable[[Trajectory], None],
    cut: Cut,
) -> list[Trajectory]:
    """The trajectories of `wanted`, in its order; `done` hears of each as it ends.

    One whose turn comes after the cut is run all the same, and ends at once.
    """
    free = asyncio.Semaphore(concurrency)

    async def one(attempt: Attempt) -> Trajectory:
        async with free:
            trajectory = await run(attempt, cut)
        done(trajectory)
        return trajectory

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(attempt)) for attempt in wanted]
    return [task.result() for task in running]


AGENT_ENDS = frozenset({Outcome.TIMEOUT, Outcome.TURN_LIMIT, Outcome.TOKEN_LIMIT, Outcome.CONTEXT_EXCEEDED})
"""Ends without a reward that are the policy's own doing: not solved, in a solve rate."""


def solved_and_asked(trajectories: Sequence[Trajectory]) -> tuple[int, int]:
    """Solved trials, and all but those that the environment spoiled."""
    asked = [t for t in trajectories if t.reward is not None or t.outcome in AGENT_ENDS]
    return sum(t.outcome is Outcome.SOLVED for t in asked), len(asked)
