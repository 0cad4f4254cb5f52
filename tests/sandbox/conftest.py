"""A small base folder, a sandbox with a state folder of its own, and the check that a test leaves nothing behind."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.base import Box, BoxSpec
from sandbox.bubble import Bubblewrap, hierarchy


def remains(state: Path) -> list[str]:
    """Boxes of a state folder, their mounts, control groups and processes, that still exist."""
    boxes = [str(path) for path in state.glob("box-*")]
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f" {state}/" in line]
    groups = [
        str(path) for folder in hierarchy().folders.values() for path in folder.glob("box-*") if ours(path, state)
    ]
    return boxes + mounts + groups + processes(state)


def ours(group: Path, state: Path) -> bool:
    """Whether a control group belongs to this process (other runs on this machine have theirs)."""
    return group.name.startswith(f"box-{os.getpid()}-") or (state / group.name).exists()


def processes(state: Path) -> list[str]:
    """Command lines of bwrap processes for boxes of this state folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if "bwrap" in line and str(state) in line:
            found.append(line)
    return found


async def process_count(box: Box) -> int:
    """Processes in the box: its first one and the one that counts are always there."""
    return len((await box.exec(["sh", "-c", "echo /proc/[0-9]*"])).stdout.split())


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def sandbox(state: Path) -> Iterator[Bubblewrap]:
    yield Bubblewrap(state=state)
    assert remains(state) == []


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    (folder / "pkg" / "deep").mkdir(parents=True)
    (folder / "pkg" / "a.py").write_text("A = 1\n")
    (folder / "pkg" / "deep" / "b.py").write_text("B = 2\n")
    (folder / "README").write_text("read me\n")
    (folder / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("README")
    return folder


@pytest.fixture
def spec(base: Path) -> BoxSpec:
    return BoxSpec(base=base)
