"""One trial: a fresh box, one harness run against its own session, the box's changes, a verdict.

This is the one place where the errors of the parts become an `Outcome`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from harnesses.base import Endpoint
from lego.budget import Times, box_s, whole_verdict_s
from lego.capture.server import Handle, Proxy
from lego.capture.session import Session
from lego.errors import EngineError, HarnessError, VerdictError
from lego.records import Outcome, Trajectory
from lego.rollout.cuts import Cut
from lego.rollout.mix import Mounted
from lego.rollout.plan import Attempt
from lego.rollout.sessions import Sessions
from lego.tasks.machinery import is_test_machinery
from lego.tasks.task import PytestSuite, Task
from lego.tasks.verdict import Grader
from sandbox.base import BoxSpec, Change, ExecResult, Limits, Mount, Sandbox, SandboxError
from sandbox.gitsnap import digest, unified_patch
from sandbox.upper import TooLarge

log = logging.getLogger(__name__)
VERDICT = "verdict"
PORT = 4000
"""Where the model answers inside every box; each box has a network of its own."""
CHANGES_BYTES = 1 << 24
"""What is read of a box's changes, caches and all; the task's own limit is on the part that counts."""
PATCH_BYTES = 1 << 22
"""Old and new content of the files of a patch text: more than that is not for people to read."""
FAULTS = {
    SandboxError: Outcome.SANDBOX_ERROR,
    HarnessError: Outcome.HARNESS_ERROR,
    EngineError: Outcome.ENGINE_ERROR,
    VerdictError: Outcome.VERIFIER_ERROR,
}


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a trial came out; `reward` only with a verdict."""

    outcome: Outcome
    reward: float | None = None
    detail: str = ""
    patch: str = ""
    reused: bool = False


class Stopped(Exception):
    """The agent's run ended without a work to judge."""

    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome


@dataclass
class Clock:
    """Seconds by part of a trial."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measured(self, part: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[part] = time.monotonic() - start

    def __str__(self) -> str:
        return ", ".join(f"{part} {seconds:.1f} s" for part, seconds in self.seconds.items()) or "no part done"


@dataclass(frozen=True, kw_only=True)
class Trials:
    """What all trials of a run share."""

    sandbox: Sandbox
    cast: Callable[[Attempt], Mounted]
    """The harness of an attempt, always the same for the same attempt."""
    proxy: Proxy
    grader: Grader
    sessions: Sessions
    limits: Limits
    context_tokens: int
    output_tokens: int
    times: Times
    patches: dict[tuple[str, str], str] = field(default_factory=dict)
    """Patch texts by task and change set: most trials of a group repeat one another."""

    async def run(self, attempt: Attempt, cut: Cut, *, version: int) -> Trajectory:
        """Runs one attempt to its end, or to its cut; only bugs are raised."""
        task, clock = attempt.task, Clock()
        async with self.proxy.session(f"{task.id}#{attempt.number}") as session:
            with clock.measured("trial"):
                ending = await self._timely(attempt, session, clock, cut)
        log.info("trial %s#%d %s %s", task.id, attempt.number, ending.outcome, ending.detail[:200])
        trajectory = self._trajectory(attempt, version, ending, session.session, clock)
        return replace(trajectory, recording=await self.sessions.keep(session.session, trajectory))

    def _trajectory(self, attempt: Attempt, version: int, ending: Ending, session: Session, clock: Clock) -> Trajectory:
        task = attempt.task
        return Trajectory(
            task=task.id,
            attempt=attempt.number,
            split=task.split,
            version=version,
            outcome=ending.outcome,
            reward=ending.reward,
            segments=session.segments(),
            fidelity=session.fidelity(),
            seconds=clock.seconds,
            patch=ending.patch,
            verdict_reused=ending.reused,
            detail=ending.detail,
            harness=self.cast(attempt).harness.name,
            group=attempt.group,
        )

    async def _timely(self, attempt: Attempt, session: Handle, clock: Clock, cut: Cut) -> Ending:
        """The ending within the trial's own time and before its cut; when that is over, its boxes are closed."""
        try:
            async with cut.limit() as limit:
                return await self._within(attempt, session, clock)
        except TimeoutError:
            if not limit.expired():
                raise
            return Ending(outcome=Outcome.CANCELLED, detail=cut.cause)

    async def _within(self, attempt: Attempt, session: Handle, clock: Clock) -> Ending:
        """The harness has a time of its own: a trial that takes longer still is not the agent's doing."""
        try:
            async with asyncio.timeout(self.times.trial_s) as limit:
                return await self._ending(attempt, session, clock)
        except TimeoutError:
            if not limit.expired():
                raise
            outcome = Outcome.VERIFIER_ERROR if VERDICT in clock.seconds else Outcome.SANDBOX_ERROR
            return Ending(outcome=outcome, detail=f"longer than budget.trial_s {self.times.trial_s:g}: {clock}")

    async def _ending(self, attempt: Attempt, session: Handle, clock: Clock) -> Ending:
        try:
            changes = await self._agent(attempt, session, clock)
            with clock.measured(VERDICT):
                return await self._judged(attempt.task, changes)
        except Stopped as stop:
            return Ending(outcome=stop.outcome, detail=str(stop))
        except TooLarge as error:
            return Ending(outcome=Outcome.FAILED, reward=0.0, detail=str(error))
        except tuple(FAULTS) as error:
            fault = next(outcome for kind, outcome in FAULTS.items() if isinstance(error, kind))
            return Ending(outcome=fault, detail=str(error))

    async def _agent(self, attempt: Attempt, session: Handle, clock: Clock) -> tuple[Change, ...]:
        """The changes that one harness run made in a box of its own."""
        task, runs = attempt.task, self.cast(attempt)
        async with self.sandbox.open(self._box(task, runs.mounts)) as box:
            command = runs.harness.command(task.instruction, self._endpoint(session))
            for path, content in command.files.items():
                await box.put(path, content)
            async with session.serve(await box.listen(PORT)):
                with clock.measured("harness"):
                    result = await box.exec(
                        command.argv,
                        env=command.env,
                        cwd=task.workdir,
                        stdin=command.stdin,
                        timeout_s=self._harness_s(task),
                    )
            await box.kill()
            self._check(attempt, result, session)
            return await box.changes(max(CHANGES_BYTES, task.max_patch_bytes))

    def _box(self, task: Task, mounts: tuple[Mount, ...]) -> BoxSpec:
        return BoxSpec(
            base=task.base,
            image=task.image,
            workdir=task.workdir,
            mounts=mounts,
            limits=replace(task.limits or self.limits, deadline_s=box_s(self.times.harness_s)),
        )

    def _harness_s(self, task: Task) -> float:
        return self.times.harness_s if task.harness_s is None else min(task.harness_s, self.times.harness_s)

    def _endpoint(self, session: Handle) -> Endpoint:
        return Endpoint(
            url=f"http://127.0.0.1:{PORT}",
            key=session.key,
            model="policy",
            context_tokens=self.context_tokens,
            output_tokens=self.output_tokens,
        )

    def _check(self, attempt: Attempt, result: ExecResult, session: Handle) -> None:
        """Raises for a run whose work is not to be judged, with the first cause."""
        if session.engine_error is not None:
            raise session.engine_error
        if result.oom:
            raise Stopped(Outcome.OOM, "the box ran out of memory")
        breach = session.session.breach
        if breach is not None:
            raise Stopped(breach.outcome, f"a limit of the trial refused a call: {breach}")
        if result.timed_out:
            raise Stopped(Outcome.TIMEOUT, f"the harness ran longer than {self._harness_s(attempt.task):g} s")
        error = self.cast(attempt).harness.ended(result).error
        if error is not None:
            raise HarnessError(error)

    async def _judged(self, task: Task, changes: tuple[Change, ...]) -> Ending:
        try:
            async with asyncio.timeout(whole_verdict_s(self.times.verdict_s)) as limit:
                verdict = await self.grader.grade(task, changes)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise VerdictError(f"no verdict within the times of budget.verdict_s {self.times.verdict_s:g}") from error
        return Ending(
            outcome=verdict.outcome,
            reward=verdict.reward,
            detail=verdict.log[-2000:],
            patch=await self._patch(task, changes),
            reused=verdict.reused,
        )

    async def _patch(self, task: Task, changes: tuple[Change, ...]) -> str:
        key = (task.id, digest(changes))
        if key not in self.patches:
            exclude = is_test_machinery if isinstance(task.verifier, PytestSuite) else _nothing
            self.patches[key] = await asyncio.to_thread(_text, task.base, changes, exclude)
        return self.patches[key]


def _text(base: Path, changes: tuple[Change, ...], exclude: Callable[[Path], bool]) -> str:
    """The patch to read; nothing where it would be too large for that."""
    try:
        return unified_patch(base, changes, exclude, PATCH_BYTES)
    except TooLarge as error:
        log.warning("the text of a patch is left out: %s", error)
        return ""


def _nothing(path: Path) -> bool:
    """For a script every change counts, and is shown."""
    return False
