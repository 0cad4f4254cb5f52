"""What the judging of one change set said, and the grader that never judges the same one twice."""

import asyncio
import logging
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lego.errors import UsageError
from lego.lines import append, rows
from lego.records import Outcome
from lego.tasks.machinery import counts, judged
from lego.tasks.screen import Finding, screen, unforgivable
from lego.tasks.task import PytestSuite, Task
from sandbox.base import Change, Sandbox
from sandbox.gitsnap import digest

log = logging.getLogger(__name__)

LOG_BYTES = 4000
ENTRY_BYTES = 128
"""What a changed path counts beside its name and content: a box has room for only so many files."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the verifier said. What cannot be judged has no verdict: VerdictError, so no reward."""

    outcome: Outcome
    reward: float
    passed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """Required tests without an explicit pass."""
    findings: tuple[Finding, ...] = ()
    """What the changes add that looks like a way round the tests; some kinds take the reward away."""
    tampering: tuple[str, ...] = ()
    """What the run did to its own record; never solved."""
    log: str = ""
    """Head and tail of what was printed, then why the work was not solved."""
    seconds: float = 0.0
    reused: bool = False
    excluded: tuple[Path, ...] = ()
    """Changed paths that were left out: tests, test settings, interpreter hooks, caches."""


async def grade(task: Task, changes: Iterable[Change], sandbox: Sandbox) -> Verdict:
    """Runs the hidden tests on `base` + `changes`; VerdictError where that says nothing about the changes."""
    return await Grader(sandbox).grade(task, changes)


class Grader:
    """Grades with one sandbox; the same task and the same changes are run once, at the same time too."""

    def __init__(self, sandbox: Sandbox, store: Path | None = None) -> None:
        """`store` is a JSON-lines file that keeps verdicts beyond this object."""
        self.graded = 0
        """Verdicts that ran the tests."""
        self.reused = 0
        """Verdicts taken from an earlier run of the same task and changes."""
        self._sandbox, self._store = sandbox, store
        self._running: dict[str, asyncio.Event] = {}
        self._known = _load(store) if store is not None else {}

    async def grade(self, task: Task, changes: Iterable[Change]) -> Verdict:
        """As the function of that name; `reused` says that no test ran for this call. Errors are not kept."""
        given = tuple(changes)
        excluded = tuple(change.path for change in given if not counts(task, change))
        kept = judged(task, given)
        key = f"{task.digest}/{digest(kept)}"
        while (running := self._running.get(key)) is not None:
            await running.wait()
        if (known := self._known.get(key)) is not None:
            self.reused += 1
            return replace(known, reused=True, excluded=excluded)
        running = self._running[key] = asyncio.Event()
        try:
            verdict = await _grade(task, kept, self._sandbox)
            self._keep(key, verdict)
        finally:
            del self._running[key]
            running.set()
        self.graded += 1
        return replace(verdict, excluded=excluded)

    def _keep(self, key: str, verdict: Verdict) -> None:
        self._known[key] = verdict
        if self._store is not None:
            append(self._store, {"key": key, **asdict(verdict), "excluded": []})


async def _grade(task: Task, kept: tuple[Change, ...], sandbox: Sandbox) -> Verdict:
    size = sum(len(change.content) + len(os.fsencode(change.path)) + ENTRY_BYTES for change in kept)
    if size > task.max_patch_bytes:
        told = f"the change is {size} bytes, more than {task.max_patch_bytes}"
        return Verdict(outcome=Outcome.FAILED, reward=0.0, missing=required(task), log=told)
    start = time.monotonic()
    # In this thread: Python 3.11 cannot make syntax trees in two at once, and whoever reads arrays here makes some.
    findings = screen(task.base, kept)
    # A script's agent may write tests of its own, which use what no other work uses.
    judged_by_tests = isinstance(task.verifier, PytestSuite)
    fatal = unforgivable(task.base, findings) if judged_by_tests else ()
    verdict = _screened(await _verified(task, kept, sandbox), fatal)
    verdict = replace(verdict, findings=findings, seconds=time.monotonic() - start)
    log.info("graded task=%s reward=%.1f seconds=%.2f", task.id, verdict.reward, verdict.seconds)
    if findings or verdict.tampering:
        log.warning("suspect task=%s reward=%.1f %s", task.id, verdict.reward, _told(findings, verdict.tampering))
    return verdict


async def _verified(task: Task, kept: tuple[Change, ...], sandbox: Sandbox) -> Verdict:
    """What the task's own kind of verifier says."""
    # Imported here, because both take `Verdict` from this module.
    if isinstance(task.verifier, PytestSuite):
        from lego.tasks.pytest_verifier import grade_suite

        return await grade_suite(task, task.verifier, kept, sandbox)
    from lego.tasks.script_verifier import grade_script

    return await grade_script(task, task.verifier, kept, sandbox)


def _screened(verdict: Verdict, findings: tuple[Finding, ...]) -> Verdict:
    """The verdict without its reward where the changes hold what has no honest use."""
    if not findings or verdict.reward == 0.0:
        return verdict
    told = f"{verdict.log}\nno reward: {_told(findings)}"
    return replace(verdict, outcome=Outcome.FAILED, reward=0.0, log=clip(told))


def _told(findings: tuple[Finding, ...], more: tuple[str, ...] = ()) -> str:
    return "; ".join([*(f"{f.path}:{f.line} {f.kind}" for f in findings), *more])


def clip(text: str) -> str:
    """The text, or where it is long, its head and its tail."""
    if len(text) <= LOG_BYTES:
        return text
    head = LOG_BYTES // 4
    return f"{text[:head]}\n[{len(text) - LOG_BYTES} characters left out]\n{text[head - LOG_BYTES :]}"


def required(task: Task) -> tuple[str, ...]:
    """The tests that must pass; a script names none."""
    return task.verifier.required if isinstance(task.verifier, PytestSuite) else ()


def _load(store: Path) -> dict[str, Verdict]:
    """Kept verdicts; UsageError for a file that an older version or another program wrote."""
    known = {}
    for row in rows(store):
        try:
            key = row.pop("key")
            row |= {name: tuple(row[name]) for name in ("passed", "missing", "tampering", "excluded")}
            row["findings"] = tuple(Finding(**finding) for finding in row["findings"])
            row["outcome"] = Outcome(row["outcome"])
            known[key] = Verdict(**row)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{store}: a line is no verdict of this version: {error!r}") from error
    return known
