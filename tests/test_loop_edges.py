"""What a run's loop meets at its edges: interrupts at every moment, other numbers of steps, windows that drop all."""

import asyncio
import gc
import itertools
import random
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lego import loop
from lego.errors import TrainerError
from lego.journal import Journal
from lego.recipe import Recipe
from lego.resume import open_journal
from tests import loop_driver
from tests.factories import trajectory
from tests.loop_driver import Pool, Trainer, Trials, recipe
from tests.test_loop import lines


class Slow(Trainer):
    """A trainer that takes its time to save, and like the real one is broken once a command was cut short."""

    save_s, broken, saving = 0.05, False, False

    async def save(self, step: int, metrics: Any) -> None:
        if self.broken:
            raise TrainerError("an earlier command was cut short")
        self.broken = self.saving = True
        await asyncio.sleep(self.save_s)
        await super().save(step, metrics)
        self.broken = self.saving = False


async def live(
    folder: Path,
    own: Recipe,
    trials: Trials | None = None,
    trainer: Trainer | None = None,
    pool: Pool | None = None,
) -> Trainer:
    journal = Journal(folder)
    if not journal.past.identity:
        journal.run({"test": 1})
    pool = pool or Pool()
    trials, trainer = trials or Trials(pool), trainer or Trainer(folder)
    trials.pool = pool
    await loop_driver.live(own, folder, journal, pool, trials, trainer)
    return trainer


async def interrupted(running: "asyncio.Task[Any]", moment: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not moment():
            assert not running.done(), running.exception()
            await asyncio.sleep(0.002)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


class Hanging(Trials):
    """Trials of which the measured ones never end after the first step."""

    async def run(self, attempt, cut, *, version):
        if attempt.group is None and version:
            await asyncio.sleep(60)
        return await super().run(attempt, cut, version=version)


@pytest.mark.parametrize("validate", [0, 1])
async def test_an_interrupt_while_measuring_saves_the_steps_behind_it(tmp_path: Path, validate: int, monkeypatch):
    monkeypatch.setattr(loop_driver, "Trials", Hanging)  # those of a validation
    running = asyncio.create_task(live(tmp_path, recipe(steps=2, validate=validate), Hanging(Pool())))
    await interrupted(running, lambda: Journal(tmp_path).past.done == 2)
    assert saved(tmp_path) == ["step-000002"]


async def test_an_interrupt_while_saving_lets_the_checkpoint_become_whole(tmp_path: Path):
    trainer = Slow(tmp_path)
    running = asyncio.create_task(live(tmp_path, recipe(steps=20, every=2), trainer=trainer))
    await interrupted(running, lambda: trainer.saving)
    done = Journal(tmp_path).past.done
    assert saved(tmp_path) == [f"step-{done:06d}"]


async def test_a_validation_that_was_interrupted_is_made_by_the_next_life(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(loop_driver, "Trials", Hanging)
    pace = Trials(Pool(), pace_s=0.05)
    running = asyncio.create_task(live(tmp_path, recipe(steps=9, validate=2), pace))
    await interrupted(running, lambda: Journal(tmp_path).past.done == 2)
    monkeypatch.undo()
    await live(tmp_path, recipe(steps=3, validate=2))
    measured = [e["moment"] for e in lines(tmp_path / "events.jsonl") if e["kind"] == "measured"]
    assert "step-2" in measured


async def test_a_validation_that_was_cut_behind_a_checkpoint_is_told_once_as_lost(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(loop_driver, "Trials", Hanging)
    own, past = recipe(steps=9, validate=2), Journal(tmp_path).past
    for _ in range(2):
        least = past.done + 3
        running = asyncio.create_task(live(tmp_path, own, Trials(Pool(), pace_s=0.02)))
        await interrupted(running, lambda least=least: Journal(tmp_path).past.done >= least)
        past = Journal(tmp_path).past
        assert saved(tmp_path)[-1] == f"step-{past.done:06d}"
    monkeypatch.undo()
    await live(tmp_path, own)
    told = [e for e in lines(tmp_path / "events.jsonl") if e["kind"] in ("validation_lost", "measured")]
    lost = [e["version"] for e in told if e["kind"] == "validation_lost"]
    made = [e["version"] for e in told if e.get("moment", "").startswith("step-")]
    assert lost[0] == 2 and sorted(lost + made) == [2, 4, 6, 8]


class Died(Exception):
    """The end of a life."""


class Dying(Journal):
    left = 0

    def _line(self, kind: str, **told: Any) -> None:
        super()._line(kind, **told)
        self.left -= 1
        if self.left == 0:
            raise Died


@pytest.mark.parametrize("die_after", range(1, 34, 4))
async def test_what_is_measured_is_told_once_whenever_the_run_died(tmp_path: Path, die_after: int):
    own = recipe(steps=2, groups=7, staleness=0)
    for left in (die_after, 0):
        open_journal(tmp_path, {"test": 1}, 0)
        journal, pool = Dying(tmp_path), Pool()
        journal.left = left
        life = loop_driver.live(own, tmp_path, journal, pool, Trials(pool), Trainer(tmp_path))
        (end,) = await asyncio.gather(asyncio.create_task(life), return_exceptions=True)
        assert isinstance(end, Exception) == bool(left), end
    told = Counter((e["moment"], e["split"]) for e in lines(tmp_path / "events.jsonl") if e["kind"] == "measured")
    assert told == dict.fromkeys(itertools.product(("start", "end"), ("heldout", "train")), 1)
    rows = lines(tmp_path / "trials.jsonl")
    assert max(Counter((t["group"], t["attempt"], t["measurement"], t["task"]) for t in rows).values()) == 1


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_hundreds_of_trials_leave_no_trajectory_task_or_file_behind(tmp_path: Path):
    alive, most = 0, list[int]()

    def gone() -> None:
        nonlocal alive
        alive -= 1

    class Counted(Trials):
        async def run(self, attempt, cut, *, version):
            nonlocal alive
            trajectory = await super().run(attempt, cut, version=version)
            for one in trajectory.segments:
                alive += 1
                weakref.finalize(one.versions_T, gone)
            most.append(alive)
            return trajectory

    before = open_files(), asyncio.all_tasks()
    own = recipe(steps=20, groups=6, staleness=1, every=5)
    await live(tmp_path, own, Counted(Pool(), pace_s=0.0005))
    gc.collect()
    assert len(most) > 480 and alive == 0
    assert max(most[240:]) < 2 * max(most[100:240]), "more and more are kept"
    assert (open_files(), asyncio.all_tasks()) == before


class Flat(Trials):
    """All trials of the first tasks to come are solved, those of others by chance."""

    async def run(self, attempt, cut, *, version):
        one = await super().run(attempt, cut, version=version)
        return one if (attempt.group or 0) > 9 else self._of(attempt, version, trajectory(attempt.task.id, 1.0))


async def test_a_step_that_found_others_for_its_useless_groups_does_not_end_the_run(tmp_path: Path):
    own = recipe(steps=1, groups=2, staleness=0, refill=20)
    filters = replace(own.rollout.filters, useless_steps=4)
    await live(tmp_path, replace(own, rollout=replace(own.rollout, filters=filters)), Flat(Pool()))
    assert sum(ended.replaced for ended in Journal(tmp_path).past.ended.values()) >= 8


@pytest.mark.parametrize(("staleness", "oversample"), [(0, 2), (3, 0)])
async def test_whenever_a_run_dies_each_group_is_trained_once(tmp_path: Path, staleness: int, oversample: int):
    own = recipe(steps=4, groups=2, staleness=staleness, every=2)
    own = replace(own, rollout=replace(own.rollout, concurrency=2, oversample=oversample))
    chance, lives = random.Random(oversample), 0
    while not Journal(tmp_path).past.finished:
        lives += 1
        open_journal(tmp_path, {"test": 1}, 0)
        journal, pool = Dying(tmp_path), Pool()
        journal.left = chance.randrange(6, 14) if lives < 30 else 0
        life = loop_driver.live(own, tmp_path, journal, pool, Trials(pool), trainer := Trainer(tmp_path))
        await asyncio.gather(asyncio.create_task(life), return_exceptions=True)
    past = Journal(tmp_path).past
    used = [group for step in past.steps for group in step]
    assert lives > 2 and len(past.steps) == 4 and len(used) == len(set(used)) == 8
    assert max(Counter(name for step in trainer.trained for name in step).values()) == 1
    rows = [t for t in lines(tmp_path / "trials.jsonl") if t["group"] is not None]
    assert max(Counter((t["group"], t["attempt"]) for t in rows).values()) == 1


class One(Pool):
    """A pool of one replica: an update waits for the end of a pin."""

    def __init__(self) -> None:
        super().__init__()
        self.free = asyncio.Lock()

    async def update(self, weights: Path, version: int) -> None:
        async with self.free:
            await super().update(weights, version)

    @asynccontextmanager
    async def pinned(self) -> AsyncIterator[Pool]:
        async with self.free, super().pinned() as pinned:
            yield pinned


async def test_with_one_engine_validation_holds_steps_up_but_not_for_ever(tmp_path: Path):
    async with asyncio.timeout(30):
        await live(tmp_path, recipe(steps=4, validate=1), pool=One())
    measured = [e["version"] for e in lines(tmp_path / "events.jsonl") if e.get("moment", "").startswith("step-")]
    assert measured == [1, 2, 3]


async def test_an_interrupt_while_an_update_waits_for_a_validation_ends_the_run_soon(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(loop, "SAVE_S", 0.3)
    monkeypatch.setattr(loop_driver, "Trials", Hanging)
    pool = One()
    running = asyncio.create_task(live(tmp_path, recipe(steps=4, validate=1), Trials(pool), pool=pool))
    await interrupted(running, lambda: pool.free.locked() and (tmp_path / "weights-0").exists())
    monkeypatch.undo()
    trainer = await live(tmp_path, recipe(steps=4, validate=1))
    assert max(Counter(name for step in trainer.trained for name in step).values()) == 1
    assert len(trainer.trained) == len(lines(tmp_path / "metrics.jsonl")) == 4
