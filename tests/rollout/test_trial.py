"""Whole trials in real boxes with a shell for an agent: each limit ends one with its outcome, and leaves nothing."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from harnesses.base import Command, End, Endpoint
from lego import budget
from lego.budget import Times
from lego.capture.server import Proxy
from lego.capture.session import CANCELLED, ENGINE_ERROR, Limits
from lego.chat.render import Renderer
from lego.engine.timely import TimelyEngine
from lego.records import Outcome, Sampling, Trajectory
from lego.rollout.cuts import Cut
from lego.rollout.mix import Mix, Mounted
from lego.rollout.plan import Attempt
from lego.rollout.sessions import Sessions
from lego.rollout.trial import Trials
from lego.tasks.task import Script, Task
from lego.tasks.verdict import Grader
from sandbox.base import Box, BoxSpec, ExecResult, FolderImage, Mount, StoredImage
from sandbox.base import Limits as BoxLimits
from sandbox.bubble import Bubblewrap
from sandbox.podman import Podman
from sandbox.podman import engine as podman_engine
from tests.capture.double import EXPERTS, ScriptedEngine
from tests.sandbox.conftest import podman_sandbox, rootfs  # noqa: F401
from tools.base_image import NAME

CHECK = "grep -q good answer.txt; echo $((1 - $?)) > /logs/verifier/reward.txt"
ASK = """
import json, sys, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": "U"}], "stream": len(sys.argv) > 2}).encode()
with urllib.request.urlopen(urllib.request.Request(sys.argv[1] + "/v1/chat/completions", body)) as answer:
    answer.read()
"""
CALL = f"{os.path.realpath(sys.executable)} -I -c '{ASK}' $URL"
MARGIN_S = 5.0
TIMES = Times(call_s=10.0, harness_s=20.0, verdict_s=20.0, trial_s=400.0, group_s=1e3, step_s=1e4)


@dataclass(frozen=True, kw_only=True)
class Shell:
    """A harness that runs a script."""

    script: str
    name: str = "shell"

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        return ()

    def command(self, instruction: str, endpoint: Endpoint) -> Command:
        return Command(argv=("sh", "-c", self.script), env={"URL": endpoint.url})

    def ended(self, result: ExecResult) -> End:
        return End(error=None if result.code == 0 else f"status {result.code}: {result.stderr.decode()[-300:]}")


@dataclass(frozen=True, kw_only=True)
class Slow:
    """Real boxes whose opening hangs: the agent's, or the verdict's, which alone has mounts."""

    boxes: Bubblewrap
    verdict: bool

    def open(self, spec: BoxSpec) -> AbstractAsyncContextManager[Box]:
        return self._open(spec)

    @asynccontextmanager
    async def _open(self, spec: BoxSpec) -> AsyncIterator[Box]:
        async with self.boxes.open(spec) as box:
            if bool(spec.mounts) == self.verdict:
                await asyncio.sleep(300)
            yield box


@pytest.fixture(autouse=True)
def small_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget refuses times without room for opening boxes; tests that wait for limits want little of it."""
    monkeypatch.setattr(budget, "MARGIN_S", MARGIN_S)


@pytest.fixture(scope="module")
def renderer(tiny_model: Path) -> Renderer:
    return Renderer.load(tiny_model)


@pytest.fixture
def boxes(tmp_path: Path) -> Bubblewrap:
    return Bubblewrap(state=tmp_path / "boxes")


@pytest.fixture
def task(tmp_path: Path) -> Task:
    """The agent shall write `good` into answer.txt."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base/answer.txt").write_text("bad\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test.sh").write_text(CHECK)
    return Task(
        id="words",
        package="words",
        split="train",
        digest="words-1",
        base=tmp_path / "base",
        instruction="Write good.",
        verifier=Script(folder=tmp_path / "tests", timeout_s=15.0),
        workdir=Path("/app"),
    )


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What a trial needs beside its task."""

    renderer: Renderer
    boxes: Bubblewrap | Podman
    sandbox: Bubblewrap | Podman | Slow
    folder: Path
    times: Times = TIMES
    delay_s: float = 0.0

    cast: Callable[[Attempt], Mounted] | None = None

    async def perform(
        self, task: Task, script: str, cut_s: float | None = None, group: int | None = None
    ) -> tuple[Trajectory, ScriptedEngine]:
        engine = ScriptedEngine(self.renderer, ["Done.<|im_end|>"] * 3, self.delay_s)
        proxy = Proxy(
            engine=TimelyEngine(engine, self.times.call_s),
            renderer=self.renderer,
            sampling=Sampling(max_tokens=100),
            limits=Limits(context_tokens=4000, experts=EXPERTS),
        )
        async with proxy.open():
            trials = Trials(
                sandbox=self.sandbox,
                cast=self.cast or (lambda attempt: Mounted(harness=Shell(script=script), mounts=())),
                proxy=proxy,
                grader=Grader(self.sandbox),
                sessions=Sessions(folder=self.folder / "sessions", which="none", renderer=self.renderer),
                limits=BoxLimits(),
                context_tokens=4000,
                output_tokens=100,
                times=self.times,
            )
            now = asyncio.get_running_loop().time()
            cut = Cut() if cut_s is None else Cut(at=now + cut_s, cause="cut by a test")
            trajectory = await trials.run(Attempt(task=task, number=0, group=group), cut, version=0)
        assert not list(self.boxes.state_folder().glob("box-*")), "a box was left"
        fidelity = trajectory.fidelity
        assert fidelity.sampled == fidelity.trained + sum(fidelity.excluded.values())
        return trajectory, engine


@pytest.fixture
def podman(request: pytest.FixtureRequest) -> Podman:
    return request.getfixturevalue("podman_sandbox")


@pytest.fixture
def stage(renderer: Renderer, boxes: Bubblewrap, tmp_path: Path) -> Stage:
    return Stage(renderer=renderer, boxes=boxes, sandbox=boxes, folder=tmp_path)


async def test_a_good_work_in_time_is_rewarded(stage: Stage, task: Task):
    trajectory, engine = await stage.perform(task, f"{CALL} && pwd > /tmp/where && echo good > answer.txt")
    assert (trajectory.outcome, trajectory.reward) == (Outcome.SOLVED, 1.0), trajectory.detail
    assert len(engine.calls) == 1 and len(trajectory.segments) == 1 and "+good" in trajectory.patch
    idle, _ = await stage.perform(task, "true")
    assert (idle.outcome, idle.reward) == (Outcome.FAILED, 0.0)


@pytest.mark.podman
async def test_a_good_work_in_a_container_is_rewarded(stage: Stage, task: Task, podman: Podman):
    """With the Python of the image, which is another than ours."""
    in_containers = replace(stage, boxes=podman, sandbox=podman)
    ask = CALL.replace(os.path.realpath(sys.executable), "python3")
    contained = replace(task, image=StoredImage(name=NAME))
    trajectory, engine = await in_containers.perform(contained, f"{ask} && echo good > answer.txt")
    assert (trajectory.outcome, trajectory.reward) == (Outcome.SOLVED, 1.0), trajectory.detail
    assert len(engine.calls) == 1 and "+good" in trajectory.patch
    late, _ = await replace(in_containers, times=replace(TIMES, call_s=0.5, harness_s=1.0)).perform(
        contained, "sleep 99"
    )
    assert late.outcome == Outcome.TIMEOUT
    cut, _ = await in_containers.perform(contained, "sleep 99", 3.0)
    assert cut.outcome == Outcome.CANCELLED


@pytest.mark.podman
async def test_a_sandbox_whose_image_is_a_folder_runs_a_trial_once_it_is_prepared(
    stage: Stage, task: Task, podman: Podman, request: pytest.FixtureRequest
):
    own = replace(podman, image=FolderImage(path=request.getfixturevalue("rootfs")))
    of_folder = replace(stage, boxes=own, sandbox=own)
    ask = CALL.replace(os.path.realpath(sys.executable), "python3")
    try:
        early, _ = await of_folder.perform(task, "true")
        assert early.outcome == Outcome.SANDBOX_ERROR and "is not in the engine's store; `tar -C" in early.detail
        await own.prepare(())
        trajectory, engine = await of_folder.perform(task, f"{ask} && echo good > answer.txt")
        assert (trajectory.outcome, trajectory.reward) == (Outcome.SOLVED, 1.0), trajectory.detail
        assert len(engine.calls) == 1
    finally:
        podman_engine(own).service.stop()


async def test_each_group_runs_the_harness_it_was_drawn_with_its_own_mounts_and_its_own_end(
    stage: Stage, task: Task, tmp_path: Path
):
    """One of the two does the work with a file of its own; the other ends badly where it finds that file."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own/word").write_text("good")
    works = Shell(script="cat /opt/own/word > answer.txt", name="works")
    breaks = Shell(script="[ -e /opt/own ] || exit 7", name="breaks")
    mount = Mount(source=tmp_path / "own", target=Path("/opt/own"))
    mix = Mix(
        weights={"works": 1.0, "breaks": 1.0},
        measured="works",
        seed=1,
        ready={"works": Mounted(harness=works, mounts=(mount,)), "breaks": Mounted(harness=breaks, mounts=())},
    )
    drawn = {group: mix.of(Attempt(task=task, number=0, group=group)).harness.name for group in range(20)}
    some = {name: next(g for g, drawn_name in drawn.items() if drawn_name == name) for name in ("works", "breaks")}
    mixed = replace(stage, cast=mix.of)
    good, _ = await mixed.perform(task, "", group=some["works"])
    bad, _ = await mixed.perform(task, "", group=some["breaks"])
    measured, _ = await mixed.perform(task, "")
    assert (good.outcome, good.harness, good.group) == (Outcome.SOLVED, "works", some["works"]), good.detail
    assert (bad.outcome, bad.harness, bad.group) == (Outcome.HARNESS_ERROR, "breaks", some["breaks"])
    assert bad.detail.startswith("status 7") and (measured.harness, measured.group) == ("works", None)


async def test_the_agent_works_where_the_task_says(stage: Stage, task: Task):
    trajectory, _ = await stage.perform(task, '[ "$PWD" = /app ] && echo good > /app/answer.txt')
    assert trajectory.outcome == Outcome.SOLVED, trajectory.detail


@pytest.mark.parametrize("stream", ["", " stream"])
async def test_a_call_over_call_s_is_the_engines_error_whatever_the_agent_does(stage: Stage, task: Task, stream: str):
    hangs = replace(stage, times=replace(TIMES, call_s=0.2), delay_s=60.0)
    trajectory, engine = await hangs.perform(task, f"{CALL}{stream}; echo good > answer.txt")
    assert (trajectory.outcome, trajectory.reward) == (Outcome.ENGINE_ERROR, None)
    assert "budget.call_s 0.2" in trajectory.detail and engine.cancelled == engine.calls
    assert set(trajectory.fidelity.excluded) <= {ENGINE_ERROR}


async def test_a_harness_over_harness_s_is_a_timeout(stage: Stage, task: Task):
    short = replace(stage, times=replace(TIMES, call_s=0.5, harness_s=1.0))
    trajectory, _ = await short.perform(task, "echo good > answer.txt; trap '' TERM; (setsid sleep 300 &); sleep 300")
    assert (trajectory.outcome, trajectory.reward) == (Outcome.TIMEOUT, None)
    assert trajectory.detail == "the harness ran longer than 1 s" and 1 <= trajectory.seconds["harness"] < 4


async def test_v12_an_agent_that_runs_out_of_memory_is_no_failure_of_the_work(stage: Stage, task: Task):
    if not stage.boxes.probe().memory:
        pytest.skip("this host does not limit memory")
    small = replace(task, limits=BoxLimits(memory_gib=0.125))
    hog = "echo good > answer.txt; head -c 300M /dev/zero | tail -n 1 > /dev/null; true"
    trajectory, _ = await stage.perform(small, hog)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.OOM, None), trajectory.detail


async def test_a_task_that_gives_the_agent_less_time_is_heeded(stage: Stage, task: Task):
    trajectory, _ = await stage.perform(replace(task, harness_s=0.5), "sleep 300")
    assert (trajectory.outcome, trajectory.detail) == (Outcome.TIMEOUT, "the harness ran longer than 0.5 s")
    assert trajectory.seconds["harness"] < 10


async def test_the_limits_of_a_task_are_those_of_its_box(stage: Stage, task: Task):
    small = replace(task, limits=BoxLimits(disk_mib=1, deadline_s=0.001))
    trajectory, _ = await stage.perform(small, "head -c 3M /dev/zero > /tmp/big || echo good > answer.txt")
    assert trajectory.outcome == Outcome.SOLVED, "its disk, but not its deadline"


async def test_a_trial_over_trial_s_before_its_verdict_is_the_sandboxs_error(
    stage: Stage, task: Task, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(budget, "MARGIN_S", 0.5)
    times = replace(TIMES, call_s=0.1, harness_s=0.2, verdict_s=0.2, trial_s=3.0)
    slow = replace(stage, sandbox=Slow(boxes=stage.boxes, verdict=False), times=times)
    trajectory, _ = await slow.perform(task, "echo good > answer.txt")
    assert (trajectory.outcome, trajectory.reward) == (Outcome.SANDBOX_ERROR, None)
    assert trajectory.detail.startswith("longer than budget.trial_s 3: ") and trajectory.seconds["trial"] < 12


async def test_a_verdict_over_verdict_s_is_the_verifiers_error(
    stage: Stage, task: Task, monkeypatch: pytest.MonkeyPatch
):
    times = replace(TIMES, verdict_s=0.2)
    slow = replace(stage, sandbox=Slow(boxes=stage.boxes, verdict=True), times=times)
    monkeypatch.setattr(budget, "MARGIN_S", 0.5)
    trajectory, _ = await slow.perform(task, "echo good > answer.txt")
    assert (trajectory.outcome, trajectory.reward) == (Outcome.VERIFIER_ERROR, None)
    assert "budget.verdict_s 0.2" in trajectory.detail


async def test_a_trial_over_trial_s_in_its_verdict_is_the_verifiers_error(
    stage: Stage, task: Task, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(budget, "MARGIN_S", 1.0)
    times = replace(TIMES, call_s=0.1, harness_s=0.2, verdict_s=0.2, trial_s=5.0)
    monkeypatch.setattr(budget, "MARGIN_S", 30.0)  # so that the verdict's own limit is later
    slow = replace(stage, sandbox=Slow(boxes=stage.boxes, verdict=True), times=times)
    trajectory, _ = await slow.perform(task, "echo good > answer.txt")
    assert (trajectory.outcome, trajectory.reward) == (Outcome.VERIFIER_ERROR, None)
    assert trajectory.detail.startswith("longer than budget.trial_s 5: harness ")
    assert trajectory.seconds["trial"] < 13


@pytest.mark.parametrize("cut_s", [5.0, -1.0])
async def test_a_trial_that_is_cut_is_cancelled_and_its_tokens_are_accounted_for(
    stage: Stage, task: Task, cut_s: float
):
    trajectory, engine = await stage.perform(task, f"{CALL}; sleep 300", cut_s)
    assert (trajectory.outcome, trajectory.reward, trajectory.detail) == (Outcome.CANCELLED, None, "cut by a test")
    assert len(engine.calls) == (1 if cut_s > 0 else 0) and trajectory.fidelity.sampled == 6 * len(engine.calls)


async def test_a_call_in_flight_ends_with_the_trial_that_is_cut(stage: Stage, task: Task):
    trajectory, engine = await replace(stage, delay_s=60.0).perform(task, CALL, 5.0)
    assert trajectory.outcome == Outcome.CANCELLED and engine.cancelled == engine.calls != []
    assert set(trajectory.fidelity.excluded) <= {CANCELLED}


async def test_no_verdict_is_no_reward(stage: Stage, task: Task):
    assert isinstance(task.verifier, Script)
    (task.verifier.folder / "test.sh").write_text("exit 0")
    trajectory, _ = await stage.perform(task, "echo good > answer.txt")
    assert (trajectory.outcome, trajectory.reward) == (Outcome.VERIFIER_ERROR, None)


async def test_a_trial_that_is_cancelled_from_outside_leaves_nothing(stage: Stage, task: Task):
    running = asyncio.create_task(stage.perform(task, "sleep 300"))
    await asyncio.sleep(1.0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not list(stage.boxes.state_folder().glob("box-*"))
