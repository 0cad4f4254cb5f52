"""`python -m lego.tasks.admission FOLDER`: which tasks may be trained on, found by running each several times.

A task is admitted when its verifier refuses the unchanged base and accepts the reference solution, every time, in
boxes without a network as in training, and some years later too, and when an agent's box shows no other copy of its
package.
"""

import asyncio
import hashlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from lego.errors import UsageError, VerdictError
from lego.lines import append, rows
from lego.records import Outcome
from lego.tasks.clock import Shifted, library
from lego.tasks.copies import Listing, copies, listing
from lego.tasks.folder import Folder
from lego.tasks.task import Task
from lego.tasks.verdict import Verdict, grade
from sandbox.base import Change, Mount, Progress, Sandbox
from sandbox.gitsnap import digest, patch_changes

log = logging.getLogger(__name__)

SOLUTION = "solution.patch"
SHOWN_COPIES = 3
LOG_CHARACTERS = 300
Solutions = Callable[[Task], Sequence[Change] | None]
"""The reference solution of a task; None where it has none, ValueError where it does not fit."""


@dataclass(frozen=True, kw_only=True)
class Admission:
    """How sure one wants to be of a task."""

    runs: int = 3
    """Times that the unchanged base and the reference solution are each judged."""
    days: int = 1200
    """How far the clock is shifted for one more run of both; 0 leaves that out."""
    at_once: int = 2
    """Verdicts side by side."""

    def __post_init__(self) -> None:
        for name, least in (("runs", 1), ("days", 0), ("at_once", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: want {least} or more")


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What became of one task; `reason` says why it was refused."""

    task: str
    admitted: bool
    reason: str = ""
    seconds: float = 0.0
    reused: bool = False


@dataclass(frozen=True)
class _Runs:
    """Verdicts of the unchanged base and of the reference solution, and later ones of both; None before they ran."""

    unchanged: tuple[Verdict, ...]
    reference: tuple[Verdict, ...] | None = None
    later: tuple[Verdict, Verdict] | None = None


class Admitter:
    """Decides on tasks with one sandbox; what the runs said is kept by the task's digest."""

    def __init__(
        self, sandbox: Sandbox, asked: Admission, store: Path | None = None, mounts: tuple[Mount, ...] = ()
    ) -> None:
        """`store` is a JSON-lines file, `mounts` are what agents' boxes show beside the task.

        UsageError for `days` without the library that shifts the clock.
        """
        self._sandbox, self._asked, self._store, self._mounts = sandbox, asked, store, mounts
        self._later = Shifted(sandbox=sandbox, days=asked.days, library=library()) if asked.days else None
        self._free = asyncio.Semaphore(asked.at_once)
        self._known = load(store) if store is not None else {}
        self._listings: dict[str, Listing] = {}
        self._listing_turn = asyncio.Lock()

    async def decide_all(self, tasks: Iterable[Task], solutions: Solutions, progress: Progress) -> tuple[Decision, ...]:
        """One decision a task, in their order."""
        given, done = tuple(tasks), 0

        async def one(task: Task) -> Decision:
            nonlocal done
            decision = await self.decide(task, solutions)
            done += 1
            progress(done, len(given), f"{task.id}: {decision.reason or 'admitted'}")
            return decision

        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one(task)) for task in given]
        return tuple(each.result() for each in running)

    async def decide(self, task: Task, solutions: Solutions) -> Decision:
        """Admits or refuses; a task that cannot be judged now is refused and asked about again the next time."""
        try:
            solution = solutions(task)
        except ValueError as error:
            return Decision(task=task.id, admitted=False, reason=f"no reference solution: {error}")
        if not solution:
            return Decision(task=task.id, admitted=False, reason="no reference solution")
        try:
            if found := copies(task, await self._listing(task)):
                return Decision(task=task.id, admitted=False, reason=_copies_told(found))
            return await self._judged(task, tuple(solution))
        except VerdictError as error:
            return Decision(task=task.id, admitted=False, reason=f"no verdict: {error}")

    async def _listing(self, task: Task) -> Listing:
        """What an agent's box shows: the same for all tasks of one image."""
        key = repr((task.image, task.workdir))
        async with self._listing_turn:
            if key not in self._listings:
                self._listings[key] = await listing(task, self._sandbox, self._mounts)
            return self._listings[key]

    async def _judged(self, task: Task, solution: tuple[Change, ...]) -> Decision:
        key = self._key(task, solution)
        if (known := self._known.get(key)) is not None:
            return known
        begun = time.monotonic()
        reason = refusal(await self._runs(task, solution), self._asked.days)
        seconds = round(time.monotonic() - begun, 2)
        decision = Decision(task=task.id, admitted=not reason, reason=reason, seconds=seconds)
        if self._store is not None:
            append(self._store, {"key": key, **asdict(decision)})
        self._known[key] = decision
        return decision

    def _key(self, task: Task, solution: Sequence[Change]) -> str:
        """Names all that the answer depends on."""
        parts = (task.digest, digest(solution), self._asked.runs, self._asked.days, repr(self._sandbox))
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    async def _runs(self, task: Task, solution: Sequence[Change]) -> _Runs:
        runs = _Runs(unchanged=await self._repeated(task, (), self._sandbox))
        if not refusal(runs, 0):
            runs = replace(runs, reference=await self._repeated(task, solution, self._sandbox))
        if self._later is None or refusal(runs, 0):
            return runs
        later = await self._grade(task, (), self._later), await self._grade(task, solution, self._later)
        return replace(runs, later=later)

    async def _repeated(self, task: Task, changes: Sequence[Change], sandbox: Sandbox) -> tuple[Verdict, ...]:
        """One after the other: other tasks are judged meanwhile."""
        return tuple([await self._grade(task, changes, sandbox) for _ in range(self._asked.runs)])

    async def _grade(self, task: Task, changes: Sequence[Change], sandbox: Sandbox) -> Verdict:
        """One run, never an answer that was kept."""
        async with self._free:
            return await grade(task, changes, sandbox)


def refusal(runs: _Runs, days: int) -> str:
    """Why these runs speak against a task; nothing where they do not."""
    unchanged, tries = _solved(runs.unchanged), len(runs.unchanged)
    if unchanged == tries:
        return "always passes: the unchanged base is judged solved"
    if unchanged:
        return f"flaky: {unchanged} of {tries} runs of the unchanged base are judged solved"
    reference = tries if runs.reference is None else _solved(runs.reference)
    if runs.reference and not reference:
        return f"reference fails: {_why(runs.reference[-1])}"
    if reference < tries:
        return f"flaky: {reference} of {tries} runs of the reference solution are judged solved"
    if runs.later and _solved(runs.later[:1]):
        return f"depends on the date: the unchanged base is judged solved {days} days later"
    if runs.later and not _solved(runs.later[1:]):
        said = _why(runs.later[1])
        return f"depends on the date: the reference solution fails {days} days later: {said}"
    return ""


def _why(verdict: Verdict) -> str:
    """The required tests that did not pass and those that did, before what was printed."""
    said = verdict.log[-LOG_CHARACTERS:].strip()
    if not verdict.missing:
        return said
    passed = ", ".join(verdict.passed) or "none"
    return f"required but not passed: {', '.join(verdict.missing)}; passed: {passed}\n{said}"


def _solved(verdicts: Iterable[Verdict]) -> int:
    return sum(verdict.outcome is Outcome.SOLVED for verdict in verdicts)


def _copies_told(found: Sequence[str]) -> str:
    shown = ", ".join(found[:SHOWN_COPIES]) + (f" and {len(found) - SHOWN_COPIES} more" * (len(found) > SHOWN_COPIES))
    return f"other copies of the package in the box: {shown}; take them out of the image, or hide their folders"


def load(store: Path) -> dict[str, Decision]:
    """The kept decisions; UsageError for what is no such file."""
    known = {}
    for row in rows(store):
        try:
            key = row.pop("key")
            known[key] = Decision(**{**row, "reused": True})
        except (KeyError, TypeError) as error:
            raise UsageError(f"{store}: a line is no decision of this program: {error!r}") from error
    return known


def patch_beside(task: Task) -> tuple[Change, ...] | None:
    """The solution that lies as `solution.patch` beside a task's base: outside of all that a box shows."""
    path = task.base.parent / SOLUTION
    return patch_changes(task.base, path.read_bytes()) if path.is_file() else None


@dataclass(frozen=True, kw_only=True)
class Admit(Admission):
    """Runs every task of a folder several times and says which of them may be trained on."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")]
    """Tasks, a folder each: task.json, base/, tests/ and the reference solution as solution.patch."""
    testenv: Path
    """Folder with pytest and what the tests import (made by `pip install --target`)."""
    store: Path | None = None
    """JSON-lines file of decisions, which are not taken twice; FOLDER/admission.jsonl unless given."""


def main(asked: Admit) -> None:
    """Logs each decision; exit status 1 when a task was refused."""
    from sandbox.bubble import Bubblewrap

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("lego.tasks.verdict").setLevel(logging.WARNING)
    refused = [decision for decision in asyncio.run(_decided(asked, Bubblewrap())) if not decision.admitted]
    if refused:
        log.info("%d refused: %s", len(refused), ", ".join(decision.task for decision in refused))
        sys.exit(1)


async def _decided(asked: Admit, sandbox: Sandbox) -> tuple[Decision, ...]:
    tasks = await Folder(path=asked.folder, testenv=asked.testenv).build(asked.folder, sandbox, lambda *_: None)
    admitter = Admitter(sandbox, asked, asked.store or asked.folder / "admission.jsonl")
    return await admitter.decide_all(
        tasks, patch_beside, lambda done, total, text: log.info("%d/%d %s", done, total, text)
    )


if __name__ == "__main__":
    given = tyro.cli(Admit, prog="python -m lego.tasks.admission")
    from lego.cli import guarded  # takes a moment, which --help does without

    guarded(lambda: main(given))
