"""Ten trials of different harnesses at once, on one proxy: each sees its own task and nothing of the others'."""

import asyncio
import os
import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from harnesses.base import Harness
from harnesses.fetch import DEFAULT_CACHE, fetch
from harnesses.known import KNOWN
from harnesses.opencode import OpenCode
from lego.budget import Times
from lego.capture.server import Handle, Proxy
from lego.capture.session import Limits
from lego.chat.render import Renderer
from lego.chat.vocabulary import Vocabulary
from lego.drill.script import Finish, Shell, Step
from lego.drill.stage import Actor
from lego.engine.base import Progress
from lego.engine.scripted import ScriptedEngine
from lego.records import Generation, Ids, Outcome, Sampling, Trajectory
from lego.rollout.cuts import Cut
from lego.rollout.mix import Mounted
from lego.rollout.plan import Attempt
from lego.rollout.sessions import Sessions
from lego.rollout.trial import Trials
from lego.smoke import POLICY
from lego.tasks.task import Script, Task
from lego.tasks.verdict import Grader
from sandbox.base import Limits as BoxLimits
from sandbox.bubble import Bubblewrap
from tests.sandbox.conftest import remains

pytestmark = [pytest.mark.harness, pytest.mark.wide]
TEN: Mapping[str, Harness] = {
    **{name: kind() for name, kind in KNOWN.items()},
    "opencode-messages": OpenCode(sdk="@ai-sdk/anthropic"),
}
TOGETHER = 2
"""First model calls of a trial that wait for those of all others: so they are alive, and have written, at once."""
COUNT = 'echo "marks: $(wc -l < seen), different: $(sort -u seen | wc -l)"'
CONTEXT, OUTPUT = 200_000, 4096
TIMES = Times(call_s=240.0, harness_s=500.0, verdict_s=60.0, trial_s=2400.0, group_s=5e3, step_s=1e4)


def _work(mark: str) -> tuple[Step, ...]:
    """Leaves the mark wherever another trial could find it, looks for others' there, and does the task."""
    places = '"$HOME" /tmp /var/tmp /dev/shm'
    return (
        Shell(f"for place in {places}; do echo {mark} > $place/mark-{mark}; done"),
        Shell(f"cat answer.txt; for place in {places}; do cat $place/mark-*; done > seen; {COUNT}; cat seen; rm seen"),
        Shell(f"echo {mark} > made.txt && mv made.txt answer.txt"),
        Finish(),
    )


class Cast(ScriptedEngine):
    """One engine of ten actors, by session."""

    def __init__(self, vocabulary: Vocabulary, marks: Mapping[str, str]) -> None:
        super().__init__(lambda ids: ())
        self._vocabulary, self._marks = vocabulary, marks
        self._all = asyncio.Barrier(len(marks))
        self._actors: dict[str, tuple[str, Actor]] = {}
        self.prompts: dict[str, list[str]] = {name: [] for name in marks}

    def enters(self, handle: Handle) -> None:
        """A trial begins."""
        name = handle.name.partition("#")[0]
        actor = Actor(self._vocabulary, TEN[name].name, _work(self._marks[name]), 0.0)
        actor.session = handle.session
        self._actors[handle.session.uid] = (name, actor)

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        *,
        session: str,
        routing_start: int = 0,
        progress: Progress | None = None,
    ) -> Generation:
        name, actor = self._actors[session]
        self.prompts[name].append(self._vocabulary.decode(prompt_ids.tolist()))
        if len(self.prompts[name]) <= TOGETHER:
            await self._all.wait()
        return await actor.generate(
            prompt_ids, sampling, session=session, routing_start=routing_start, progress=progress
        )


@dataclass(eq=False, kw_only=True)
class Stage(Proxy):
    """A proxy that tells its cast who enters."""

    cast: Cast

    @asynccontextmanager
    async def session(self, name: str) -> AsyncIterator[Handle]:
        async with super().session(name) as handle:
            self.cast.enters(handle)
            yield handle


def _task(name: str, mark: str, folder: Path) -> Task:
    """The answer must be the mark, as only the instruction and this verifier say."""
    base, tests = folder / name / "base", folder / name / "tests"
    base.mkdir(parents=True)
    tests.mkdir()
    (base / "answer.txt").write_text(f"asked of {mark}\n")
    (tests / "test.sh").write_text(f'test "$(cat answer.txt)" = {mark}; echo $((1 - $?)) > /logs/verifier/reward.txt')
    return Task(
        id=name,
        package=name,
        split="train",
        digest=mark,
        base=base,
        instruction=f"Write {mark} into answer.txt.",
        verifier=Script(folder=tests, timeout_s=30.0),
    )


def _ready(name: str) -> Mounted:
    fetch(TEN[name], DEFAULT_CACHE)  # type: ignore[arg-type]
    return Mounted(harness=TEN[name], mounts=TEN[name].mounts(DEFAULT_CACHE))


def _trials(boxes: Bubblewrap, proxy: Proxy, renderer: Renderer, folder: Path) -> Trials:
    ready = {name: _ready(name) for name in TEN}
    return Trials(
        sandbox=boxes,
        cast=lambda attempt: ready[attempt.task.id],
        proxy=proxy,
        grader=Grader(boxes),
        sessions=Sessions(folder=folder, which="none", renderer=renderer),
        limits=BoxLimits(memory_gib=3.0),
        context_tokens=CONTEXT,
        output_tokens=OUTPUT,
        times=TIMES,
    )


def _in_boxes(state: Path) -> dict[str, list[int]]:
    """Processes of the machine by the box of this state folder that they are in, as their mounts tell."""
    upper, found = re.compile(rf"upperdir=\S*{re.escape(str(state))}/(box-[^/]+)/"), dict[str, list[int]]()
    for path in Path("/proc").glob("[0-9]*/mountinfo"):
        try:
            seen = upper.search(path.read_text())
        except OSError:
            continue  # gone meanwhile, or of another user
        if seen:
            found.setdefault(seen[1], []).append(int(path.parent.name))
    return found


async def _watch(state: Path, alive: list[int]) -> None:
    while True:
        await asyncio.sleep(1.0)
        alive.append(len(_in_boxes(state)))


async def test_ten_harnesses_at_once_keep_to_themselves_and_leave_nothing(tmp_path: Path):
    boxes, renderer = Bubblewrap(state=tmp_path / "boxes"), Renderer.load(POLICY)
    marks = {name: f"mark{secrets.token_hex(5)}" for name in TEN}
    tasks = {name: _task(name, mark, tmp_path) for name, mark in marks.items()}
    cast = Cast(Vocabulary(renderer.folder), marks)
    limits = Limits(context_tokens=CONTEXT, max_turns=30)
    stage = Stage(cast=cast, engine=cast, renderer=renderer, sampling=Sampling(max_tokens=OUTPUT), limits=limits)
    trials, alive = _trials(boxes, stage, renderer, tmp_path), list[int]()
    before = set(psutil.Process(os.getpid()).children(recursive=True))

    async with stage.open(), asyncio.TaskGroup() as group:
        watch = group.create_task(_watch(boxes.state_folder(), alive))
        runs = [trials.run(Attempt(task=tasks[name], number=0), Cut(), version=0) for name in TEN]
        done = dict(zip(TEN, await asyncio.gather(*runs), strict=True))
        watch.cancel()

    assert max(alive) == len(TEN), "they were not alive at once"
    for name, trajectory in done.items():
        _check(name, trajectory, cast.prompts[name], marks)
    assert remains(boxes.state_folder()) == [] and _in_boxes(boxes.state_folder()) == {}
    assert set(psutil.Process(os.getpid()).children(recursive=True)) <= before


def _check(name: str, trajectory: Trajectory, prompts: Sequence[str], marks: Mapping[str, str]) -> None:
    """The trial solved its own task, on its own prompts, and found its own files only."""
    assert (trajectory.outcome, trajectory.harness) == (Outcome.SOLVED, TEN[name].name), (name, trajectory.detail)
    fidelity = trajectory.fidelity
    assert fidelity.trained == fidelity.sampled > 0 and not fidelity.faults, (name, fidelity)
    assert all(marks[name] in prompt for prompt in prompts), name
    told = "\n".join(prompts)
    assert not [other for other, mark in marks.items() if other != name and mark in told], f"{name} was told"
    assert f"asked of {marks[name]}" in told and "marks: 4, different: 1" in told, (name, told[-2000:])
