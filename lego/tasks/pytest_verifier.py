"""The verdict of hidden pytest tests: a fresh box, base + changes, one run, and what its record proves.

Whose doing an end is. The work's, so reward 0: tests that fail, raise, hang or crash, take more CPU time, address
space, processes or disk than they may, end the interpreter, or tamper with the record. Nobody's, so VerdictError: the
box cannot be made or is lost, the tests did not start (nothing of the agent has run before that), the box ran out of
memory (who filled it cannot be told), or the second run of solved work broke off where the first did not. A SIGKILL
without a reason is asked about once more: twice in a row it is the work's.
"""

import base64
import functools
import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lego.budget import box_s
from lego.errors import VerdictError
from lego.records import Outcome
from lego.tasks import boot, report, witness
from lego.tasks.task import PytestSuite, Task
from lego.tasks.verdict import Verdict, clip
from sandbox.base import BoxSpec, Change, ExecResult, Image, Limits, Mount, Sandbox, SandboxError

WORKDIR = Path("/repo")
TESTS, TESTENV, PYTHON = Path("/opt/tests"), Path("/opt/testenv"), Path("/opt/python")
MEMORY_SHARE = 0.5
"""Address space of each process of the tests; above it they see MemoryError, well before the box's own limit."""
LIMITS = Limits(memory_gib=2.0, pids=64, cpus=1.0, disk_mib=64)
OUTPUT_BYTES = 1 << 22
"""Of the record, and of what the tests print: some ten thousand tests."""
_PLUGINS_OFF = (
    *("cacheprovider", "pastebin", "doctest", "setuponly", "setupplan", "stepwise", "legacypath", "junitxml"),
    *("faulthandler", "unraisableexception", "threadexception", "logging", "pytester"),
)
"""Parts of pytest that a verdict does not need: starting them is a quarter of its cost."""
KILLED = (-9, 137)


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a box for tests is made of."""

    base: Path
    image: Image | None = None
    workdir: Path = WORKDIR
    limits: Limits = LIMITS


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """A Python in a box: its program there, and what it needs."""

    program: Path
    mounts: tuple[Mount, ...]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TestRun:
    """One run of a test file in a box."""

    result: ExecResult
    report: report.Report

    __test__ = False

    @property
    def believed(self) -> bool:
        """Whether its record is whole and agrees with the exit status."""
        return report.believed(self.report, self.result.code)


async def grade_suite(task: Task, suite: PytestSuite, changes: Sequence[Change], sandbox: Sandbox) -> Verdict:
    """What the hidden tests say of `base` + `changes`; VerdictError where that says nothing about the changes."""
    place = Place(base=task.base, image=task.image, workdir=task.workdir, limits=task.limits or LIMITS)
    run = await run_tests(suite, place, changes, sandbox)
    if run.result.code in KILLED and not run.result.oom:
        run = await run_tests(suite, place, changes, sandbox)
    verdict = _read(task, suite, run)
    if verdict.outcome is Outcome.SOLVED:
        return after_twin(suite, verdict, await run_tests(suite, place, changes, sandbox, twin=True))
    return verdict


async def run_tests(
    suite: PytestSuite, place: Place, changes: Sequence[Change], sandbox: Sandbox, *, twin: bool = False
) -> TestRun:
    """One run of a test file on base + `changes` in a box of its own. In the `twin`, every test fails at its end."""
    for needed in (place.base, suite.testenv, suite.tests / suite.test_file):
        if not needed.exists():
            raise VerdictError(f"the tests cannot run: {needed} is gone")
    job = _job(suite, place, changes) | {"twin": twin}
    python = _python(place.image)
    try:
        async with sandbox.open(_box(suite, place, python)) as box:
            result = await box.exec(
                [str(python.program), "-I", "-S", "-B", "-X", "utf8", "-c", _text_of(boot.__file__)],
                env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TZ": "UTC", **python.env},
                stdin=json.dumps(job).encode(),
                timeout_s=suite.wall_s,
                max_output=OUTPUT_BYTES,
            )
    except SandboxError as error:
        raise VerdictError(f"the tests' box failed: {error}") from error
    return TestRun(result=result, report=_started(result, report.read(result.stdout)))


def _box(suite: PytestSuite, place: Place, python: Interpreter) -> BoxSpec:
    hidden = (Mount(source=suite.tests, target=TESTS), Mount(source=suite.testenv, target=TESTENV))
    return BoxSpec(
        base=place.base,
        image=place.image,
        workdir=place.workdir,
        mounts=python.mounts + hidden,
        limits=replace(place.limits, deadline_s=box_s(suite.wall_s)),
    )


def _started(result: ExecResult, found: report.Report | None) -> report.Report:
    """The report; VerdictError where the run ended before any code under test could have run."""
    if found is None:
        said = result.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise VerdictError(f"the tests did not start (status {result.code}): {said}")
    return found


def interpreter() -> tuple[Path, tuple[Mount, ...]]:
    """The Python that runs tests, and what must be mounted (at its own path) for it to be in a box."""
    python = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    prefix = Path(sys.base_prefix).resolve()
    if prefix == Path("/usr"):
        return python, ()
    return python, (Mount(source=prefix, target=prefix),)


def _python(image: Image | None) -> Interpreter:
    """The same for a box of an image: at a place of its own, as the image's folders may be closed to the agent.

    A Python in /usr is the system's: then the image must have the same one.
    """
    program, mounts = interpreter()
    if image is None or not mounts:
        return Interpreter(program=program, mounts=mounts)
    return Interpreter(
        program=PYTHON / program.relative_to(mounts[0].source),
        mounts=(replace(mounts[0], target=PYTHON),),
        env={"LD_LIBRARY_PATH": str(PYTHON / "lib")},
    )


def pytest_arguments(tests: Path, test_file: str, plugins: Collection[str] = ()) -> list[str]:
    """Arguments that run one file of the folder `tests`, blind to every setting outside it."""
    off = [argument for plugin in _PLUGINS_OFF if plugin not in plugins for argument in ("-p", f"no:{plugin}")]
    place = ["-c", "/dev/null", f"--rootdir={tests}", f"--confcutdir={tests}"]
    speech = ["-q", "--color=no", "--tb=line", "--disable-warnings"]
    # Rewritten asserts and pytest's own tracebacks only word failures better, at up to 0.1 CPU-s for each.
    return [*off, *place, *speech, "--assert=plain", str(tests / test_file)]


def _read(task: Task, suite: PytestSuite, run: TestRun) -> Verdict:
    """The verdict of a finished run; VerdictError where the run was not ended by the changes under test."""
    result, found = run.result, run.report
    text = result.stderr.decode("utf-8", "replace")
    if result.oom:
        raise VerdictError(f"task {task.id}: the tests' box ran out of memory")
    if result.timed_out:
        return _failed(suite, f"{text}\nthe tests ran longer than {suite.wall_s:g} s", found)
    if result.code is None:
        raise VerdictError(f"task {task.id}: the tests' box was lost")
    if report.resolved(found, result.code, suite.required):
        return Verdict(outcome=Outcome.SOLVED, reward=1.0, passed=found.passed, log=clip(text))
    told = "".join(f"\ntampering: {what}" for what in found.tampering)
    if not found.whole:
        told += "\nthe record of the tests is not whole"
    return _failed(suite, f"{text}{told}\nexit status {result.code}", found)


def _failed(suite: PytestSuite, text: str, found: report.Report) -> Verdict:
    passed = found.passed if found.whole else ()
    missing = tuple(name for name in suite.required if name not in set(passed))
    return Verdict(
        outcome=Outcome.FAILED,
        reward=0.0,
        passed=passed,
        missing=missing,
        tampering=found.tampering,
        log=clip(text),
    )


def after_twin(suite: PytestSuite, verdict: Verdict, twin: TestRun) -> Verdict:
    """The verdict, unless tests that must fail do not: then something turns failures into passes.

    VerdictError where the second run broke off: the first one did not, and nothing of the work can tell them apart.
    """
    if not twin.believed and not twin.report.tampering:
        raise VerdictError(f"the run in which every test must fail broke off (status {twin.result.code})")
    unmoved = set(suite.required) - set(twin.report.failed)
    if twin.believed and not unmoved:
        return verdict
    told = f"{len(unmoved)} of {len(suite.required)} tests do not fail where they must"
    log = clip(f"{verdict.log}\ntampering: {told}")
    return replace(verdict, outcome=Outcome.FAILED, reward=0.0, tampering=(*twin.report.tampering, told), log=log)


def _job(suite: PytestSuite, place: Place, changes: Sequence[Change]) -> dict[str, object]:
    """What `boot` reads: links are laid last, so that nothing is written through one."""
    ordered = sorted(changes, key=lambda change: (change.kind == "symlink", change.kind != "deleted"))
    return {
        "root": str(place.workdir),
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
        "memory_bytes": int(MEMORY_SHARE * place.limits.memory_gib * (1 << 30)),
        "path": [str(TESTENV), *(str(place.workdir / root) for root in suite.roots)],
        "args": pytest_arguments(TESTS, suite.test_file, suite.plugins),
        "test_path": str(TESTS / suite.test_file),
        "witness": _text_of(witness.__file__),
    }


@functools.cache
def _text_of(file: str) -> str:
    return Path(file).read_text(encoding="utf-8")
