"""One simulated run: the training loop's own order of things, with scripted parts around the real collector."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from random import Random

from lego.records import Fidelity, Outcome, Trajectory
from lego.rollout.collect import Collector, StepGroups
from lego.rollout.credit import Rules
from lego.rollout.curriculum import Course, TaskRates, Walk
from lego.rollout.cuts import FOREVER, Cut, Patience
from lego.rollout.filters import Filters, judge
from lego.rollout.plan import Attempt
from lego.rollout.window import Window
from lego.tasks.task import Script, Task

from .clock import run_virtual
from .engine import Capacity, SharedEngine
from .shape import Shape

UNTOLD = Fidelity()
"""A simulated trial has no tokens of its own."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is simulated; times in virtual seconds."""

    name: str
    window: Window
    group_size: int = 8
    steps: int = 30
    tasks: int = 400
    partial: bool = True
    """New weights leave running answers standing (partial rollout); otherwise the update waits for them."""
    drop_flat: bool = False
    """Groups whose trials all earned the same are dropped."""
    least: int = 1
    """Trials with a reward that a group needs to be trained."""
    patience: Patience = FOREVER
    shape: Shape = Shape()
    capacity: Capacity = Capacity()
    turns: float = 6.0
    """Model calls of a median trial; 0 for one of any trial."""
    tokens: float = 6000.0
    """Tokens that a median trial samples."""
    tools_s: float = 60.0
    """Seconds that a median trial spends outside the engine."""
    train_s: float = 300.0
    """Seconds of one optimizer step."""
    push_s: float = 5.0
    """Seconds that the engine stands still for new weights."""


@dataclass(kw_only=True)
class Result:
    """What a simulated run counted."""

    setting: Setting
    seconds: float = 0.0
    """Virtual time of all steps."""
    trained: int = 0
    """Trials in groups that were trained."""
    started: int = 0
    """Trials that started."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Groups that were not trained, by the reason."""
    cut: int = 0
    """Trials that ended at a deadline or were cancelled."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Trained trials by how many versions older than the step the weights of their first token were."""
    sampled: float = 0.0
    """Tokens."""

    @property
    def per_hour(self) -> float:
        """Trained trials a virtual hour."""
        return self.trained / self.seconds * 3600

    @property
    def trainer_idle(self) -> float:
        """Share of the time that no step was computed."""
        return 1 - self.setting.steps * self.setting.train_s / self.seconds

    @property
    def engine_idle(self) -> float:
        """Share of the tokens not sampled that the engine would have with all trials at one time in it."""
        capacity, alive = self.setting.capacity, self.setting.window.concurrency
        most = min(alive, capacity.slots * capacity.replicas)
        return 1 - self.sampled / (most * capacity.speed(most) * self.seconds)


def simulate(setting: Setting) -> Result:
    """Runs the setting to its last step, on a clock of its own.

    An ExceptionGroup with an AssertionError if a trained trial breaks the bound, or a step has not its slots.
    """
    return run_virtual(_World(setting).run())


def tasks(count: int) -> list[Task]:
    """Tasks with a name and nothing else."""
    nowhere = Path("nowhere")
    return [
        Task(
            id=f"t{number}",
            package="none",
            split="train",
            digest="",
            base=nowhere,
            instruction="",
            verifier=Script(folder=nowhere),
        )
        for number in range(count)
    ]


def random_setting(random: Random) -> Setting:
    """A run of some thousand short trials, with any window, filters and deadlines."""
    size, per_step, depth = random.choice((1, 2, 4, 8)), random.randint(1, 40), random.choice((0, 0, 1, 2, 3, 5, 9))
    return Setting(
        name="random",
        window=Window(
            groups_per_step=per_step,
            staleness=depth,
            concurrency=random.choice((1, 7, 32, 300, 4096)),
            oversample=0 if depth else random.choice((0, 0, 1, per_step)),
            refill=random.choice((0, 0, 1, per_step)),
        ),
        group_size=size,
        steps=max(depth + 2, random.randint(500, 5000) // (size * per_step)),
        tasks=random.choice((3, 50, 400)),
        partial=random.random() < 0.5,
        drop_flat=size > 1 and random.random() < 0.5,
        least=random.randint(1, size),
        patience=Patience(group_s=random.choice((inf, 500.0)), step_s=random.choice((inf, inf, 200.0))),
        shape=Shape(seed=random.randrange(1000)),
        capacity=Capacity(slots=random.choice((4, 256, 4096))),
        turns=random.choice((0.0, 0.0, 2.0)),
        tools_s=random.choice((0.0, 60.0)),
        train_s=random.choice((0.0, 20.0, 300.0, 3000.0)),
        push_s=random.choice((0.0, 5.0)),
    )


class _World:
    """The parts of one run."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.result = setting, Result(setting=setting)
        self.oldest: dict[tuple[str, int], int] = {}
        self.rules = Rules(
            advantages=lambda rewards: rewards, least_group=setting.least, drop_flat_groups=setting.drop_flat
        )

    async def run(self) -> Result:
        """The training loop."""
        setting, loop = self.setting, asyncio.get_running_loop()
        self.engine = SharedEngine(setting.capacity)
        collector = self.collector()
        async with asyncio.TaskGroup() as group:
            collecting = group.create_task(collector.run())
            for version in range(setting.steps):
                self.count(await collector.step(version), version)
                await asyncio.sleep(setting.train_s)
                await self.engine.update(version + 1, setting.push_s, keep=setting.partial)
            self.result.seconds, self.result.sampled = loop.time(), self.engine.tokens
            collecting.cancel()
        return self.result

    def collector(self) -> Collector:
        setting = self.setting
        course = Course(Walk(), tasks(setting.tasks), group_size=setting.group_size, seed=0, rates=TaskRates())
        steps = range(setting.steps)
        return Collector(course, setting.window, self.trial, self.judge, steps=steps, patience=setting.patience)

    def judge(self, trajectories: Sequence[Trajectory]) -> str | None:
        """The run's own filters."""
        return judge(trajectories, Filters(), self.rules).drop

    def count(self, taken: StepGroups, step: int) -> None:
        """Takes a step's groups into the account, and holds each trained trial against the bound."""
        result, bound = self.result, self.setting.window.staleness
        assert len(taken.groups) == self.setting.window.groups_per_step, f"step {step} has an odd number of slots"
        for group in (*taken.groups, *taken.replaced):
            result.cut += sum(t.outcome is Outcome.CANCELLED for t in group.trajectories)
            if group.drop is not None:
                result.dropped[str(group.drop)] += 1
            for trajectory in group.trajectories:
                oldest = self.oldest.pop((trajectory.task, trajectory.attempt), None)
                if group.drop is None and trajectory.reward is not None:
                    assert oldest is not None and step - oldest <= bound, f"step {step} trains version {oldest}"
                    result.staleness[step - oldest] += 1
                    result.trained += 1

    async def trial(self, attempt: Attempt, cut: Cut, *, version: int) -> Trajectory:
        """Turns of an answer and its tools, each of the same size, until the trial's work is done."""
        self.result.started += 1
        assert self.engine.version >= version, "a trial was promised weights that the engine does not have yet"
        try:
            async with cut.limit():
                await self._turns(attempt)
        except TimeoutError:
            return self._record(attempt, version, Outcome.CANCELLED, detail=cut.cause)
        solved = self.setting.shape.solved(attempt.task.id, attempt.number)
        return self._record(attempt, version, Outcome.SOLVED if solved else Outcome.FAILED)

    async def _turns(self, attempt: Attempt) -> None:
        setting, key = self.setting, (attempt.task.id, attempt.number)
        work = setting.shape.work(*key)
        turns = max(1, round(work * setting.turns))
        for _ in range(turns):
            span = await self.engine.answer(setting.tokens * work / turns)
            self.oldest.setdefault(key, span.first)
            if setting.tools_s:
                await asyncio.sleep(setting.tools_s * work / turns)

    def _record(self, attempt: Attempt, version: int, outcome: Outcome, detail: str = "") -> Trajectory:
        reward = {Outcome.SOLVED: 1.0, Outcome.FAILED: 0.0}.get(outcome)
        return Trajectory(
            task=attempt.task.id,
            attempt=attempt.number,
            split="train",
            version=version,
            outcome=outcome,
            reward=reward,
            segments=(),
            fidelity=UNTOLD,
            detail=detail,
            group=attempt.group,
        )
