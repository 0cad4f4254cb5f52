"""Solve rates: before and after training, and of held-out tasks meanwhile, each by one version of the weights."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial

from lego.engine.base import Engine, Pool
from lego.journal import Journal
from lego.observe.interval import Rate
from lego.observe.outputs import Outputs
from lego.recipe import Recipe
from lego.records import Trajectory
from lego.rollout.collect import collect, solved_and_asked
from lego.rollout.cuts import Cut
from lego.rollout.filters import refuse_faulty, refuse_unscored
from lego.rollout.plan import attempts
from lego.rollout.trial import Trials
from lego.tasks.task import Task, TaskSet

log = logging.getLogger(__name__)
OpenTrials = Callable[[Engine], AbstractAsyncContextManager[Trials]]
"""Trials whose model is this engine."""


@dataclass(frozen=True, kw_only=True)
class Validator:
    """Measures with a recipe's own numbers of trials; what its journal has is not measured again."""

    recipe: Recipe
    tasks: TaskSet
    pool: Pool
    open_trials: OpenTrials
    out: Outputs
    journal: Journal

    async def measure(self, moment: str, splits: Sequence[str], version: int) -> None:
        """Rates of all weights as they are; nothing else may be running.

        GateError when too many trials had no verdict, as in training.
        """
        async with self.open_trials(self.pool) as trials:
            for split in splits:
                tasks, each = self._asked(split)
                self.out.view.phase(f"measure {split} at {moment}", len(tasks) * each)
                start = time.monotonic()
                # No cuts: a rate without its slow trials would be of the quick ones.
                found = await self._trials(trials, tasks, each, f"{moment}/{split}", version, Cut())
                refuse_faulty(found, self.recipe.fidelity.max_faults)
                refuse_unscored(found, self.recipe.rollout.max_unscored)
                self._record(moment, split, version, found, time.monotonic() - start)

    def lacking(self, moment: str, splits: Sequence[str]) -> list[str]:
        """The splits that have tasks to measure, and neither a rate of that moment nor none for ever."""
        past = self.journal.past
        settled = past.measured.keys() | past.lost
        return [split for split in splits if (moment, split) not in settled and all(self._asked(split))]

    def is_due(self, version: int) -> bool:
        """Whether these weights are to be validated between start and end, and were not yet."""
        every = self.recipe.validation.every
        if not every or version % every or not self.journal.past.first < version < self.recipe.steps:
            return False
        return bool(self.lacking(f"step-{version}", ("heldout",)))

    def give_up(self, version: int) -> None:
        """Tells, once in a run, of each validation that is due for older weights than `version`, which are gone."""
        for lost in filter(self.is_due, range(self.journal.past.first + 1, version)):
            reason = f"it was not done when the run ended, which goes on from the checkpoint of version {version}"
            log.warning("version %d will have no validation: %s", lost, reason)
            self.out.store.event("validation_lost", version=lost, reason=reason)
            self.out.store.sync()
            self.journal.lost(f"step-{lost}", "heldout", reason)

    async def meanwhile(self, version: int, held: asyncio.Event) -> None:
        """The rate of held-out tasks by the weights as they are now, while training goes on with newer ones.

        `held` tells that newer ones may come. What is not done in its time is cut, and lacks in the coverage.
        """
        start, (tasks, each) = time.monotonic(), self._asked("heldout")
        async with self.pool.pinned() as pinned, self.open_trials(pinned) as trials:
            held.set()
            moment, seconds = f"step-{version}", self._timeout_s(len(tasks) * each)
            cut = Cut(
                at=asyncio.get_running_loop().time() + seconds, cause=f"longer than validation.timeout_s {seconds:g}"
            )
            found = await self._trials(trials, tasks, each, f"{moment}/heldout", version, cut)
        self._record(moment, "heldout", version, found, time.monotonic() - start)

    def _asked(self, split: str) -> tuple[Sequence[Task], int]:
        validation = self.recipe.validation
        if split == "train":
            return self.tasks.train, validation.train_attempts
        return self.tasks.heldout, validation.heldout_attempts

    def _timeout_s(self, trials: int) -> float:
        recipe = self.recipe
        rounds = math.ceil(trials / recipe.rollout.concurrency)
        return recipe.validation.timeout_s or rounds * recipe.budget.times(recipe.crew).trial_s

    async def _trials(
        self, trials: Trials, tasks: Sequence[Task], each: int, name: str, version: int, cut: Cut
    ) -> list[Trajectory]:
        return await collect(
            attempts(tasks, each),
            partial(trials.run, version=version),
            concurrency=self.recipe.rollout.concurrency,
            done=partial(self.out.trial, measurement=name),
            cut=cut,
        )

    def _record(self, moment: str, split: str, version: int, found: Sequence[Trajectory], seconds: float) -> None:
        """The rate, or an alarm: what was not scored is not unsolved."""
        rate = Rate(*solved_and_asked(found))
        coverage = rate.asked / len(found)
        if coverage < self.recipe.validation.min_coverage:
            told = f"{split} at {moment}: {rate.asked} of {len(found)} trials came to a result, so it has no solve rate"
            log.error("%s", told)
            self.out.store.event("alarm", what=told)
            rate = Rate(0, 0)
        self.out.measured(moment, split, rate, seconds, version=version, coverage=coverage)
        self.journal.measured(moment, split, rate)
