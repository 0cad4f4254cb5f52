"""A run of the real loop, collector, journal and run folder on a made-up engine, trainer and trials, which may die.

python -m tests.loop_driver FOLDER DIE_AFTER [FIELD=NUMBER ...]

Dies as by SIGKILL once DIE_AFTER lines were journaled in this life; 0 lets it live. At its end it leaves
`trained.json`: what the trainer's steps were made of. What a trial is like depends on its task and number alone.
"""

import asyncio
import json
import os
import random
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from lego.cli import load_recipe
from lego.engine.transfer import Broadcast
from lego.engine.usage import PoolUsage
from lego.journal import Journal
from lego.keeper import Keeper
from lego.learn.checkpoint_folder import Meta, find, latest, part_of, place, publish
from lego.loop import Loop, Parts
from lego.observe.account import Account
from lego.observe.memory import PeakMemory
from lego.observe.outputs import Outputs
from lego.observe.store import open_run
from lego.observe.terminal import View
from lego.recipe import Recipe
from lego.records import Outcome, Sample, Segment, Trajectory
from lego.resume import claimed, open_journal
from lego.rollout.cuts import Cut
from lego.rollout.plan import Attempt
from lego.rollout.stored import GROUPS, Stored
from lego.tasks.task import Script, Task, TaskSet
from lego.validation import Validator
from tests.factories import trajectory

DEMO = load_recipe(Path(__file__).parent.parent / "recipes" / "demo.py")


class Pool:
    """Engines that hold a version and sample nothing."""

    def __init__(self) -> None:
        self.version = 0
        self.updates: list[int] = []
        self.straight = 0
        """How many of them came straight from the trainer."""
        self.pins: list[int] = []

    async def update(self, weights: Path, version: int) -> None:
        assert weights.read_text() == str(version)
        self.updates.append(version)
        self.version = version

    async def update_from(self, source: "Trainer", version: int) -> None:
        self.straight += 1
        await self.update(await source.export(version), version)

    def usage(self) -> PoolUsage:
        return PoolUsage()

    @asynccontextmanager
    async def pinned(self) -> AsyncIterator["Pool"]:
        pinned = Pool()
        pinned.version = self.version
        self.pins.append(self.version)
        yield pinned


class Trainer:
    """Weights that are the list of what they were made of: for each step its samples."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.trained = folder, list[list[str]]()

    async def step(self, samples: Sequence[Sample], gates: object, *, on_policy: bool) -> Any:
        versions = {int(v) for s in samples for v in s.segment.versions_T[s.segment.mask_T]}
        assert not on_policy or len(versions) == 1
        self.trained.append(sorted(f"{s.trial} {s.advantage:.3f}" for s in samples))
        return Report()

    async def export(self, version: int) -> Path:
        path = self.folder / f"weights-{version % 2}"
        path.write_text(str(version))
        return path

    async def save(self, step: int, metrics: Mapping[str, float]) -> None:
        root = self.folder / "checkpoints"
        part = part_of(place(root, step))
        part.mkdir(parents=True, exist_ok=True)
        (part / "trained.json").write_text(json.dumps(self.trained))
        publish(place(root, step), Meta(step=step, model_type="none", layout={}, metrics=dict(metrics), critic=False))

    async def saved(self) -> None:
        pass

    def load(self, folder: Path) -> int:
        self.trained = json.loads((find(folder) / "trained.json").read_text())
        return int(find(folder).name.partition("-")[2])


class Report:
    """What a step of no network found."""

    tokens, segments, k3, pearson, routing_coverage = 100.0, 1, 0.0, 1.0, 1.0

    def metrics(self) -> dict[str, float]:
        return {"train/k3": 0.0, "train/pearson": 1.0, "train/routing_coverage": 1.0}

    def histograms(self) -> dict[str, Any]:
        return {}


class Trials:
    """Trials that take a while and are solved or not, by their names; `rates` are those of tasks."""

    def __init__(self, pool: Pool, pace_s: float = 0.003) -> None:
        self.pool, self.pace_s = pool, pace_s
        self.seen: list[tuple[str, int, int]] = []

    async def run(self, attempt: Attempt, cut: Cut, *, version: int) -> Trajectory:
        chance = random.Random(f"{attempt.task.id}/{attempt.number}")
        await asyncio.sleep(self.pace_s * chance.paretovariate(1.5))
        self.seen.append((attempt.task.id, attempt.number, self.pool.version))
        reward = float(chance.random() < 0.5)
        if chance.random() < 0.1:
            return self._of(attempt, version, unscored(attempt.task.id))
        return self._of(attempt, version, trajectory(attempt.task.id, reward))

    def _of(self, attempt: Attempt, version: int, one: Trajectory) -> Trajectory:
        sampled = tuple(self._sampled_by(s, self.pool.version) for s in one.segments)
        told = {"attempt": attempt.number, "version": version, "group": attempt.group, "segments": sampled}
        return replace(one, **told)

    @staticmethod
    def _sampled_by(one: Segment, version: int) -> Segment:
        versions = one.versions_T.copy()
        versions[one.mask_T] = version
        return replace(one, versions_T=versions)


def unscored(task: str) -> Trajectory:
    """A trial that its box spoiled."""
    return trajectory(task, None, outcome=Outcome.SANDBOX_ERROR)


class Dying(Journal):
    """A journal whose process is gone once it has so many more lines."""

    left = 0

    def _line(self, kind: str, **told: Any) -> None:
        super()._line(kind, **told)
        self.left -= 1
        if self.left == 0 and kind != "finish":  # else nobody could go on with it
            os._exit(9)


def tasks(train: int, heldout: int) -> TaskSet:
    def task(name: str, split: str) -> Task:
        return Task(
            id=name, package=name, split=split, digest=name, base=Path("/base"), instruction="do",
            verifier=Script(folder=Path("/tests"), timeout_s=1.0),
        )  # fmt: skip

    named = [task(f"train-{i}", "train") for i in range(train)]
    return TaskSet((*named, *(task(f"heldout-{i}", "heldout") for i in range(heldout))))


def recipe(
    *, steps: int = 4, groups: int = 3, staleness: int = 1, every: int = 0, refill: int = 0, **more: int
) -> Recipe:
    rollout = replace(
        DEMO.rollout, group_size=4, tasks_per_step=groups, staleness=staleness, refill=refill, concurrency=6
    )
    validation = replace(DEMO.validation, every=more.get("validate", 0), heldout_attempts=2)
    checkpoints = replace(DEMO.checkpoints, every=every)
    engine = replace(DEMO.engine, direct=Broadcast() if more.get("direct") else None)
    return replace(DEMO, steps=steps, rollout=rollout, validation=validation, checkpoints=checkpoints, engine=engine)


async def live(own: Recipe, folder: Path, journal: Journal, pool: Pool, trials: Trials, trainer: Trainer) -> None:
    """One life of a run, to its end."""
    with open_run(folder, journal.past.done) as store:
        out = Outputs(store=store, view=View("test", Console(file=StringIO())), account=Account(PeakMemory()))
        out.restore(folder, journal.past.measured, journal.past.done)
        start = latest(folder / "checkpoints")
        version = trainer.load(start) if start else 0

        @asynccontextmanager
        async def opened(engine: Any) -> AsyncIterator[Any]:
            yield trials if engine is pool else Trials(engine, trials.pace_s)

        taskset = tasks(7, 2)
        any_pool, any_trials, any_trainer = pool, trials, trainer
        validator = Validator(
            recipe=own, tasks=taskset, pool=any_pool, open_trials=opened, out=out, journal=journal,  # type: ignore
        )  # fmt: skip
        parts = Parts(
            recipe=own, tasks=taskset, trials=any_trials, engine=any_pool, trainer=any_trainer, validator=validator,  # type: ignore
            keeper=Keeper(journal, Stored(folder=folder / GROUPS), store), out=out, checkpoints=folder / "checkpoints",
        )  # fmt: skip
        await Loop(parts, version).run()
        await trainer.save(own.steps, {})
        store.document("summary.json", out.account.summary())
    journal.finish()


def main() -> None:
    folder, die_after, fields = Path(sys.argv[1]), int(sys.argv[2]), [word.split("=") for word in sys.argv[3:]]
    own = recipe(**{name: int(value) for name, value in fields})
    with claimed(folder):
        open_journal(folder, {"test": 1}, 0)
        journal = Dying(folder)
        journal.left = die_after
        trainer, pool = Trainer(folder), Pool()
        asyncio.run(live(own, folder, journal, pool, Trials(pool), trainer))
        assert pool.straight == (len(pool.updates) if own.engine.direct else 0), "weights came another way"
        (folder / "trained.json").write_text(json.dumps(trainer.trained))


if __name__ == "__main__":
    main()
