"""A driver is killed in the middle of a box's life, beside one that lives: what it left goes, and nothing else."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandbox import images, podman, reap
from sandbox.base import BoxSpec
from sandbox.bubble import Bubblewrap
from sandbox.docker import Docker, connected
from sandbox.engine import BOX_LABEL, OWNER_LABEL, Engine
from sandbox.podman import Podman
from sandbox.state import dead_box_folders, owner_lives, this_owner
from tests.sandbox.conftest import DOCKER, PODMAN, Backend
from tools.base_image import NAME

DRIVER = """
import asyncio, sys
from pathlib import Path, PosixPath
from sandbox.base import BoxSpec, FolderImage, Limits, StoredImage
from sandbox.bubble import Bubblewrap
from sandbox.docker import Docker, DockerEngine
from sandbox.podman import Podman, PodmanEngine

def told(cls, name):
    real = getattr(cls, name)
    async def call(self, *args):
        print(name, flush=True)
        return await real(self, *args)
    setattr(cls, name, call)

for name in ("create", "start", "exec", "remove"):
    told(DockerEngine, name)
    told(PodmanEngine, name)

async def main():
    async with eval(sys.argv[1]).open(eval(sys.argv[2])) as box:
        print("open", flush=True)
        await box.exec(["sh", "-c", "echo x > new; setsid sleep 4323 & sleep 0.3"])
    print("closed", flush=True)

asyncio.run(main())
"""
DELAYS_MS = (0, 15, 60)
SETTLE_S = 1.0
"""An engine goes on with what it was told by somebody who is gone."""


@contextmanager
def driver(backend: Backend, spec: BoxSpec) -> Iterator[subprocess.Popen[str]]:
    """A process that opens a box and tells what it does, line by line; killed at the end."""
    command = [sys.executable, "-c", DRIVER, repr(backend.sandbox), repr(spec)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(reap.__file__).parent.parent)
    with process:
        yield process
        process.kill()


def read_until(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if line == f"{word}\n":
            return
    pytest.fail(f"the driver ended without {word!r}: {lines}")


async def kill_at(backend: Backend, spec: BoxSpec, word: str, delay_ms: int) -> None:
    with driver(backend, spec) as process:
        await asyncio.to_thread(read_until, process, word)
        await asyncio.sleep(delay_ms / 1000)


def arguments(backend: Backend) -> list[str]:
    """How `python -m sandbox.reap` finds this backend's places."""
    own = [str(backend.state), "--backend", backend.name.removesuffix("-image")]
    match backend.sandbox:
        case Podman(storage=storage):
            return [*own, "--storage", str(storage)]
        case Docker(socket=socket):
            return [*own, "--socket", str(socket)]
        case _:
            return own


async def dead_containers(backend: Backend) -> list[str]:
    """Ids of the containers whose driver is gone."""
    match backend.sandbox:
        case Podman():
            return await _dead(podman.engine(backend.sandbox))
        case Docker(socket=socket):
            async with connected(socket) as engine:
                return await _dead(engine)
        case _:
            return []


async def _dead(engine: Engine) -> list[str]:
    found = await engine.listed(OWNER_LABEL)
    return [one.id for one in found if not owner_lives(one.labels[OWNER_LABEL])]


def on_host(names: list[str]) -> list[str]:
    """Mounts, control groups and processes of boxes and containers with these names, and of their commands."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    groups = [top for top, _, _ in os.walk("/sys/fs/cgroup")]
    found = [place for place in (*mounts, *groups) if any(name in place for name in names)]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if any(name in line for name in names) or line.startswith("sleep 4323"):
            found.append(line)
    return found


async def nothing_is_left(backend: Backend, live: str) -> None:
    """Reaps as the next start does; only the box of the folder `live` may be there then."""
    names = [path.name for path in backend.state.glob("box-*") if path.name != live]
    names += await dead_containers(backend)
    assert await asyncio.to_thread(reap.main, arguments(backend)) == 0
    assert await dead_containers(backend) == []
    assert dead_box_folders(backend.state) == []
    async with asyncio.timeout(20):  # conmon stays for some seconds after its command
        while left := on_host(names):  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0.2)
    assert left == []


@pytest.mark.parametrize("word", ["create", "start", "exec", "remove"])
@pytest.mark.parametrize("backend", [PODMAN, DOCKER], indirect=True)
async def test_a_driver_killed_in_any_call_leaves_nothing_after_the_next_reap(
    backend: Backend, spec: BoxSpec, word: str
):
    async with backend.sandbox.open(spec) as box:
        (live,) = [path.name for path in backend.state.glob("box-*")]
        await box.exec(["sh", "-c", "echo live > new; setsid sleep 600 &"])
        for delay_ms in DELAYS_MS:
            await kill_at(backend, spec, word, delay_ms)
        await asyncio.sleep(SETTLE_S)
        await nothing_is_left(backend, live)
        result = await box.exec(["sh", "-c", "cat new; pgrep -c sleep"])
        assert result.stdout == (b"live\n2\n" if backend.image else b"live\n1\n"), result
    assert backend.remains() == []


@pytest.mark.parametrize("delay_ms", [0, 5, 10, 20, 40, 80, 160, 320])
async def test_a_driver_killed_at_any_time_leaves_nothing(backend: Backend, spec: BoxSpec, delay_ms: int):
    with driver(backend, spec) as process:
        while process.poll() is None and not list(backend.state.glob("box-*")):  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0.001)
        assert process.poll() is None
        await asyncio.sleep(delay_ms / 1000)
    await asyncio.sleep(0.1)
    await nothing_is_left(backend, live="")


async def test_reapers_at_the_same_time_do_no_harm(backend: Backend, spec: BoxSpec):
    async with backend.sandbox.open(spec) as box:
        (live,) = [path.name for path in backend.state.glob("box-*")]
        for _ in range(3):
            await kill_at(backend, spec, "open", 100)
        assert len(dead_box_folders(backend.state)) == 3
        command = [sys.executable, "-m", "sandbox.reap", *arguments(backend)]
        reapers = [await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE) for _ in range(4)]
        said = [(await one.communicate())[1].decode() for one in reapers]
        assert [one.returncode for one in reapers] == [0] * 4, said
        await nothing_is_left(backend, live)
        assert (await box.exec(["true"])).code == 0
    assert backend.remains() == []


async def test_removers_of_the_same_boxes_do_not_meet(tmp_path: Path):
    sandbox = Bubblewrap(state=tmp_path / "state")
    dead = this_owner().replace(f"{os.getpid()}-", "4194305-")
    for number in range(20):
        for part in range(20):
            (sandbox.state_folder() / f"box-{dead}-{number}" / "rw" / "upper" / f"{part}" / "deep").mkdir(parents=True)
    sandbox.state_folder().chmod(0o700)
    await asyncio.gather(*(sandbox.reap() for _ in range(4)))
    assert list(sandbox.state_folder().glob("box-*")) == []


@pytest.mark.parametrize("backend", [PODMAN, DOCKER], indirect=True)
async def test_what_a_copy_out_of_an_image_left_is_removed(backend: Backend, monkeypatch: pytest.MonkeyPatch):
    dead = this_owner().replace(f"{os.getpid()}-", "4194305-")
    monkeypatch.setattr(images, "this_owner", lambda: dead)
    one = images._never_run(NAME)
    monkeypatch.undo()
    assert one.labels[BOX_LABEL] == one.name
    match backend.sandbox:
        case Podman():
            await podman.engine(backend.sandbox).create(one)
        case Docker(socket=socket):
            async with connected(socket) as engine:
                await engine.create(one)
    assert len(await dead_containers(backend)) == 1
    assert await backend.sandbox.reap() == 1
    assert backend.remains() == []


def test_backends_that_are_not_here_are_left_out_unless_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("PATH", str(tmp_path))
    where = [str(tmp_path / "state"), "--socket", str(tmp_path / "none.sock")]
    with caplog.at_level("INFO"):
        assert reap.main(where) == 0
    assert "bubblewrap: removed 0 left-over boxes" in caplog.text
    assert "podman: left out, there is no program of this name" in caplog.text
    assert f"docker: left out, no Docker daemon: there is no socket {tmp_path / 'none.sock'}" in caplog.text
    caplog.clear()
    with caplog.at_level("INFO"):
        assert reap.main([*where, "--backend", "docker"]) == 1
    assert "docker: cannot remove left-over boxes in" in caplog.text and "bubblewrap" not in caplog.text
