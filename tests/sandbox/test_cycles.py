"""Two hundred boxes (forty for an ordinary user), several at a time, leave this host as one box left it."""

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from sandbox.base import BoxSpec, Sandbox
from sandbox.cgroup import this_hierarchy
from sandbox.docker import Docker
from sandbox.podman import Podman
from tests.sandbox.conftest import Backend

CYCLES, AT_ONCE = 200 if os.geteuid() == 0 else 40, 8
PATIENCE_S, CONMON_S = 30.0, 6.0
"""An engine's watcher of a container may outlive it by some seconds; Podman's by five."""


@dataclass(frozen=True)
class Census:
    """What of ours there is on this host."""

    processes: tuple[str, ...]
    namespaces: int
    mounts: int
    groups: tuple[str, ...]
    fds: int
    files: int
    mib: int


@dataclass(frozen=True)
class Place:
    """Where a backend keeps its files, and the words by which its processes are known."""

    folders: tuple[Path, ...]
    marks: tuple[str, ...]


def place_of(backend: Backend) -> Place:
    match backend.sandbox:
        case Podman(storage=Path() as storage):
            return Place((backend.state, storage), (str(storage),))
        case Docker(socket=socket):
            data = socket.parent / "data"
            daemon = Path("/proc", (socket.parent / "pid").read_text(), "cmdline").read_text().split("\0")
            return Place((backend.state, data), (str(data), daemon[daemon.index("--exec-root") + 1]))
        case _:
            return Place((backend.state,), (str(backend.state),))


def census(place: Place, groups: set[str]) -> Census:
    family = relatives(place)
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    files = [status for folder in place.folders for status in contents(folder)]
    return Census(
        processes=tuple(sorted(name_of(process) for process in family)),
        namespaces=len(set().union(*map(namespaces, family))),
        mounts=sum(f" {folder}/" in line for line in mounts for folder in place.folders),
        groups=tuple(sorted(group for group in groups if Path(group).is_dir())),
        fds=len(list(Path("/proc/self/fd").iterdir())),
        files=len(files),
        mib=sum(status.st_blocks for status in files) >> 11,
    )


def contents(top: Path) -> Iterator[os.stat_result]:
    """Every file and folder of one file system."""
    for folder, names, files in os.walk(top):
        names[:] = [name for name in names if not os.path.ismount(Path(folder, name))]
        for name in [*names, *files]:
            with contextlib.suppress(FileNotFoundError):
                yield Path(folder, name).lstat()


def relatives(place: Place) -> list[psutil.Process]:
    """Our children, whoever has one of the marks in its command, and all children of these."""
    marked = [one for one in psutil.process_iter() if any(mark in " ".join(words(one)) for mark in place.marks)]
    found = {child for root in [psutil.Process(), *marked] for child in children(root)} | {*marked}
    return list(found - {psutil.Process()})


def words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def name_of(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return "gone"


def namespaces(process: psutil.Process) -> set[str]:
    try:
        return {str(path.readlink()) for path in Path(f"/proc/{process.pid}/ns").iterdir()}
    except OSError:
        return set()


def groups_of(place: Place) -> set[str]:
    """Folders of the control groups that our relatives are in, but not we ourselves."""
    hierarchy = this_hierarchy()
    tops = {name: mount_point(folder) for name, folder in hierarchy.folders.items()}
    if hierarchy.version == "v2":
        tops[""] = tops["memory"]
    own = group_rows(os.getpid())
    rows = {row for process in relatives(place) for row in group_rows(process.pid)} - own
    made = {(name, group) for names, group in rows for name in names.split(",") if name in tops and group != "/"}
    return {f"{tops[name]}{group}" for name, group in made}


def group_rows(pid: int) -> set[tuple[str, str]]:
    """Controllers and group, for each line of a process's list of groups."""
    try:
        rows = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return set()
    return {(names, group) for _, names, group in (row.split(":", 2) for row in rows)}


def mount_point(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.is_mount())


async def test_boxes_leave_nothing_that_grows(sandbox: Sandbox, spec: BoxSpec, backend: Backend):
    slots = asyncio.Semaphore(AT_ONCE)
    groups: set[str] = set()
    place = place_of(backend)

    async def cycle(number: int) -> None:
        async with slots, sandbox.open(spec) as box:
            script = f"(setsid sleep 300 &); echo {number} > README; echo {number}"
            result = await box.exec(["sh", "-c", script], timeout_s=60)
            assert result.stdout.split() == [str(number).encode()], result
            if number % 25 < AT_ONCE:
                groups.update(groups_of(place))

    async def cycles(count: int) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(cycle(number))

    await cycles(AT_ONCE)
    before = await settled(place, groups, None)
    await cycles(CYCLES)
    assert groups or not this_hierarchy().folders
    assert await settled(place, groups, before) == before


async def settled(place: Place, groups: set[str], wanted: Census | None) -> Census:
    """The count once it is as wanted, or once it has stayed the same for a while, or when patience ends."""
    deadline, last = time.monotonic() + PATIENCE_S, None
    while (now := census(place, groups)) != wanted and time.monotonic() < deadline:
        if wanted is None and now == last:
            break
        last = now
        await asyncio.sleep(0.5 if wanted else CONMON_S)
    return now
