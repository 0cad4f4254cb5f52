"""However a run ends, nothing of it stays: no process, no mount, no box, no shared memory."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from lego.run import shared_folder
from sandbox.base import BoxSpec, Limits
from sandbox.bubble import Bubblewrap
from sandbox.docker import Docker
from sandbox.podman import Podman
from tests.sandbox.conftest import (
    DOCKER,
    HOST,
    PODMAN,
    containers,
    docker_sandbox,  # noqa: F401
    docker_socket,  # noqa: F401
    podman_sandbox,  # noqa: F401
)

ROOT = Path(__file__).parent.parent
ENOUGH_S = 15.0
S10_S = 10.0
"""What bug S10 gives a run to be gone."""


def left_behind(driver: int, mark: str, state: Path) -> list[str]:
    """Processes whose environment or command line names this run, mounts below its boxes, boxes, shared memory."""
    found = [f"mount {line.split()[1]}" for line in Path("/proc/mounts").read_text().splitlines() if str(state) in line]
    found += [f"box {box.name}" for box in state.glob("box-*")]
    found += [f"shared {path.name}" for path in Path("/dev/shm").glob(f"lego-*-{driver}-*")]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        except OSError:
            continue
        if mark.encode() in words:
            found.append(f"process {folder.name} {words[:80]!r}")
    return found


def started(tmp_path: Path, cache: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "lego.train", "recipes/demo.py", "--run-dir", str(tmp_path / "run")]
    command += ["--cache", str(cache), "--sandbox.state", str(tmp_path / "boxes")]
    # Engine and trainer are given no other word of ours than where temporary files go: it marks them.
    (tmp_path / "tmp").mkdir()
    env = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def until(condition, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.1)


def has_trials(folder: Path) -> bool:
    return (folder / "run/trials.jsonl").exists() and (folder / "run/trials.jsonl").stat().st_size > 0


def is_starting(folder: Path) -> bool:
    return (folder / "run/logs/vllm.log").exists()


@pytest.mark.harness
@pytest.mark.parametrize(
    ("end", "moment"),
    [(signal.SIGINT, is_starting), (signal.SIGINT, has_trials), (signal.SIGTERM, has_trials)],
    ids=["ctrl-c-at-start", "ctrl-c-in-trials", "term-in-trials"],
)
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, fetched_cache: Path, end: signal.Signals, moment):
    process = started(tmp_path, fetched_cache)
    until(lambda: moment(tmp_path) or process.poll() is not None, 120)
    process.send_signal(end)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said.decode()
    assert b"Traceback" not in said
    assert left_behind(process.pid, str(tmp_path), tmp_path / "boxes") == []
    assert (tmp_path / "run/summary.json").exists()
    assert not [path for path in (tmp_path / "tmp").iterdir() if path.is_socket()]


@pytest.mark.harness
def test_a_killed_run_leaves_no_process_and_its_boxes_can_be_reaped(tmp_path: Path, fetched_cache: Path):
    process = started(tmp_path, fetched_cache)
    until(lambda: has_trials(tmp_path) or process.poll() is not None, 120)
    process.kill()
    process.wait()

    def processes() -> list[str]:
        return [x for x in left_behind(process.pid, str(tmp_path), tmp_path / "boxes") if x.startswith("process")]

    until(lambda: not processes(), ENOUGH_S)
    subprocess.run([sys.executable, "-m", "sandbox.reap", str(tmp_path / "boxes")], check=True, cwd=ROOT)
    with shared_folder():  # as the next run does at its start
        assert left_behind(process.pid, str(tmp_path), tmp_path / "boxes") == []


@dataclass(frozen=True)
class Launched:
    """A driver (`tests/endings_driver.py`) whose agent is busy, and what would be left of it."""

    process: subprocess.Popen[str]
    sandbox: Bubblewrap | Podman | Docker
    folder: Path
    ports: tuple[int, int]
    nap: str

    def remains(self) -> list[str]:
        """Its processes, open ports, containers, box folders and their mounts."""
        pid = self.process.pid
        marks = [str(self.folder), f"service-{pid}-", f"sleep {self.nap}"]
        found = [line for line in command_lines() if any(mark in line for mark in marks)]
        found += [f"port {port}" for port in self.ports if is_open(port)]
        found += [f"container {one}" for one in containers(self.sandbox)]
        found += [f"box {path}" for path in self.sandbox.state_folder().glob(f"box-{pid}-*")]
        return found + [line for line in Path("/proc/self/mounts").read_text().splitlines() if f"/box-{pid}-" in line]

    def agents(self) -> int:
        return sum(line.startswith(f"sleep {self.nap}") for line in command_lines())

    def end(self, end: signal.Signals | None) -> str:
        """Ends it by a signal or, for None, by an exception inside; its last words."""
        if end is None:
            (self.folder / "boom").touch()
        else:
            self.process.send_signal(end)
        return self.process.communicate(timeout=S10_S)[1]


def command_lines() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found


def is_open(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def two_ports() -> tuple[int, int]:
    with ExitStack() as stack:
        one, two = (stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2))
        return one.getsockname()[1], two.getsockname()[1]


@contextmanager
def launched(sandbox: Bubblewrap | Podman | Docker, folder: Path, ports: tuple[int, int]) -> Iterator[Launched]:
    (folder / "base").mkdir(exist_ok=True)
    spec = BoxSpec(base=folder / "base", limits=Limits(memory_gib=0.5, pids=64, disk_mib=16, deadline_s=120.0))
    nap = f"{random.randrange(10**6, 10**7)}"
    words = [str(folder), *map(str, ports), repr(sandbox), repr(spec), nap]
    command = [sys.executable, "-m", "tests.endings_driver", *words]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            one = Launched(process, sandbox, folder, ports, nap)
            until(lambda: (one.agents() == 2 and all(map(is_open, ports))) or process.poll() is not None, 60)
            assert process.poll() is None, process.communicate()[1]
            yield one
        finally:
            process.kill()


@pytest.fixture(params=[HOST, PODMAN, DOCKER])
def sandbox(request: pytest.FixtureRequest, tmp_path: Path) -> Bubblewrap | Podman | Docker:
    if request.param == "bubblewrap":
        return Bubblewrap(state=tmp_path / "boxes")
    return request.getfixturevalue(f"{request.param}_sandbox")


ENDS = [
    pytest.param("bubblewrap", None, id="bubblewrap-exception"),  # the signals: above, with a whole run
    *(
        pytest.param(name, end, id=f"{name}-{end.name if end else 'exception'}", marks=getattr(pytest.mark, name))
        for name in ("podman", "docker")
        for end in (None, signal.SIGINT, signal.SIGTERM)
    ),
]


@pytest.mark.parametrize(("sandbox", "end"), ENDS, indirect=["sandbox"])
def test_s10_nothing_is_left_ten_seconds_after_an_end(sandbox, end: signal.Signals | None, tmp_path: Path):
    with launched(sandbox, tmp_path, two_ports()) as run:
        assert len(run.remains()) > 6, "the test sees what there is"
        begun = time.monotonic()
        said = run.end(end)
        assert "Boom" in said if end is None else (run.process.returncode, said) == (130, "interrupted\n"), said
        until(lambda: not run.remains(), S10_S - (time.monotonic() - begun))


def test_s10_a_killed_launcher_leaves_only_what_the_next_start_removes(sandbox, tmp_path: Path):
    """Containers have no parent of ours: they live until then, or until their deadline."""
    ports = two_ports()
    with launched(sandbox, tmp_path, ports) as run:
        run.end(signal.SIGKILL)
        of_container = 0 if isinstance(sandbox, Bubblewrap) else 2
        until(lambda: not any(map(is_open, ports)), S10_S)
        until(lambda: run.agents() == of_container, S10_S)
        until(lambda: not [line for line in run.remains() if str(tmp_path) in line and "python" in line], S10_S)
        (tmp_path / "again").mkdir()
        with launched(sandbox, tmp_path / "again", ports) as again:
            until(lambda: not run.agents(), S10_S)
            assert [line for line in run.remains() if f"box-{run.process.pid}-" in line] == []
            again.end(signal.SIGINT)
        until(lambda: not run.remains(), S10_S)
