"""The training loop: sample, judge, credit, train, push, and again.

Sampling may run `rollout.staleness` steps ahead of training; at 0 the two take turns.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lego import sabotage
from lego.capture.session import CANCELLED, SIDE_REQUEST
from lego.engine.base import Engine
from lego.errors import GateError
from lego.learn.advantages import advantages
from lego.learn.algorithms import warnings
from lego.learn.client import Trainer
from lego.learn.report import StepReport
from lego.observe.interval import Rate
from lego.observe.outputs import Outputs
from lego.recipe import Recipe
from lego.records import Sample, Trajectory
from lego.rollout.collect import (
    Attempt,
    Patience,
    attempts,
    collect,
    refuse_faulty,
    refuse_unscored,
    solved_and_asked,
    tasks_of_step,
)
from lego.rollout.credit import Credited, Rules, credit
from lego.rollout.trial import Trials
from lego.tasks.task import TaskSet

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A step's trials, and how long they took."""

    step: int
    trajectories: list[Trajectory]
    seconds: float


class Loop:
    """One run's opened parts, joined."""

    def __init__(
        self,
        recipe: Recipe,
        tasks: TaskSet,
        trials: Trials,
        engine: Engine,
        trainer: Trainer,
        out: Outputs,
        shared: Path,
        first: int = 0,
    ) -> None:
        """`shared` is where weights pass from trainer to engine, `first` the steps that the trainer has behind it."""
        self.recipe, self.tasks, self.trials, self.engine, self.trainer = recipe, tasks, trials, engine, trainer
        self.out, self.shared = out, shared
        self.per_step = min(recipe.rollout.tasks_per_step, len(tasks.train))
        self.version = self.first = first
        self._warned = False
        self._moved = asyncio.Condition()

    async def run(self) -> None:
        """Start measurement, all steps, end measurement."""
        recipe = self.recipe
        if self.first:
            await self._push(self.first)
        await self._measure("start")
        batches: asyncio.Queue[Batch] = asyncio.Queue(maxsize=recipe.rollout.staleness + 1)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._sample_all(batches))
            for _ in range(self.first, recipe.steps):
                await self._learn(await batches.get())
        await self._measure("end")

    async def _measure(self, moment: str) -> None:
        """Solve rates of training and held-out tasks; the first step stands in where it visits every task once."""
        validation = self.recipe.validation
        splits = {"heldout": (self.tasks.heldout, validation.heldout_attempts)}
        if moment == "end" or self.per_step != len(self.tasks.train):
            splits["train"] = (self.tasks.train, validation.train_attempts)
        for split, (tasks, each) in splits.items():
            self.out.view.phase(f"measure {split} at {moment}", len(tasks) * each)
            # No cuts: a rate without its slow trials would be of the quick ones.
            batch = await self._trials(attempts(tasks, each), -1, Patience())
            self.out.measured(moment, split, Rate(*solved_and_asked(batch.trajectories)), batch.seconds)

    async def _sample_all(self, batches: "asyncio.Queue[Batch]") -> None:
        rollout, times = self.recipe.rollout, self.recipe.budget.times(self.recipe.crew)
        patience = Patience(group_s=times.group_s, step_s=times.step_s)
        for step in range(self.first, self.recipe.steps):
            async with self._moved:
                await self._moved.wait_for(lambda step=step: self.version >= step - rollout.staleness)
            tasks = tasks_of_step(self.tasks.train, self.per_step, step, self.recipe.seed)
            self.out.view.phase(f"step {step}: trials", len(tasks) * rollout.group_size)
            await batches.put(await self._trials(attempts(tasks, rollout.group_size), step, patience))

    async def _trials(self, wanted: Sequence[Attempt], step: int, patience: Patience) -> Batch:
        start = time.monotonic()
        run = partial(self.trials.run, version=self.version)
        done = partial(self.out.trial, step)
        concurrency = self.recipe.rollout.concurrency
        trajectories = await collect(wanted, run, concurrency=concurrency, done=done, patience=patience)
        refuse_faulty(trajectories, self.recipe.fidelity.max_faults)
        refuse_unscored(trajectories, self.recipe.rollout.max_unscored)
        return Batch(step=step, trajectories=trajectories, seconds=time.monotonic() - start)

    async def _learn(self, batch: Batch) -> None:
        """One optimizer step on a batch, and its weights to the engine."""
        self._check_share(batch)
        credited = self._credit(batch)
        start = time.monotonic()
        report = await self._train(batch, credited) if credited.samples else None
        trained = time.monotonic()
        if report is not None:
            await self._push(batch.step + 1)
            self._warn(report)
        pushed = time.monotonic()
        async with self._moved:
            self.version = batch.step + 1
            self._moved.notify_all()
        seconds = {"trials": batch.seconds, "train": trained - start, "push": pushed - trained}
        self.out.step(batch.step, batch.trajectories, credited, report, seconds)
        every = self.recipe.checkpoints.every
        if every and self.version % every == 0 and self.version < self.recipe.steps:
            # The rate of the trials that these weights were made from; their own is not known yet.
            await self.trainer.save(self.version, {"solve_rate": Rate(*solved_and_asked(batch.trajectories)).value})

    def _warn(self, report: StepReport) -> None:
        """Says once what will likely go wrong with this algorithm on segments of this length."""
        length = report.tokens / report.segments
        for sentence in () if self._warned else warnings(self.recipe.algorithm, mean_length=length, k3=report.k3):
            log.warning(sentence)
            self.out.store.event("warning", what=sentence)
            self._warned = True

    def _credit(self, batch: Batch) -> Credited:
        algorithm = self.recipe.algorithm
        rules = Rules(
            advantages=partial(
                advantages,
                baseline=algorithm.baseline,
                scale=algorithm.scale,
                negative=self.recipe.credit.negative,
            ),
            shaped=algorithm.shaped,
            least_group=algorithm.least_group,
            drop_flat_groups=algorithm.drop_flat_groups,
        )
        return credit(batch.trajectories, rules)

    async def _train(self, batch: Batch, credited: Credited) -> StepReport:
        self.out.view.phase(f"training on {len(credited.samples)} segments")
        newest = all(trajectory.version == self.version for trajectory in batch.trajectories)
        return await self.trainer.step(self._sabotaged(credited.samples), self.recipe.fidelity, on_policy=newest)

    def _sabotaged(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        if self.recipe.sabotage == "shuffle_advantages":
            return sabotage.shuffle_advantages(samples, self.recipe.seed + self.version)
        if self.recipe.sabotage == "permute_replay":
            return sabotage.permute_replay(samples, self.recipe.seed + self.version)
        return samples

    async def _push(self, version: int) -> None:
        self.out.view.phase("new weights to the engine")
        path = self.shared / "weights.safetensors"
        await self.trainer.export(path)
        await self.engine.update(path, version)
        path.unlink()

    def _check_share(self, batch: Batch) -> None:
        """Every sampled token accounted for, and enough of them trainable."""
        sampled = sum(t.fidelity.sampled for t in batch.trajectories)
        trained = sum(t.fidelity.trained for t in batch.trajectories)
        excluded = sum(sum(t.fidelity.excluded.values()) for t in batch.trajectories)
        if sampled != trained + excluded:
            raise GateError(f"{sampled} tokens sampled, but {trained} trainable and {excluded} excluded")
        asides = (CANCELLED, SIDE_REQUEST)
        sampled -= sum(t.fidelity.excluded.get(cause, 0) for t in batch.trajectories for cause in asides)
        least = self.recipe.fidelity.min_trainable_share
        if sampled and trained < least * sampled:
            causes = [dict(t.fidelity.excluded) for t in batch.trajectories if t.fidelity.excluded]
            raise GateError(
                f"fidelity.min_trainable_share: {trained / sampled:.4f} of sampled tokens are trainable, "
                f"wanted {least}; first causes: {causes[:3]}"
            )
