"""The loop loses nothing and counts nothing twice, whatever dies when; validation and training go on side by side."""

import asyncio
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from lego.engine.pool import EnginePool
from lego.journal import Journal
from tests import loop_driver
from tests.loop_driver import Pool, Trainer, Trials, recipe

KILLED = 9
MOST_LIVES = 60


def live(folder: Path, die_after: int, fields: dict[str, int]) -> int:
    words = [f"{name}={value}" for name, value in fields.items()]
    command = [sys.executable, "-m", "tests.loop_driver", str(folder), str(die_after), *words]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode in (0, KILLED), found.stderr
    return found.returncode


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _trial(row: dict) -> tuple:
    return row["task"], row["attempt"], row["group"], row["measurement"]


def trained(folder: Path) -> Counter[str]:
    """How often each trial was trained, with its advantage."""
    return Counter(name for step in json.loads((folder / "trained.json").read_text()) for name in step)


SETTINGS = [
    {"staleness": 0},
    {"staleness": 1, "every": 1},
    {"staleness": 2, "every": 2, "groups": 2, "steps": 5, "direct": 1},
]


@pytest.mark.parametrize("fields", SETTINGS, ids=lambda fields: "-".join(f"{k}{v}" for k, v in fields.items()))
def test_a_run_killed_again_and_again_trains_what_an_unkilled_one_does(tmp_path: Path, fields: dict[str, int]):
    assert live(tmp_path / "whole", 0, fields) == 0
    chance = random.Random(str(fields))
    lives = 0
    while live(tmp_path / "killed", chance.randrange(5, 16), fields) == KILLED:
        lives += 1
        assert lives < MOST_LIVES
    assert lives > 1, "nothing was killed"
    steps = fields.get("steps", 4)
    assert trained(tmp_path / "killed") == trained(tmp_path / "whole")
    assert max(trained(tmp_path / "whole").values()) == 1
    assert [row["step"] for row in lines(tmp_path / "killed/metrics.jsonl")] == list(range(steps))
    assert Journal(tmp_path / "killed").past.done == steps
    rows = [Counter(map(_trial, lines(tmp_path / run / "trials.jsonl"))) for run in ("whole", "killed")]
    assert rows[0] == rows[1]
    whole, killed = (json.loads((tmp_path / run / "summary.json").read_text()) for run in ("whole", "killed"))
    for name in ("trials", "tokens", "outcomes", "solve_start", "solve_end"):
        assert killed[name] == whole[name], name


def test_curves_of_a_killed_run_have_each_step_once(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for die_after in (20, 7, 5, 0):
        live(tmp_path, die_after, {"staleness": 1})
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [e.step for e in read.Scalars("rollout/solve_rate")] == [0, 1, 2, 3]


def test_s07_refilled_groups_are_neither_trained_nor_run_twice_after_a_kill(tmp_path: Path):
    fields = {"staleness": 1, "refill": 2, "steps": 6}
    for die_after in (12, 15, 9, 21, 0):
        if live(tmp_path, die_after, fields) == 0:
            break
    past = Journal(tmp_path).past
    used = [group for step in past.steps for group in step]
    assert past.finished and len(past.steps) == 6 and len(used) == len(set(used)) == 18
    assert any(ended.replaced for ended in past.ended.values()), "nothing was refilled"
    assert not {group for group, ended in past.ended.items() if ended.replaced} & set(used)
    assert max(trained(tmp_path).values()) == 1
    assert (
        max(Counter((t["group"], t["attempt"]) for t in lines(tmp_path / "trials.jsonl") if t["group"]).values()) == 1
    )


async def opened(tmp_path: Path, pool: Pool, trials: Trials, trainer: Trainer, **fields: int) -> None:
    journal = Journal(tmp_path)
    if not journal.past.identity:
        journal.run({"test": 1})
    await loop_driver.live(recipe(**fields), tmp_path, journal, pool, trials, trainer)


async def test_s01_validation_slower_than_two_steps_holds_nothing_up(tmp_path: Path):
    pool, trainer = Pool(), Trainer(tmp_path)
    trials = Trials(pool)

    class Slow(Trials):
        async def run(self, attempt, cut, *, version):
            await asyncio.sleep(0.1)
            return await super().run(attempt, cut, version=version)

    quick, loop_driver.Trials = loop_driver.Trials, Slow
    try:
        async with asyncio.timeout(30):
            await opened(tmp_path, pool, trials, trainer, steps=10, validate=2)
    finally:
        loop_driver.Trials = quick
    assert pool.updates == list(range(1, 11)) and Journal(tmp_path).past.done == 10
    told = [e for e in lines(tmp_path / "events.jsonl") if e["kind"] in ("measured", "validation_skipped")]
    during = [e for e in told if e.get("moment", "").startswith("step-")]
    assert during and all(e["version"] == int(e["moment"].removeprefix("step-")) in pool.pins for e in during)
    skipped = [e["version"] for e in told if e["kind"] == "validation_skipped"]
    assert sorted(skipped + [e["version"] for e in during]) == [2, 4, 6, 8]
    rows = [t for t in lines(tmp_path / "trials.jsonl") if t["measurement"].startswith("step-")]
    assert all(f"step-{row['version']}/heldout" == row["measurement"] for row in rows)


async def test_what_too_few_trials_came_to_is_an_alarm_and_no_solve_rate(tmp_path: Path):
    class Broken(Trials):
        async def run(self, attempt, cut, *, version):
            found = await super().run(attempt, cut, version=version)
            if attempt.group is None and attempt.number == 0:
                return self._of(attempt, version, loop_driver.unscored(attempt.task.id))
            return found

    pool, trainer = Pool(), Trainer(tmp_path)
    await opened(tmp_path, pool, Broken(pool), trainer, steps=1, groups=7)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["solve_start"]["heldout"] is None and summary["solve_start"]["train"] is not None
    alarms = [e["what"] for e in lines(tmp_path / "events.jsonl") if e["kind"] == "alarm"]
    assert any("heldout at start" in alarm for alarm in alarms)


async def test_an_interrupted_run_saves_what_it_learned_and_goes_on(tmp_path: Path):
    pool, trainer = Pool(), Trainer(tmp_path)
    running = asyncio.create_task(opened(tmp_path, pool, Trials(pool, pace_s=0.02), trainer, steps=50))
    while pool.version < 3:  # noqa: ASYNC110 - the double tells nobody
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    done = Journal(tmp_path).past.done
    assert (tmp_path / f"checkpoints/step-{done:06d}/trained.json").exists()
    pool, trainer = Pool(), Trainer(tmp_path)
    await opened(tmp_path, pool, Trials(pool), trainer, steps=done + 2)
    assert pool.updates == [done, done + 1, done + 2]
    assert Journal(tmp_path).past.done == done + 2
    assert max(Counter(name for step in trainer.trained for name in step).values()) == 1


async def test_a_bug_in_a_trial_stops_the_run_and_is_not_hidden(tmp_path: Path):
    class Buggy(Trials):
        async def run(self, attempt, cut, *, version):
            if attempt.group == 4:
                raise ZeroDivisionError
            return await super().run(attempt, cut, version=version)

    pool = Pool()
    with pytest.raises(ExceptionGroup) as caught:
        await opened(tmp_path, pool, Buggy(pool), Trainer(tmp_path))
    assert caught.group_contains(ZeroDivisionError)
    await opened(tmp_path, Pool(), Trials(Pool()), Trainer(tmp_path))


def test_the_double_of_the_pool_has_what_the_loop_uses():
    for name in ("update", "usage", "pinned", "version"):
        assert hasattr(EnginePool, name)
