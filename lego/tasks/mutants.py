"""The demo's tasks: one-token bugs put into real packages, each verified by the package's own tests before use."""

import asyncio
import compileall
import errno
import fcntl
import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lego.errors import UsageError, VerdictError
from lego.tasks import mutate, pip, sdist
from lego.tasks.pip import Pin
from lego.tasks.plan import Mutant, Package, Plan, instruction
from lego.tasks.pytest_verifier import Place, TestRun, run_tests
from lego.tasks.task import PytestSuite, Task, TaskSet
from sandbox.base import Progress, Sandbox

log = logging.getLogger(__name__)

AT_ONCE = 2
"""Boxes verifying side by side."""
ENOUGH = 0.75
"""Share of each split that must verify on this machine."""

TEST_ENVIRONMENT = (
    Pin(name="pytest", version="8.4.2", sha256="872f880de3fc3a5bdc88a11b39c9710c3497a547cfa9320bc3c5e62fbf272e79"),
    Pin(name="pluggy", version="1.6.0", sha256="e920276dd6813095e9377c0bc5566d94c932c33b27a3e3945d8389c374dd4746"),
    Pin(name="iniconfig", version="2.3.0", sha256="f631c04d2c48c52b84d0d0549c99ff3859c98df65b3101406327ecc7d53fbf12"),
    Pin(name="packaging", version="25.0", sha256="29572ef2b1f17581046b3a2227d5c611fb25ec70ca1ba8554b24b0e69331a484"),
    Pin(name="pygments", version="2.19.2", sha256="86540386c03d588bb81d44bc3928634ff26449851e99741617ecb9037ee5ec0b"),
)
BACKENDS = (
    Pin(name="setuptools", version="78.1.1", sha256="c3a9c4211ff4c309edb8b8c4f1cbfa7ae324c4ba9f91ff254e3d305b9fd54561"),
    Pin(name="flit-core", version="3.12.0", sha256="e7a0304069ea895172e3c7bb703292e992c5d1555dd1233ab7b5621b5b69e62c"),
)


@dataclass(frozen=True, kw_only=True)
class DemoTasks:
    """One-token bugs in real packages from the package index, judged by the packages' own tests."""

    index: Path
    """JSON file that lists packages and bugs."""
    test_environment: tuple[Pin, ...] = TEST_ENVIRONMENT
    """Wheels of pytest and what it imports."""
    backends: tuple[Pin, ...] = BACKENDS
    """Wheels that pip needs to read the packages' source archives."""

    async def build(self, cache: Path, sandbox: Sandbox, progress: Progress) -> TaskSet:
        """The verified tasks, made once below `cache`; UsageError where index, disk or sandbox do not allow it."""
        plan = Plan.read(self.index, self.test_environment, self.backends)
        folder = cache / "tasks" / plan.digest
        try:
            if not folder.is_dir():
                folder.parent.mkdir(parents=True, exist_ok=True)
                async with _alone(folder.parent / ".lock"):
                    if not folder.is_dir():
                        await _make(plan, folder, sandbox, progress)
            return load(folder)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise UsageError(f"cache: no space left below {cache}; the demo's tasks take about 60 MB") from error
            if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR):
                raise UsageError(f"cache: {cache} cannot be written: {error.strerror}") from error
            raise


def load(folder: Path) -> TaskSet:
    """The tasks of a finished folder."""
    rows = json.loads((folder / "tasks.json").read_text(encoding="utf-8"))
    return TaskSet(tuple(_task_of(folder, row) for row in rows))


async def _make(plan: Plan, folder: Path, sandbox: Sandbox, progress: Progress) -> None:
    """Builds beside `folder` and renames, so that it is whole or not there. Only under the lock."""
    for left in folder.parent.glob(".build-*"):
        shutil.rmtree(left)
    work = Path(tempfile.mkdtemp(prefix=".build-", dir=folder.parent))
    try:
        done = work / "done"
        build = Build(plan, done, sandbox, Steps(progress, 3 + len(plan.mutants)))
        await build.fetch(work / "fetch")
        rows = await build.verified()
        (done / "tasks.json").write_text(json.dumps(rows, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        done.rename(folder)
    finally:
        shutil.rmtree(work)


class Steps:
    """Counts what is done and tells the caller."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._done, self._total = progress, 0, total
        progress(0, total, "tasks: the build backends")

    def done(self, text: str) -> None:
        self._done += 1
        self._progress(self._done, self._total, text)


class Build:
    """One build of all tasks in `folder`: testenv/, source/PACKAGE, tests/PACKAGE, bases/TASK."""

    def __init__(self, plan: Plan, folder: Path, sandbox: Sandbox, steps: Steps) -> None:
        self.plan, self.folder, self.sandbox, self.steps = plan, folder, sandbox, steps
        self.free = asyncio.Semaphore(AT_ONCE)

    async def fetch(self, scratch: Path) -> None:
        """Every package parted into source and tests, and the test environment."""
        if self.plan.backends:
            await pip.install(self.plan.backends, scratch / "backends")
        self.steps.done("tasks: the packages")
        pins = [package.pin for package in self.plan.packages.values()]
        await pip.download_sources(pins, scratch / "sdists", scratch / "backends")
        for package in self.plan.packages.values():
            await _thread(partial(self._part, package, scratch))
        self.steps.done("tasks: the test environment")
        await pip.install(self.plan.test_environment, self.folder / "testenv")
        await _thread(partial(compileall.compile_dir, self.folder / "testenv", quiet=2))
        self.steps.done("tasks: verify")

    def _part(self, package: Package, scratch: Path) -> None:
        name = package.pin.name
        archive = _archive(scratch / "sdists", package.pin)
        try:
            top = sdist.unpack(archive, scratch / "unpacked" / name)
            sdist.part(top, package.tests, self.folder / "source" / name, self.folder / "tests" / name)
        except ValueError as error:
            raise UsageError(f"the source archive of {package.pin} cannot be used: {error}") from error

    async def verified(self) -> list[dict[str, Any]]:
        """The manifest's rows of the tasks that this machine could verify."""
        suites = {(m.package, m.test_file): self._suite(m) for m in self.plan.mutants}
        good = dict(
            zip(suites, await self._all([self._sound(*at, suite) for at, suite in suites.items()]), strict=True)
        )
        verify = [
            self._verify(m, suites[m.package, m.test_file], good[m.package, m.test_file]) for m in self.plan.mutants
        ]
        tasks = [task for task in await self._all(verify) if task is not None]
        for split in {m.split for m in self.plan.mutants}:
            listed = sum(m.split == split for m in self.plan.mutants)
            left = sum(task.split == split for task in tasks)
            if left < ENOUGH * listed:
                raise UsageError(f"only {left} of {listed} {split} tasks could be verified here; the log says why")
        return [_row(self.folder, task) for task in tasks]

    async def _all(self, work: Sequence[Any]) -> list[Any]:
        """Results in order; the first error, alone, once all others have been cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(one) for one in work]
        except* (UsageError, VerdictError, OSError) as errors:
            first: BaseException = errors
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            if isinstance(first, VerdictError):
                first = UsageError(f"the demo's tasks cannot be verified: {first}")
            raise first from errors
        return [task.result() for task in running]

    def _suite(self, mutant: Mutant) -> PytestSuite:
        return PytestSuite(
            tests=self.folder / "tests" / mutant.package,
            test_file=mutant.test_file,
            testenv=self.folder / "testenv",
            roots=self.plan.packages[mutant.package].roots,
        )

    async def _sound(self, package: str, test_file: str, suite: PytestSuite) -> tuple[str, ...]:
        """Tests that pass on the unchanged source; none where the file as a whole does not."""
        run = await self._run(suite, self.folder / "source" / package)
        return run.report.passed if run.believed and not run.report.failed else ()

    async def _verify(self, mutant: Mutant, suite: PytestSuite, good: tuple[str, ...]) -> Task | None:
        """The task, or None (and a line in the log) where its tests do not tell bug from fix."""
        base = self.folder / "bases" / mutant.id
        try:
            await _thread(partial(_break, self.folder / "source" / mutant.package, base, mutant))
        except ValueError as error:
            raise UsageError(f"tasks.index: task {mutant.id}: {error}") from error
        run = await self._run(suite, base)
        self.steps.done(f"tasks: {mutant.id}")
        seen = set(run.report.passed) if run.believed else set()
        caught = tuple(name for name in good if name not in seen)
        if not caught or not seen:
            log.warning("task %s left out: %d tests pass unbroken, %d broken", mutant.id, len(good), len(seen))
            return None
        return Task(
            id=mutant.id,
            package=mutant.package,
            split=mutant.split,
            digest=hashlib.sha256(f"{self.plan.digest}/{mutant.id}".encode()).hexdigest(),
            base=base,
            instruction=instruction(mutant.function, caught[0]),
            verifier=replace(suite, fail_to_pass=caught, pass_to_pass=tuple(name for name in good if name in seen)),
            chance=1 / mutant.candidates,
        )

    async def _run(self, suite: PytestSuite, base: Path) -> TestRun:
        async with self.free:
            return await run_tests(suite, Place(base=base), (), self.sandbox)


async def _thread(work: Callable[[], object]) -> None:
    """Runs blocking work to its end, also when cancelled meanwhile: its files are removed only after it."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise


def _break(source: Path, base: Path, mutant: Mutant) -> None:
    """`source` with the bug in it. ValueError where sed could not put it in, or take it out again."""
    sdist.clone(source, base)
    path = base / mutant.function.path
    text = path.read_bytes().decode()
    broken = mutate.apply(text, mutant.edit)
    back = mutate.inverse(mutant.edit)
    if mutate.apply(broken, back) != text or back not in mutate.candidates(broken.split("\n"), mutant.function):
        raise ValueError(f"{back} does not undo the bug")
    mode = path.stat().st_mode
    path.unlink()
    path.write_bytes(broken.encode())
    path.chmod(mode)


@asynccontextmanager
async def _alone(path: Path) -> AsyncIterator[None]:
    """Waits until no other process builds here. The kernel frees the lock of a process that dies."""
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(0.2)
        yield


def _archive(folder: Path, pin: Pin) -> Path:
    """The downloaded file with the pinned content, whatever it is called."""
    for path in folder.iterdir():
        if hashlib.sha256(path.read_bytes()).hexdigest() == pin.sha256:
            return path
    raise UsageError(f"pip delivered no file of {pin} with the wanted hash {pin.sha256}")


_PATHS = ("tests", "testenv")
_TUPLES = ("roots", "fail_to_pass", "pass_to_pass")


def _row(folder: Path, task: Task) -> dict[str, Any]:
    """A task for the manifest: paths relative to the folder, so that it can be renamed."""
    suite = task.verifier
    assert isinstance(suite, PytestSuite) and task.image is None and task.limits is None
    row = {name: value for name, value in asdict(task).items() if name not in ("image", "workdir", "limits")}
    row["verifier"] |= {name: str(getattr(suite, name).relative_to(folder)) for name in _PATHS}
    return row | {"base": str(task.base.relative_to(folder))}


def _task_of(folder: Path, row: dict[str, Any]) -> Task:
    given = row["verifier"]
    paths = {name: folder / given[name] for name in _PATHS}
    suite = PytestSuite(**{**given, **paths, **{name: tuple(given[name]) for name in _TUPLES}})
    return Task(**{**row, "base": folder / row["base"], "verifier": suite})
