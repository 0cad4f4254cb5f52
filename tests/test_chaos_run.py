"""A real run, each of whose parts dies, stalls or loses its connections at random moments, is exact at its end."""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest

from lego.errors import TrainerError
from lego.journal import FILE, Ended, Journal, Past, read
from lego.observe.store import open_run
from lego.records import SCORED, Outcome, Trajectory
from lego.resume import SESSIONS, open_journal
from lego.rollout.cuts import Cut
from lego.rollout.plan import Attempt
from tests import blows, loop_driver
from tests.factories import trajectory
from tests.test_endings import ROOT, left_behind
from tests.test_loop import opened

STEPS, TASKS, GROUP, STALENESS = 4, 4, 4, 1
MOST_S = 360.0
"""Wall seconds that the whole may take."""
SPOILED = {Outcome.HARNESS_ERROR, Outcome.SANDBOX_ERROR, Outcome.ENGINE_ERROR, Outcome.VERIFIER_ERROR}
IN_ONE_LIFE: dict[str, tuple[Callable[[int], bool], int]] = {
    "harness killed": (blows.killed(blows.agents), 3),
    "box killed": (blows.killed(blows.boxes), 3),
    "harness's connection dropped": (blows.drop_agent, 3),
    "engine's connections dropped": (blows.drop_engine, 3),
    "engine stands still": (blows.stall_engine, 1),
    "engine killed": (blows.killed(blows.servers), 1),
}
"""What a run survives, with how often it is done."""
DEADLY: dict[str, tuple[Callable[[int], bool], int]] = {
    "trainer rank killed": (blows.killed(blows.ranks), 1),
    "driver killed": (blows.kill_driver, 1),
}
"""What ends a life of the run."""
EVERY = IN_ONE_LIFE | DEADLY


@dataclass
class Lives:
    """One run, started again by the same command as often as it dies."""

    folder: Path
    cache: Path
    deadline: float
    process: subprocess.Popen[bytes] | None = None
    drivers: list[int] = field(default_factory=list)
    seen: set[psutil.Process] = field(default_factory=set)
    """All processes that were ever found below a driver."""
    struck: list[str] = field(default_factory=list)
    """What was done to it, and when."""

    def driver(self) -> int:
        """The process id of the life that runs now."""
        if self.process is None:
            (self.folder / "tmp").mkdir(exist_ok=True)
            env = os.environ | {"TMPDIR": str(self.folder / "tmp")}
            with (self.folder / f"said-{len(self.drivers)}").open("wb") as said:
                self.process = subprocess.Popen(
                    command(self.folder, self.cache), cwd=ROOT, env=env, stdout=said, stderr=said
                )
            self.drivers.append(self.process.pid)
        return self.process.pid

    def ended(self, statuses: set[int]) -> None:
        """Waits for the end of this life, by one of these statuses."""
        self.until(lambda: self.status() is not None)
        assert self.status() in statuses, self.told()
        self.process = None

    def status(self) -> int | None:
        return None if self.process is None else self.process.poll()

    def until(self, condition: Callable[[], bool]) -> None:
        """Looks at the run again and again, until something holds; starts it again if it ended with an error."""
        while not condition():
            self.seen.update(blows.tree(self.driver()))
            assert time.monotonic() < self.deadline, f"not within {MOST_S:g} s: {self.told()}"
            if self.status() is not None and not condition():
                self.gave_up()
            time.sleep(0.1)

    def gave_up(self) -> None:
        """It may, where an engine dies too often. But not without a word, or by a bug."""
        told = self.told()
        assert self.status() == 1 and "error: " in told and "Traceback" not in told, told
        self.struck.append("    and the run gave up")
        self.process = None

    def trials(self) -> int:
        """Lines of trials so far."""
        file = self.folder / "run/trials.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def after(self, trials: int) -> None:
        """Waits until trials run, and so many more have ended."""
        self.until(lambda: bool(blows.agents(self.driver())))
        first = self.trials()
        self.until(lambda: self.trials() >= first + trials)

    def strike(self, name: str) -> None:
        """Does one thing to it while trials run; waits for the end of this life if that is deadly."""
        blow, _ = EVERY[name]
        self.until(lambda: bool(blows.agents(self.driver())) and blow(self.driver()))
        self.struck.append(f"{time.monotonic() - self.deadline + MOST_S:.0f} s: {name}")
        if name in DEADLY:
            self.ended({-9, 1})

    def told(self) -> str:
        """What was done to the run, and the last words of its newest life."""
        said = (self.folder / f"said-{len(self.drivers) - 1}").read_text(errors="replace")
        return "\n".join([*self.struck, said])


def command(folder: Path, cache: Path) -> list[str]:
    """The same in each life."""
    flags = {
        "--run-dir": folder / "run",
        "--cache": cache,
        "--sandbox.state": folder / "boxes",
        "--steps": STEPS,
        "--budget.harness-s": 240,  # a call waits for an engine that starts again, for half of it
        "--fidelity.min-trainable-share": 0.9,  # answers that a broken connection did not deliver
        "--rollout.tasks-per-step": TASKS,
        "--rollout.group-size": GROUP,
        "--rollout.staleness": STALENESS,
        "--checkpoints.every": 2,
        "--validation.every": 2,
        "--validation.heldout-attempts": 1,
        "--validation.train-attempts": 1,
    }
    words = [str(word) for flag in flags.items() for word in flag]
    return [sys.executable, "-m", "lego.train", "recipes/demo.py", *words]


def plan(chance: random.Random) -> list[tuple[str, int]]:
    """Which blow comes when: after how many trials since the one before."""
    names = [name for name, (_, times) in EVERY.items() for _ in range(times)]
    chance.shuffle(names)
    return [(name, chance.randrange(6)) for name in names]


@pytest.mark.harness
def test_a_run_of_real_parts_that_die_at_random_is_exact_at_its_end(tmp_path: Path, fetched_cache: Path):
    lives = Lives(tmp_path, fetched_cache, time.monotonic() + MOST_S)
    try:
        live_through(lives, random.Random(7))
    finally:
        if lives.process is not None:
            lives.process.kill()
            lives.process.wait()
    check_account(tmp_path / "run")
    check_curves(tmp_path / "run")
    assert [one for one in lives.seen if blows.alive(one)] == []
    assert [x for driver in lives.drivers for x in left_behind(driver, str(tmp_path), tmp_path / "boxes")] == []


def live_through(lives: Lives, chance: random.Random) -> None:
    """A death while engine and trainer start, all blows of the plan, a death after the last step and before its
    checkpoint, and a life to the end."""
    lives.driver()
    time.sleep(chance.uniform(1, 12))
    assert blows.kill_driver(lives.driver())
    lives.ended({-9})
    for name, trials in plan(chance):
        lives.after(trials)
        time.sleep(chance.random())
        lives.strike(name)
    lives.until(lambda: read(lives.folder / "run" / FILE).done == STEPS)
    lives.strike("driver killed")
    lives.driver()
    lives.ended({0})
    assert "once more" in lives.told(), "no step was made again"


async def test_a_validation_that_a_death_cut_is_of_the_weights_that_it_was_due_for(tmp_path: Path):
    class Endless(loop_driver.Trials):
        async def run(self, attempt: Attempt, cut: Cut, *, version: int) -> Trajectory:
            if attempt.group is None and version:
                await asyncio.sleep(60)
            return await super().run(attempt, cut, version=version)

    class Full(loop_driver.Trainer):
        async def save(self, step: int, metrics: Mapping[str, float]) -> None:
            raise TrainerError("no room")

    pool = loop_driver.Pool()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_driver, "Trials", Endless)
        first = asyncio.create_task(opened(tmp_path, pool, Endless(pool), Full(tmp_path), steps=5, validate=2))
        while Journal(tmp_path).past.done < 3:  # noqa: ASYNC110 - the double tells nobody
            await asyncio.sleep(0.02)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
    past = Journal(tmp_path).past
    assert ("step-2", "heldout") not in past.measured
    again = loop_driver.Pool()
    await opened(tmp_path, again, loop_driver.Trials(again), loop_driver.Trainer(tmp_path), steps=5, validate=2)
    assert ("step-2", "heldout") in Journal(tmp_path).past.measured
    assert again.pins[0] == 2 and again.updates == [2, *range(past.done, 6)]


def test_session_files_of_trials_that_run_again_are_taken_out(tmp_path: Path):
    journal = open_journal(tmp_path, {"a": 1}, 0)
    sessions = tmp_path / SESSIONS
    sessions.mkdir()
    with open_run(tmp_path) as store:
        for group in (0, 1):
            store.trial(replace(trajectory("t", 1.0), group=group, recording=f"{group}.npz"))
            (sessions / f"{group}.npz").touch()
    (sessions / "of-no-line.npz").touch()
    journal.begin(0, "t", 0, version=0)
    journal.end(0, Ended(version=0, drop=None, solved=1, asked=1, replaced=False))
    journal.begin(1, "t", 1, version=0)
    open_journal(tmp_path, {"a": 1}, 0)
    assert [path.name for path in sessions.iterdir()] == ["0.npz"]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_account(run: Path) -> None:
    """Each trial of the plan ran and was trained once, each measurement was made once, each token is accounted for."""
    past, trials = Journal(run).past, lines(run / "trials.jsonl")
    check_steps(past)
    check_trials(past, [row for row in trials if row["group"] is not None])
    for moment, split in past.measured:
        rows = [(row["task"], row["attempt"]) for row in trials if row["measurement"] == f"{moment}/{split}"]
        assert rows and max(Counter(rows).values()) == 1, (moment, split)
    moments = {f"{moment}/{split}" for moment, split in past.measured}
    assert {row["measurement"] for row in trials} == moments | {""}
    assert moments == {"start/heldout", "start/train", "step-2/heldout", "end/heldout", "end/train"}
    assert all(row["sampled"] == row["trainable"] + sum(row["excluded"].values()) for row in trials)
    assert {row["recording"] for row in trials} - {""} == {path.name for path in run.glob("sessions/*")}
    assert all((row["reward"] is None) == (row["outcome"] not in SCORED) for row in trials)
    assert {row["outcome"] for row in trials} & SPOILED, "no blow was felt"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["stopped"] is None and summary["trials"] == len(trials)
    assert summary["tokens"]["sampled"] == sum(row["sampled"] for row in trials)
    assert summary["tokens"]["trainable"] == sum(row["trainable"] for row in trials)


def check_steps(past: Past) -> None:
    """Each step once, on groups of its own, and none is left over."""
    used = [group for step in past.steps for group in step]
    assert past.finished and [len(step) for step in past.steps] == [TASKS] * STEPS
    assert sorted(used) == sorted(past.begun) == sorted(past.ended) == list(range(STEPS * TASKS))
    assert max(Counter(begun.task for begun in past.begun.values()).values()) == 1, "a walk comes to each task once"


def check_trials(past: Past, rows: list[dict]) -> None:
    """Each attempt of each group once, by weights as new as the bound says."""
    step_of = {group: step for step, groups in enumerate(past.steps) for group in groups}
    wanted = {(g, b.task, b.visit * GROUP + k) for g, b in past.begun.items() for k in range(GROUP)}
    found = Counter((row["group"], row["task"], row["attempt"]) for row in rows)
    assert found == dict.fromkeys(wanted, 1)
    assert all(0 <= step_of[row["group"]] - row["version"] <= STALENESS for row in rows)


def check_curves(run: Path) -> None:
    """Each step once in the numbers and in the curves; the last one in a checkpoint."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert [row["step"] for row in lines(run / "metrics.jsonl")] == list(range(STEPS))
    curves = EventAccumulator(str(run / "tensorboard"))
    curves.Reload()
    assert [event.step for event in curves.Scalars("rollout/solve_rate")] == list(range(STEPS))
    assert [event.step for event in curves.Scalars("validation/heldout_coverage")] == [0, 2, STEPS]
    assert (run / f"checkpoints/step-{STEPS:06d}/meta.json").is_file()
    assert (run / "policy/model.safetensors").is_file()
    assert not list(run.glob("groups/*")), "a checkpoint has what they taught"
