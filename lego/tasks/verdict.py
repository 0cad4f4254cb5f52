"""Grades a change set: a fresh box, the agent's changes without test machinery, the hidden tests, one answer."""

import asyncio
import base64
import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lego.errors import VerdictError
from lego.records import Outcome
from lego.tasks import boot, report
from lego.tasks.task import Suite, Task
from sandbox.base import Box, BoxSpec, Change, ExecResult, Limits, Mount, Sandbox, SandboxError

log = logging.getLogger(__name__)

WORKDIR = Path("/repo")
TESTS, TESTENV = Path("/opt/tests"), Path("/opt/testenv")
REPORT = Path("/tmp/report.xml")
MEMORY_BYTES = 1 << 30
"""Address space of the tests; above it they see MemoryError, well before the box's own limit."""
LIMITS = Limits(memory_gib=2.0, pids=64, cpus=1.0, disk_mib=64, deadline_s=180.0)
LOG_BYTES = 4000

_INI = {"pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml"}
_SETTINGS = frozenset(_INI | {"conftest.py", "sitecustomize.py", "usercustomize.py"})
_FOLDERS = frozenset({".git", "__pycache__", ".pytest_cache", "tests", "test"})
_PLUGINS_OFF = (
    *("cacheprovider", "pastebin", "doctest", "setuponly", "setupplan", "stepwise", "legacypath"),
    *("faulthandler", "unraisableexception", "threadexception", "logging", "pytester"),
)
"""Parts of pytest that a verdict does not need: starting them is a quarter of its cost."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the hidden tests said. `missing` are required tests without an explicit pass."""

    outcome: Outcome
    reward: float
    passed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    log: str = ""
    seconds: float = 0.0
    reused: bool = False
    excluded: tuple[Path, ...] = ()
    """Changed paths that were left out: tests, test settings, interpreter hooks, caches."""


@dataclass(frozen=True, kw_only=True)
class TestRun:
    """One run of a test file in a box."""

    result: ExecResult
    report: report.Report | None

    __test__ = False


def is_test_machinery(path: Path) -> bool:
    """Whether a path could steer the tests rather than the code under test."""
    name = path.name
    return (
        bool(_FOLDERS & set(path.parts))
        or name in _SETTINGS
        or path.suffix in {".pth", ".pyc", ".pyo"}
        or (name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py")))
    )


def judged(task: Task, changes: Iterable[Change]) -> tuple[Change, ...]:
    """The changes that count, in path order: no test machinery, nothing that equals the base."""
    kept = [change for change in changes if not is_test_machinery(change.path)]
    for change in kept:
        if change.path.is_absolute() or ".." in change.path.parts or not change.path.parts:
            raise VerdictError(f"task {task.id}: the box reports a change at {change.path}")
    return tuple(sorted((c for c in kept if not _as_in_base(task.base, c)), key=lambda c: (c.path.parts, c.kind)))


def patch_digest(changes: Sequence[Change]) -> str:
    """Names a change set by its paths, kinds, modes and contents."""
    digest = hashlib.sha256()
    for change in changes:
        for part in (os.fsencode(change.path), change.kind.encode(), b"%o" % _mode(change), change.content):
            digest.update(b"%d:" % len(part) + part)
    return digest.hexdigest()


async def grade(task: Task, changes: Iterable[Change], sandbox: Sandbox) -> Verdict:
    """Runs the hidden tests on `base` + `changes`; VerdictError where that says nothing about the changes."""
    return await Grader(sandbox).grade(task, changes)


async def run_tests(suite: Suite, base: Path, changes: Sequence[Change], sandbox: Sandbox) -> TestRun:
    """One run of a test file on `base` + `changes` in a box of its own."""
    for needed in (base, suite.testenv, suite.tests / suite.test_file):
        if not needed.exists():
            raise VerdictError(f"the tests cannot run: {needed} is gone")
    python, mounts = interpreter()
    mounts += (Mount(source=suite.tests, target=TESTS), Mount(source=suite.testenv, target=TESTENV))
    try:
        async with sandbox.open(BoxSpec(base=base, workdir=WORKDIR, mounts=mounts, limits=LIMITS)) as box:
            result = await box.exec(
                [str(python), "-I", "-S", "-B", "-X", "utf8", "-c", _boot_text()],
                env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TZ": "UTC"},
                stdin=_job(suite, changes),
                timeout_s=suite.wall_s,
                max_output=1 << 18,
            )
            _refuse_unstarted(result)
            return TestRun(result=result, report=report.parse(await _report(box)))
    except SandboxError as error:
        raise VerdictError(f"the tests' box failed: {error}") from error


def _refuse_unstarted(result: ExecResult) -> None:
    """VerdictError where the run ended before any code under test could have run."""
    if boot.STARTED.encode() not in result.stderr[: 1 << 12]:
        said = result.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise VerdictError(f"the tests did not start (status {result.code}): {said}")


def interpreter() -> tuple[Path, tuple[Mount, ...]]:
    """The Python that runs tests, and what must be mounted (at its own path) for it to be in a box."""
    python = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    prefix = Path(sys.base_prefix).resolve()
    if prefix == Path("/usr"):
        return python, ()
    return python, (Mount(source=prefix, target=prefix),)


def pytest_arguments(tests: Path, test_file: str, out: Path) -> list[str]:
    """Arguments that run one file of the folder `tests`, blind to every setting outside it."""
    off = [argument for plugin in _PLUGINS_OFF for argument in ("-p", f"no:{plugin}")]
    place = ["-c", "/dev/null", f"--rootdir={tests}", f"--confcutdir={tests}"]
    speech = ["-q", "--color=no", "--tb=line", "--disable-warnings", f"--junitxml={out}"]
    # Rewritten asserts and pytest's own tracebacks only word failures better, at up to 0.1 CPU-s for each.
    return [*off, *place, *speech, "--assert=plain", str(tests / test_file)]


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
        self._known = _load(store) if store is not None and store.exists() else {}

    async def grade(self, task: Task, changes: Iterable[Change]) -> Verdict:
        """As the function of that name; `reused` says that no test ran for this call. Errors are not kept."""
        given = tuple(changes)
        excluded = tuple(change.path for change in given if is_test_machinery(change.path))
        kept = judged(task, given)
        key = f"{task.digest}/{patch_digest(kept)}"
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
            line = json.dumps({"key": key, **asdict(verdict), "excluded": []}, allow_nan=False)
            with self._store.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


async def _grade(task: Task, kept: tuple[Change, ...], sandbox: Sandbox) -> Verdict:
    size = sum(len(change.content) for change in kept)
    if size > task.max_patch_bytes:
        return _failed(task, f"the change is {size} bytes, more than {task.max_patch_bytes}")
    start = time.monotonic()
    run = await run_tests(task.suite, task.base, kept, sandbox)
    verdict = replace(_read(task, run), seconds=time.monotonic() - start)
    log.info("graded task=%s reward=%.1f seconds=%.2f", task.id, verdict.reward, verdict.seconds)
    return verdict


def _read(task: Task, run: TestRun) -> Verdict:
    """The verdict of a finished run; VerdictError where the run was not ended by the changes under test."""
    result = run.result
    text = (result.stdout + result.stderr).decode("utf-8", "replace")
    if result.oom:
        raise VerdictError(f"task {task.id}: the tests' box ran out of memory")
    if result.timed_out:
        return _failed(task, f"the tests ran longer than {task.tests_s:g} s\n{text}")
    if result.code is None or result.code in (-9, 137):
        raise VerdictError(f"task {task.id}: the tests were killed from outside")
    passed = run.report.passed if run.report else ()
    if report.resolved(run.report, result.code, task.required):
        return Verdict(outcome=Outcome.SOLVED, reward=1.0, passed=passed, log=text[-LOG_BYTES:])
    return replace(_failed(task, f"{text}\nexit status {result.code}", passed), passed=passed)


def _failed(task: Task, text: str, passed: Sequence[str] = ()) -> Verdict:
    missing = tuple(name for name in task.required if name not in set(passed))
    return Verdict(outcome=Outcome.FAILED, reward=0.0, missing=missing, log=text[-LOG_BYTES:])


def _job(suite: Suite, changes: Sequence[Change]) -> bytes:
    """What `boot` reads: links are laid last, so that nothing is written through one."""
    ordered = sorted(changes, key=lambda change: (change.kind == "symlink", change.kind != "deleted"))
    job = {
        "root": str(WORKDIR),
        "changes": [
            {
                "path": os.fsdecode(change.path),
                "kind": change.kind,
                "content": base64.b64encode(change.content).decode(),
                "mode": change.mode & 0o777,
            }
            for change in ordered
        ],
        "cpu_s": suite.cpu_s,
        "memory_bytes": MEMORY_BYTES,
        "path": [str(TESTENV), *(str(WORKDIR / root) for root in suite.roots)],
        "args": pytest_arguments(TESTS, suite.test_file, REPORT),
    }
    return json.dumps(job).encode()


async def _report(box: Box) -> bytes:
    """The report's bytes; nothing where the tests left none, or one too large to be theirs."""
    try:
        return await box.get(REPORT, max_bytes=1 << 22)
    except (FileNotFoundError, ValueError):
        return b""


def _boot_text() -> str:
    return Path(boot.__file__).read_text(encoding="utf-8")


def _as_in_base(base: Path, change: Change) -> bool:
    path = base / change.path
    if change.kind == "dir":
        return path.is_dir() and not path.is_symlink()
    if change.kind != "file" or path.is_symlink() or not path.is_file():
        return False
    status = path.stat()
    same = status.st_size == len(change.content) and status.st_mode & 0o111 == _mode(change)
    return same and path.read_bytes() == change.content


def _mode(change: Change) -> int:
    return change.mode & 0o111 if change.kind == "file" else 0


def _load(store: Path) -> dict[str, Verdict]:
    """Kept verdicts; a last line cut off by a crash is left out."""
    known = {}
    for line in store.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        row = json.loads(line)
        key = row.pop("key")
        row |= {name: tuple(row[name]) for name in ("passed", "missing", "excluded")}
        known[key] = Verdict(**row | {"outcome": Outcome(row["outcome"])})
    return known
