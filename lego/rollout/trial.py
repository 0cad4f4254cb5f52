"""One trial: a fresh box, one harness run against its own session, the box's changes, a verdict.

This is the one place where the errors of the parts become an `Outcome`.
"""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from harnesses.base import Endpoint, Harness
from lego.capture.server import Handle, Proxy
from lego.capture.session import Session
from lego.errors import EngineError, HarnessError, VerdictError
from lego.records import Outcome, Trajectory
from lego.rollout.collect import Attempt
from lego.rollout.sessions import Sessions
from lego.tasks.task import Task
from lego.tasks.verdict import Grader, is_test_machinery, patch_digest
from sandbox.base import BoxSpec, Change, ExecResult, Limits, Mount, Sandbox, SandboxError
from sandbox.gitsnap import unified_patch
from sandbox.upper import TooLarge

log = logging.getLogger(__name__)
PORT = 4000
"""Where the model answers inside every box; each box has a network of its own."""
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


@dataclass(frozen=True, kw_only=True)
class Trials:
    """What all trials of a run share."""

    sandbox: Sandbox
    harness: Harness
    mounts: tuple[Mount, ...]
    proxy: Proxy
    grader: Grader
    sessions: Sessions
    limits: Limits
    context_tokens: int
    output_tokens: int
    timeout_s: float
    patches: dict[tuple[str, str], str] = field(default_factory=dict)
    """Patch texts by task and change set: most trials of a group repeat one another."""

    async def run(self, attempt: Attempt, version: int) -> Trajectory:
        """Runs one attempt to its end; only bugs are raised."""
        task, clock = attempt.task, Clock()
        async with self.proxy.session(f"{task.id}#{attempt.number}") as session:
            with clock.measured("trial"):
                ending = await self._ending(task, session, clock)
        log.info("trial %s#%d %s %s", task.id, attempt.number, ending.outcome, ending.detail[:200])
        trajectory = self._trajectory(attempt, version, ending, session.session, clock)
        return replace(trajectory, recording=await self.sessions.keep(session.session, trajectory))

    @staticmethod
    def _trajectory(attempt: Attempt, version: int, ending: Ending, session: Session, clock: Clock) -> Trajectory:
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
        )

    async def _ending(self, task: Task, session: Handle, clock: Clock) -> Ending:
        try:
            changes = await self._agent(task, session, clock)
            with clock.measured("verdict"):
                return await self._judged(task, changes)
        except Stopped as stop:
            return Ending(outcome=stop.outcome, detail=str(stop))
        except TooLarge as error:
            return Ending(outcome=Outcome.FAILED, reward=0.0, detail=str(error))
        except tuple(FAULTS) as error:
            fault = next(outcome for kind, outcome in FAULTS.items() if isinstance(error, kind))
            return Ending(outcome=fault, detail=str(error))

    async def _agent(self, task: Task, session: Handle, clock: Clock) -> tuple[Change, ...]:
        """The changes that one harness run made in a box of its own."""
        async with self.sandbox.open(BoxSpec(base=task.base, mounts=self.mounts, limits=self.limits)) as box:
            command = self.harness.command(task.instruction, self._endpoint(session))
            for path, content in command.files.items():
                await box.put(path, content)
            async with session.serve(await box.listen(PORT)):
                with clock.measured("harness"):
                    result = await box.exec(
                        command.argv, env=command.env, stdin=command.stdin, timeout_s=self.timeout_s
                    )
            await box.kill()
            self._check(result, session)
            return await box.changes()

    def _endpoint(self, session: Handle) -> Endpoint:
        return Endpoint(
            url=f"http://127.0.0.1:{PORT}",
            key=session.key,
            model="policy",
            context_tokens=self.context_tokens,
            output_tokens=self.output_tokens,
        )

    def _check(self, result: ExecResult, session: Handle) -> None:
        """Raises for a run whose work is not to be judged, with the first cause."""
        if session.engine_error is not None:
            raise session.engine_error
        if result.oom:
            raise Stopped(Outcome.OOM, "the box ran out of memory")
        breach = session.session.breach
        if breach is not None:
            raise Stopped(breach.outcome, f"a limit of the trial refused a call: {breach}")
        if result.timed_out:
            raise Stopped(Outcome.TIMEOUT, f"the harness ran longer than {self.timeout_s:g} s")
        error = self.harness.ended(result).error
        if error is not None:
            raise HarnessError(error)

    async def _judged(self, task: Task, changes: tuple[Change, ...]) -> Ending:
        verdict = await self.grader.grade(task, changes)
        return Ending(
            outcome=verdict.outcome,
            reward=verdict.reward,
            detail=verdict.log[-2000:],
            patch=await self._patch(task, changes),
            reused=verdict.reused,
        )

    async def _patch(self, task: Task, changes: tuple[Change, ...]) -> str:
        key = (task.id, patch_digest(changes))
        if key not in self.patches:
            self.patches[key] = await asyncio.to_thread(unified_patch, task.base, changes, is_test_machinery)
        return self.patches[key]
