"""What a box costs, and a whole trial with its verdict, beside the bare tool's own time.

`python tools/bench/boxes.py [--json] [--only NAME] [--most N]`: the life of a box is open, run `true`, close. A trial
is an edit in one box and the verdict of hidden tests in fresh ones, with no model and no harness. The bare tool does
the same steps in the same run: `bwrap` with the same namespaces, mounts and filter, and the engines through their own
libraries with the same settings. 1, 8, 32 and 64 at once. Backends that this host does not have are skipped with the
reason.

Bare `bwrap` becomes the command, and knows no limits: it leaves out the control groups and the first process of a box,
which takes commands for as long as the box lives and is a start of Python.
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest

from lego.tasks.pytest_verifier import TESTENV, TESTS, interpreter, pytest_arguments
from lego.tasks.task import PytestSuite, Script, Task
from lego.tasks.verdict import Grader
from sandbox import docker, podman
from sandbox.base import BoxSpec, Limits, Mount, Sandbox, SandboxError, StoredImage
from sandbox.bubble import NAMESPACES, Bubblewrap, bwrap_path
from sandbox.description import ulimits, users
from sandbox.pipes import memory_file
from sandbox.pool import warm
from sandbox.rootfs import HOME, files_folder, layout
from sandbox.seccomp import filter_bytes
from sandbox.state import BoxFolder, private_folder

if TYPE_CHECKING:
    from podman.domain.containers import Container as PodmanContainer

IMAGE = "localhost/lego-base:1"
IMAGE_TAR = Path.home() / ".cache" / "lego" / "base-image.tar"
AT_ONCE = (1, 8, 32, 64)
ROUNDS = {1: 9, 8: 3, 32: 1, 64: 1}
TRIES = 50
LIFE_BAR = 1.3
TRIAL_BAR_S = {"bubblewrap": 0.5, "podman": 2.0, "docker": 2.0}
LIMITS = Limits(memory_gib=1.0, pids=64, cpus=2.0, disk_mib=64)
TEST_PACKAGES = ("_pytest", "pytest", "pluggy", "iniconfig", "packaging", "pygments")
SOURCE = "def largest(numbers):\n    return min(numbers)\n"
HIDDEN = "import toy\n\ndef test_largest():\n    assert toy.largest([1, 3, 2]) == 3\n"
EDIT = ("sed", "-i", "s/min/max/", "toy.py")
PYTEST = "import sys; sys.path[:0] = {path!r}; import pytest; sys.exit(pytest.main({arguments!r}))"
ON_IMAGE = "PYTHONPATH=/repo python3 -B -m pytest -q -p no:cacheprovider -c /dev/null --rootdir=/tests /tests"
TEST_SH = f"""reward=0
{ON_IMAGE} && reward=1
echo $reward > /logs/verifier/reward.txt
"""
"""For containers: the pytest of their image."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One number beside its baseline."""

    name: str
    value: float
    baseline: float
    ratio: float
    bar: float
    ok: bool


class Bare(Protocol):
    """The tool without us."""

    async def run(self, argv: Sequence[str], work: Path, mounts: Sequence[Mount]) -> None:
        """Makes a box that shows `work` to write and `mounts` to read, runs one command in it and removes it."""
        ...


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One backend, and the same tool bare."""

    name: str
    sandbox: Sandbox
    bare: Bare


@dataclass(frozen=True)
class BareBwrap:
    """A `bwrap` process a command."""

    state: Path
    threads: ThreadPoolExecutor

    async def run(self, argv: Sequence[str], work: Path, mounts: Sequence[Mount]) -> None:
        await asyncio.get_running_loop().run_in_executor(self.threads, self._run, argv, work, mounts)

    def _run(self, argv: Sequence[str], work: Path, mounts: Sequence[Mount]) -> None:
        spec = BoxSpec(base=work, mounts=tuple(mounts), limits=LIMITS)
        with tempfile.TemporaryDirectory() as place, memory_file(filter_bytes(os.uname().machine) or b"") as seccomp:
            folder = BoxFolder(Path(place, "box"))
            folder.path.mkdir()
            if folder.fill(work, LIMITS.disk_mib):
                folder.fill_devices()
            files = ["--bind", str(work), str(spec.workdir), "--chdir", str(spec.workdir)]
            command = [bwrap_path(), *NAMESPACES, *layout(spec, folder, files_folder(private_folder(self.state)), ())]
            try:
                subprocess.run(
                    [*command, *files, "--seccomp", str(seccomp), "--", *argv], check=True, pass_fds=[seccomp],
                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={},
                )  # fmt: skip
            finally:
                folder.remove()


@dataclass(frozen=True)
class BarePodman:
    """Podman through podman-py, which blocks a thread."""

    socket: Path
    threads: ThreadPoolExecutor

    async def run(self, argv: Sequence[str], work: Path, mounts: Sequence[Mount]) -> None:
        await asyncio.get_running_loop().run_in_executor(self.threads, self._run, argv, work, mounts)

    def _run(self, argv: Sequence[str], work: Path, mounts: Sequence[Mount]) -> None:
        from podman import PodmanClient

        binds = [("bind", str(work), "/repo", False), *(("bind", str(m.source), str(m.target), True) for m in mounts)]
        shown = [{"type": kind, "source": s, "target": t, "read_only": ro} for kind, s, t, ro in binds]
        memory = [{"type": "tmpfs", "target": t, "size": "64m"} for t in ("/tmp", "/var/tmp", str(HOME))]
        most = [{"Name": name, "Soft": value, "Hard": value} for name, value in ulimits(LIMITS).items()]
        with PodmanClient(base_url=f"unix://{self.socket}", timeout=300) as client:
            container = client.containers.create(
                IMAGE, ["sleep", "600"], network_mode="none", init=True, read_only=True, cap_drop=["all"],
                no_new_privileges=True, mem_limit="1g", memswap_limit="1g", pids_limit=64, cpu_period=100_000,
                cpu_quota=200_000, mounts=[*shown, *memory], log_config={"Type": "none"}, ulimits=most,
                userns_mode=str(users()["userns"]["nsmode"]), idmappings=users().get("idmappings"),
            )  # fmt: skip
            container.start()
            code, said = container.exec_run(list(argv), workdir="/repo")
            removed(container)
            if code:
                raise SystemExit(f"bare podman: {argv} ended with {code}: {said!r}")


def removed(container: "PodmanContainer") -> None:
    """Tries again where other containers that come and go keep Podman from a mount; it may be gone by then."""
    from podman.errors import APIError, NotFound

    for left in reversed(range(TRIES)):
        try:
            return container.remove(force=True)
        except NotFound:
            return None
        except APIError:
            if not left:
                raise
            time.sleep(0.02)


@dataclass(frozen=True)
class BareDocker:
    """A Docker daemon through aiodocker."""

    socket: Path

    async def run(self, argv: Sequence[str], work: Path, mounts: Sequence[Mount]) -> None:
        import aiodocker

        binds = [f"{work}:/repo", *(f"{mount.source}:{mount.target}:ro" for mount in mounts)]
        host = {
            "NetworkMode": "none", "Init": True, "ReadonlyRootfs": True, "CapDrop": ["ALL"], "Binds": binds,
            "SecurityOpt": ["no-new-privileges"], "Memory": 1 << 30, "MemorySwap": 1 << 30, "PidsLimit": 64,
            "NanoCpus": 2 * 10**9, "Tmpfs": dict.fromkeys(("/tmp", "/var/tmp", str(HOME)), "rw,exec,size=64m"),
        }  # fmt: skip
        async with aiodocker.Docker(f"unix://{self.socket}") as client:
            container = await client.containers.create({"Image": IMAGE, "Cmd": ["sleep", "600"], "HostConfig": host})
            await container.start()
            command = await container.exec(list(argv), workdir="/repo")
            async with command.start() as stream:
                while await stream.read_out():
                    pass
            seen = await command.inspect()
            await container.delete(force=True)
            if seen["ExitCode"]:
                raise SystemExit(f"bare docker: {argv} ended with {seen['ExitCode']}")


@asynccontextmanager
async def bubblewrap(place: Path) -> AsyncIterator[Contender]:
    """Needs nothing but its wheel and user namespaces."""
    threads = ThreadPoolExecutor(max(AT_ONCE))
    yield Contender(name="bubblewrap", sandbox=Bubblewrap(state=place / "boxes"), bare=BareBwrap(place / "b", threads))


@asynccontextmanager
async def by_podman(place: Path) -> AsyncIterator[Contender]:
    """A store of its own with the base image."""
    if not IMAGE_TAR.exists():
        raise SandboxError(f"{IMAGE_TAR} is missing: python tools/base_image.py")
    spec = podman.Podman(image=StoredImage(name=IMAGE), storage=place / "storage", state=place / "state")
    engine = podman.engine(spec)
    try:
        await engine.load(IMAGE_TAR, IMAGE)
        socket = engine.service.socket_path()
        bare = BarePodman(socket, ThreadPoolExecutor(max(AT_ONCE)))
        yield Contender(name="podman", sandbox=spec, bare=bare)
    finally:
        podman.release(spec)


@asynccontextmanager
async def by_docker(place: Path, socket: Path) -> AsyncIterator[Contender]:
    """A daemon that runs already; the base image must be in its store."""
    spec = docker.Docker(image=StoredImage(name=IMAGE), socket=socket, state=place / "state")
    await spec.prepare([StoredImage(name=IMAGE)])
    yield Contender(name="docker", sandbox=spec, bare=BareDocker(socket))


# A box


async def life(sandbox: Sandbox, base: Path) -> None:
    """Open, run `true`, close."""
    async with sandbox.open(BoxSpec(base=base, limits=LIMITS)) as box:
        result = await box.exec(["true"])
        if result.code != 0:
            raise SystemExit(f"true ended with {result}")


async def box_findings(contender: Contender, place: Path, most: int) -> list[Finding]:
    """Seconds a box, so many at once, beside the bare tool."""
    base = make_base(place / "base")
    found = []
    for count in (count for count in AT_ONCE if count <= most):
        works = [make_base(place / f"work-{count}-{number}") for number in range(count)]
        ours, bare = await raced(
            lambda works=works: together(life(contender.sandbox, base) for _ in works),
            lambda works=works: together(contender.bare.run(["true"], work, ()) for work in works),
            ROUNDS[count],
        )
        found.append(beside(f"{contender.name}: ms a box, {count} at once", ours, bare, 1000 / count))
    return found


async def pool_finding(contender: Contender, place: Path) -> Finding:
    """Milliseconds until a box can be used: opened ahead, beside a new one."""
    spec = BoxSpec(base=make_base(place / "pooled"), limits=LIMITS)

    async def wait(sandbox: Sandbox) -> float:
        begun = time.perf_counter()
        async with sandbox.open(spec):
            return time.perf_counter() - begun

    async with warm(contender.sandbox, size=1) as pool:
        ahead, fresh = [], []
        for _ in range(ROUNDS[1]):
            pool.expect(spec)
            await asyncio.sleep(1.0)
            ahead.append(await wait(pool))
            fresh.append(await wait(contender.sandbox))
    return beside(f"{contender.name}: ms to get a box, from a warm pool", ahead, fresh, 1000, bar=1.0)


# A trial


def make_task(place: Path, *, on_image: bool) -> Task:
    """One function with a bug, and a hidden test that pytest runs: our own for our verifier, or that of an image."""
    tests = place / "tests"
    tests.mkdir()
    (tests / "test_toy.py").write_text(HIDDEN)
    (tests / "test.sh").write_text(TEST_SH)
    verifier = Script(folder=tests, user="agent") if on_image else make_suite(tests, place / "testenv")
    base = make_base(place / "task")
    return Task(
        id="bench", package="toy", split="train", digest="0", base=base, instruction="Fix it.", verifier=verifier
    )


def make_suite(tests: Path, testenv: Path) -> PytestSuite:
    """The hidden test with the pytest that runs this."""
    installed = Path(pytest.__file__).parent.parent
    for name in TEST_PACKAGES:
        shutil.copytree(installed / name, testenv / name)
    shutil.copy(installed / "py.py", testenv)
    return PytestSuite(tests=tests, test_file="test_toy.py", testenv=testenv, fail_to_pass=("test_toy::test_largest",))


async def trial(sandbox: Sandbox, task: Task) -> None:
    """The edit of a scripted agent, its changes, and their verdict."""
    async with sandbox.open(BoxSpec(base=task.base, limits=LIMITS)) as box:
        await box.exec(list(EDIT))
        await box.kill()
        changes = await box.changes()
    verdict = await Grader(sandbox).grade(task, changes)
    if verdict.reward != 1.0:
        raise SystemExit(f"the fix was not rewarded: {verdict}")


async def bare_trial(bare: Bare, task: Task, work: Path) -> None:
    """The same commands, each in a box of its own: the edit, and what the verdict runs."""
    (work / "toy.py").write_text(SOURCE)
    await bare.run(EDIT, work, ())
    if isinstance(task.verifier, Script):
        await bare.run(["sh", "-c", ON_IMAGE], work, [Mount(source=task.verifier.folder, target=Path("/tests"))])
    else:
        await bare_suite(bare, task.verifier, work)


async def bare_suite(bare: Bare, suite: PytestSuite, work: Path) -> None:
    """Pytest twice, as a verdict that is sure of a fix does."""
    program, mounts = interpreter()
    mounts += (Mount(source=suite.tests, target=TESTS), Mount(source=suite.testenv, target=TESTENV))
    code = PYTEST.format(path=[str(TESTENV), "/repo"], arguments=pytest_arguments(TESTS, suite.test_file))
    for _ in range(2):
        await bare.run([str(program), "-I", "-S", "-B", "-c", code], work, mounts)


async def trial_findings(contender: Contender, place: Path, most: int) -> list[Finding]:
    """Seconds a trial, so many at once; one alone has a bar in seconds."""
    task, found = make_task(place, on_image=contender.name != "bubblewrap"), []
    for count in (count for count in AT_ONCE if count <= most):
        works = [make_base(place / f"trial-{count}-{number}") for number in range(count)]
        ours, bare = await raced(
            lambda works=works: together(trial(contender.sandbox, task) for _ in works),
            lambda works=works: together(bare_trial(contender.bare, task, work) for work in works),
            ROUNDS[count],
        )
        finding = beside(f"{contender.name}: s a trial with verdict, {count} at once", ours, bare, 1 / count)
        found.append(in_seconds(finding, TRIAL_BAR_S[contender.name]) if count == 1 else finding)
    return found


# Measuring


def make_base(folder: Path) -> Path:
    """A small folder that any user may change, as a bare container's is another's on the host."""
    folder.mkdir(parents=True)
    (folder / "toy.py").write_text(SOURCE)
    (folder / "toy.py").chmod(0o666)
    folder.chmod(0o777)
    return folder


async def together(works: Iterable[Awaitable[None]]) -> None:
    await asyncio.gather(*works)


async def raced(
    ours: Callable[[], Awaitable[None]], bare: Callable[[], Awaitable[None]], rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of both in turn, so that what else the host does falls on both; a first round is not counted."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 1):
        for work, into in zip((ours, bare), seconds, strict=True):
            begun = time.perf_counter()
            await work()
            into.append(time.perf_counter() - begun)
    return seconds[0][1:], seconds[1][1:]


def beside(name: str, ours: Sequence[float], bare: Sequence[float], unit: float, bar: float = LIFE_BAR) -> Finding:
    """Medians, and the median of the rounds' ratios; less is better."""
    ratio = round(statistics.median(a / b for a, b in zip(ours, bare, strict=True)), 2)
    value, baseline = (round(statistics.median(times) * unit, 3) for times in (ours, bare))
    return Finding(name=name, value=value, baseline=baseline, ratio=ratio, bar=bar, ok=ratio <= bar)


def in_seconds(finding: Finding, bar_s: float) -> Finding:
    """The same, held against seconds instead of a ratio."""
    return Finding(**asdict(finding) | {"bar": bar_s, "ok": finding.value <= bar_s})


def show(found: Sequence[Finding], as_json: bool) -> None:
    if as_json:
        print("\n".join(json.dumps(asdict(finding)) for finding in found), flush=True)
        return
    for f in found:
        row = f"{f.value:>9.3f} {f.baseline:>9.3f} {f.ratio:>7.2f} {f.bar:>6.2f}{'' if f.ok else '  NO'}"
        print(f"{f.name:<52} {row}", flush=True)


async def measure(name: str, socket: Path, most: int, as_json: bool) -> None:
    """All of one backend; a line on stderr where it is not here."""
    with tempfile.TemporaryDirectory(prefix="lego-bench-", ignore_cleanup_errors=True) as folder:
        place = Path(folder)
        opened = {"bubblewrap": bubblewrap, "podman": by_podman, "docker": lambda p: by_docker(p, socket)}[name](place)
        async with AsyncExitStack() as stack:
            try:
                contender = await stack.enter_async_context(opened)
                await life(contender.sandbox, make_base(place / "first"))
            except SandboxError as error:
                print(f"{name} is skipped: {error}", file=sys.stderr, flush=True)
                return
            show([await pool_finding(contender, place)], as_json)
            show(await box_findings(contender, place, most), as_json)
            show(await trial_findings(contender, place, most), as_json)


def main() -> int:
    parser = argparse.ArgumentParser(description="What a box and a trial cost beside the bare tool.")
    parser.add_argument("--json", action="store_true", help="one object a line instead of a table")
    parser.add_argument("--only", choices=TRIAL_BAR_S, help="one backend instead of all that are here")
    parser.add_argument("--most", type=int, default=max(AT_ONCE), help="the most at once (default: %(default)s)")
    parser.add_argument("--docker-socket", type=Path, default=docker.SOCKET, help="of the Docker daemon")
    options = parser.parse_args()
    if not options.json:
        print("seconds; bar: the most that ours may cost, in bare tools or s a trial; NO: above it, on an idle host")
        print(f"{'':<52} {'ours':>9} {'bare':>9} {'ratio':>7} {'bar':>6}")
    for name in [options.only] if options.only else TRIAL_BAR_S:
        asyncio.run(measure(name, options.docker_socket, options.most, options.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
