"""The training loop: groups, judged and credited, trained on, and new weights to the engine, step by step.

Sampling runs up to `rollout.staleness` steps ahead (docs/async.md). Each step is journaled, and those that a crash took
from the trainer are made again from the groups on the disk.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lego import sabotage
from lego.capture.session import CANCELLED, LEFT_OUT
from lego.engine.base import Pool
from lego.errors import GateError, TrainerError
from lego.keeper import Keeper
from lego.learn.advantages import advantages
from lego.learn.algorithms import warnings
from lego.learn.checkpoint_folder import latest, read_meta
from lego.learn.client import Trainer
from lego.learn.report import StepReport
from lego.observe.interval import Rate
from lego.observe.outputs import Outputs
from lego.recipe import Recipe
from lego.records import Sample, Trajectory
from lego.rollout.collect import SURPLUS, Collector, Group, StepGroups, solved_and_asked
from lego.rollout.credit import Rules, credit
from lego.rollout.curriculum import Course
from lego.rollout.cuts import Patience
from lego.rollout.filters import Judged, Streak, counts, judge, refuse_faulty, refuse_unscored, refuse_useless
from lego.rollout.trial import Trials
from lego.rollout.window import Window
from lego.structured import unhurried
from lego.tasks.task import TaskSet
from lego.validation import Validator

log = logging.getLogger(__name__)
SAVE_S = 14.0
"""What an interrupted run gives the step under way, and then once more the checkpoint after it."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """One run's opened parts."""

    recipe: Recipe
    tasks: TaskSet
    trials: Trials
    engine: Pool
    trainer: Trainer
    validator: Validator
    keeper: Keeper
    out: Outputs
    checkpoints: Path


class Loop:
    """Joins the parts of a run."""

    def __init__(self, parts: Parts, version: int) -> None:
        """`version` is that of the weights which the trainer holds: the steps behind them."""
        self.parts, self.recipe, self.out = parts, parts.recipe, parts.out
        self.version = self._saved = self._trained = version
        self.per_step = min(self.recipe.rollout.tasks_per_step, len(parts.tasks.train))
        self.rules = self._rules()
        self._streak = Streak()
        self._warned = False
        self._validating: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Start measurement, all steps, end measurement."""
        self.parts.validator.give_up(self.version)
        await self._catch_up()
        if self.version or self.recipe.engine.urls:  # servers that we did not start may hold anything
            await self._push(self.version)
        if splits := self.parts.validator.lacking("start", self._measured_at_start()):
            await self.parts.validator.measure("start", splits, self.version)
        async with self._saved_if_cut():
            await self._train_on()
            if splits := self.parts.validator.lacking("end", ("heldout", "train")):
                await self.parts.validator.measure("end", splits, self.version)

    def _measured_at_start(self) -> tuple[str, ...]:
        """The first step stands in for training tasks where it visits each of them once, with the measured harness."""
        recipe, train = self.recipe, self.parts.tasks.train
        own = (None, recipe.measured_harness.name)
        same = len(recipe.harnesses) == 1 and all(task.harness in own for task in train)
        return ("heldout",) if same and self.per_step == len(train) else ("heldout", "train")

    async def _catch_up(self) -> None:
        """Makes the steps again that are done, but were in no checkpoint, on the groups that they were done with."""
        done = self.parts.keeper.journal.past.done
        for step in range(self.version, done):
            self.out.view.phase(f"step {step} once more, of {done} behind us")
            groups = await asyncio.to_thread(self.parts.keeper.taken, step)
            credited = credit([one.kept for one in self._judged(groups, step)], self.rules)
            await self._train(step, credited.samples, on_policy=False)
            self.version = step + 1
            if self.version < done and self.parts.validator.is_due(self.version):
                await self._push(self.version)
                await self.parts.validator.meanwhile(self.version, asyncio.Event())

    async def _train_on(self) -> None:
        """The steps that are left, while groups are sampled."""
        if self.version >= self.recipe.steps:
            return
        collector = self._collector()
        async with asyncio.TaskGroup() as group:
            beside = [group.create_task(collector.run()), group.create_task(self.parts.keeper.run())]
            await self._validate(group)  # if an earlier life did not come to it
            for step in range(self.version, self.recipe.steps):
                await self._step(step, collector, group)
            if self._validating is not None:
                await self._validating
            for task in beside:
                task.cancel()

    async def _step(self, step: int, collector: Collector, group: asyncio.TaskGroup) -> None:
        recipe = self.recipe
        self.out.view.phase(f"step {step}: trials", self.per_step * recipe.rollout.group_size)
        taken = await collector.step(step)
        await unhurried(self._learn(taken), SAVE_S)
        if recipe.checkpoints.every and self.version % recipe.checkpoints.every == 0 and self.version < recipe.steps:
            # The rate of the trials that these weights were made from; their own is not known yet.
            await unhurried(self._save({"solve_rate": _rate(_all(taken)).value}), SAVE_S)
        if (whole := latest(self.parts.checkpoints)) is not None:
            await self.parts.keeper.learned(read_meta(whole).step)
        await self._validate(group)

    async def _learn(self, taken: StepGroups) -> None:
        """One optimizer step on a step's groups, and its weights to the engine."""
        trials = _all(taken)
        self._refuse(trials)
        judged = self._judged(taken.groups, taken.step)
        # Those that were replaced first: a step that trains on others after them is of use.
        self._refuse_useless([*(self._judge(g.trajectories) for g in taken.replaced if g.drop != SURPLUS), *judged])
        credited = credit([one.kept for one in judged], self.rules)
        start, newest = time.monotonic(), _newest(judged, taken.step)
        report = await self._train(taken.step, credited.samples, on_policy=newest)
        trained = time.monotonic()
        await self._push(taken.step + 1)
        seconds = {"trials": taken.waited_s, "train": trained - start, "push": time.monotonic() - trained}
        more = {**_numbers(taken), **counts(judged), **self.parts.engine.usage().metrics()}
        more |= {"rollout/on_policy": float(newest)}
        self.out.step(taken.step, trials, credited, report, seconds, more)
        self._measure_start(taken.step, trials)
        await self.parts.keeper.step(taken)
        self.version = taken.step + 1

    def _measure_start(self, step: int, trials: Sequence[Trajectory]) -> None:
        past = self.parts.keeper.journal.past
        told = "train" in self._measured_at_start() or ("start", "train") in past.measured
        if step == past.first and not told:
            self.out.measured("start", "train", _rate(trials), 0.0, version=step)
            self.parts.keeper.journal.measured("start", "train", _rate(trials))

    async def _validate(self, group: asyncio.TaskGroup) -> None:
        """Begins to validate the newest weights if they are due; the next step goes on as soon as they are held."""
        if not self.parts.validator.is_due(self.version):
            return
        if self._validating is not None and not self._validating.done():
            self.out.store.event("validation_skipped", version=self.version)
            log.warning("version %d is not validated: the validation before it still runs", self.version)
            return
        held = asyncio.Event()
        self._validating = group.create_task(self.parts.validator.meanwhile(self.version, held))
        await held.wait()

    async def _save(self, metrics: Mapping[str, float]) -> None:
        await self.parts.trainer.save(self.version, metrics)
        self._saved = self.version

    @asynccontextmanager
    async def _saved_if_cut(self) -> AsyncIterator[None]:
        """A checkpoint of what was learned if this is cut short; without one the next start learns it again."""
        try:
            yield
        except (asyncio.CancelledError, BaseExceptionGroup):
            if self.version == self._trained:
                await self._save_at_once()
            raise

    async def _save_at_once(self) -> None:
        self.out.view.phase("saving")
        try:
            async with asyncio.timeout(SAVE_S):
                if self.version != self._saved:
                    await self._save({})
                await self.parts.trainer.saved()
        except (TimeoutError, TrainerError) as error:
            log.warning("no checkpoint of version %d: %s; its steps will be made again", self.version, error)

    def _collector(self) -> Collector:
        recipe, keeper, rollout = self.recipe, self.parts.keeper, self.recipe.rollout
        train = {task.id: task for task in self.parts.tasks.train}
        left, times = keeper.left(train, rollout.group_size), recipe.budget.times(recipe.crew)
        course = Course(
            rollout.curriculum,
            self.parts.tasks.train,
            group_size=rollout.group_size,
            seed=recipe.seed,
            rates=left.rates,
            first=left.first,
            again=left.again,
        )

        def end(group: Group) -> None:
            keeper.end(group)
            course.rates.finished(group.task, *solved_and_asked(group.trajectories))

        return Collector(
            course,
            Window(
                groups_per_step=self.per_step,
                staleness=rollout.staleness,
                concurrency=rollout.concurrency,
                oversample=rollout.oversample,
                refill=rollout.refill,
            ),
            self.parts.trials.run,
            self._why_dropped,
            steps=range(self.version, recipe.steps),
            patience=Patience(group_s=times.group_s, step_s=times.step_s),
            on_start=keeper.begin,
            on_trial=self.out.trial,
            on_group=end,
            ready=left.ready,
        )

    def _judge(self, trajectories: Sequence[Trajectory], oldest: int = 0) -> Judged:
        return judge(trajectories, self.recipe.rollout.filters, self.rules, oldest=oldest)

    def _why_dropped(self, trajectories: Sequence[Trajectory]) -> str | None:
        drop = self._judge(trajectories).drop
        return None if drop is None else drop.value

    def _judged(self, groups: Sequence[Group], step: int) -> list[Judged]:
        """What a step trains on of each of its groups: by then, tokens may be too old."""
        oldest = step - self.recipe.rollout.staleness
        return [self._judge(group.trajectories, oldest) for group in groups]

    def _refuse(self, trials: Sequence[Trajectory]) -> None:
        refuse_faulty(trials, self.recipe.fidelity.max_faults)
        refuse_unscored(trials, self.recipe.rollout.max_unscored)
        self._check_share(trials)

    def _refuse_useless(self, judged: Sequence[Judged]) -> None:
        for one in judged:
            self._streak = self._streak.after(one)
        refuse_useless(self._streak, per_step=self.per_step, steps=self.recipe.rollout.filters.useless_steps)

    def _warn(self, report: StepReport) -> None:
        """Says once what will likely go wrong with this algorithm on segments of this length."""
        length = report.tokens / report.segments
        for sentence in () if self._warned else warnings(self.recipe.algorithm, mean_length=length, k3=report.k3):
            log.warning(sentence)
            self.out.store.event("warning", what=sentence)
            self._warned = True

    def _rules(self) -> Rules:
        algorithm, own = self.recipe.algorithm, self.recipe.credit
        return Rules(
            advantages=partial(advantages, baseline=algorithm.baseline, scale=algorithm.scale, negative=own.negative),
            shaped=algorithm.shaped,
            least_group=algorithm.least_group,
            drop_flat_groups=algorithm.drop_flat_groups,
            spread=own.spread,
            subagent_share=own.subagent_share,
        )

    async def _train(self, step: int, samples: Sequence[Sample], *, on_policy: bool) -> StepReport | None:
        """One optimizer step; None where there is nothing to train on."""
        self._trained = step + 1
        if not samples:
            return None
        self.out.view.phase(f"step {step}: training on {len(samples)} segments")
        samples = self._sabotaged(step, samples)
        report = await self.parts.trainer.step(samples, self.recipe.fidelity, on_policy=on_policy)
        self._warn(report)
        return report

    def _sabotaged(self, step: int, samples: Sequence[Sample]) -> Sequence[Sample]:
        if self.recipe.sabotage == "shuffle_advantages":
            return sabotage.shuffle_advantages(samples, self.recipe.seed + step)
        if self.recipe.sabotage == "permute_replay":
            return sabotage.permute_replay(samples, self.recipe.seed + step)
        return samples

    async def _push(self, version: int) -> None:
        """Also where nothing was trained: tokens carry the number of the step that may train on them."""
        self.out.view.phase("new weights to the engine")
        engine, trainer = self.parts.engine, self.parts.trainer
        if self.recipe.engine.direct is None:
            await engine.update(await trainer.export(version), version)
        else:
            await engine.update_from(trainer, version)

    def _check_share(self, trials: Sequence[Trajectory]) -> None:
        """Every sampled token accounted for, and enough of them trainable."""
        sampled = sum(t.fidelity.sampled for t in trials)
        trained = sum(t.fidelity.trained for t in trials)
        excluded = sum(sum(t.fidelity.excluded.values()) for t in trials)
        if sampled != trained + excluded:
            raise GateError(f"{sampled} tokens sampled, but {trained} trainable and {excluded} excluded")
        asides = (CANCELLED, *LEFT_OUT.values())
        sampled -= sum(t.fidelity.excluded.get(cause, 0) for t in trials for cause in asides)
        least = self.recipe.fidelity.min_trainable_share
        if sampled and trained < least * sampled:
            causes = [dict(t.fidelity.excluded) for t in trials if t.fidelity.excluded]
            raise GateError(
                f"fidelity.min_trainable_share: {trained / sampled:.4f} of sampled tokens are trainable, "
                f"wanted {least}; first causes: {causes[:3]}"
            )


def _all(taken: StepGroups) -> list[Trajectory]:
    """The trials of a step's groups, and of those that others took the place of because of what they are."""
    groups = [group for group in (*taken.groups, *taken.replaced) if group.drop != SURPLUS]
    return [trajectory for group in groups for trajectory in group.trajectories]


def _rate(trials: Sequence[Trajectory]) -> Rate:
    return Rate(*solved_and_asked(trials))


def _newest(judged: Sequence[Judged], version: int) -> bool:
    """Whether these weights sampled all that is trained."""
    segments = [segment for one in judged for trajectory in one.kept for segment in trajectory.segments]
    return all((segment.versions_T[segment.mask_T] == version).all() for segment in segments)


def _numbers(taken: StepGroups) -> Mapping[str, float]:
    """How old the step's groups are, and how many found no slot."""
    ages = [taken.step - group.version for group in taken.groups]
    return {
        "rollout/groups": sum(group.drop is None for group in taken.groups),
        "rollout/replaced_groups": len(taken.replaced),
        "rollout/staleness_max": max(ages, default=0),
        "rollout/staleness_mean": sum(ages) / len(ages) if ages else 0.0,
    }
