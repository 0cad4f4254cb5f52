"""One suite for all backends: `sandbox` is each of them in turn, and a test that uses it must leave nothing behind.

`bubblewrap` is that backend alone, for what only it has. Podman and Docker run under markers of their names, and so
does bubblewrap on the image that they use.
"""

import asyncio
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandbox.base import Box, BoxSpec, FolderImage, Image, Sandbox, StoredImage
from sandbox.bubble import Bubblewrap, hierarchy
from sandbox.docker import Docker
from sandbox.interpreter import python as host_python
from sandbox.podman import Podman, engine, release
from sandbox.state import remove_tree
from tests.sandbox.docker_daemon import docker_engine, docker_sandbox, docker_socket  # noqa: F401
from tools.base_image import NAME, TAR, ensure

HOST = pytest.param("bubblewrap", id="bubblewrap")
ON_IMAGE = pytest.param("bubblewrap-image", id="bubblewrap-image", marks=pytest.mark.podman)
PODMAN = pytest.param("podman", id="podman", marks=pytest.mark.podman)
DOCKER = pytest.param("docker", id="docker", marks=pytest.mark.docker)


@dataclass(frozen=True)
class Backend:
    """A sandbox to test, the image of its boxes, the Python in them, and where its files lie on the host."""

    name: str
    sandbox: Sandbox
    state: Path
    image: Image | None
    python: str

    def remains(self) -> list[str]:
        """What boxes left behind on this host and in the engine."""
        return remains(self.state) + containers(self.sandbox)


def containers(sandbox: Sandbox) -> list[str]:
    """Ids of all containers in the store of a test's own engine."""
    match sandbox:
        case Podman(storage=Path() as storage):
            listed = storage / "graph" / "overlay-containers" / "containers.json"
            return [one["id"] for one in json.loads(listed.read_text())] if listed.exists() else []
        case Docker(socket=socket):
            return [path.name for path in (socket.parent / "data" / "containers").iterdir()]
        case _:
            return []


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
    """Command lines of the processes that run boxes of this state folder."""
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
    """Processes in the box; the shell that counts is one of them."""
    return len((await box.exec(["sh", "-c", "echo /proc/[0-9]*"])).stdout.split())


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture(scope="session")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base image, unpacked."""
    ensure(TAR)
    folder = tmp_path_factory.mktemp("rootfs")
    subprocess.run(["tar", "-xf", TAR, "-C", folder], check=True)
    return folder


@pytest.fixture(scope="session")
def podman_sandbox() -> Iterator[Podman]:
    """Podman with a store of its own that holds the base image."""
    ensure(TAR)
    # Not below pytest's own folder: Podman opens all folders above a store for its containers, pytest closes them.
    place = Path(tempfile.mkdtemp(prefix="lego-podman-test-"))
    podman = Podman(image=StoredImage(name=NAME), storage=place / "storage", state=place / "state")
    asyncio.run(engine(podman).load(TAR, NAME))
    yield podman
    release(podman)
    remove_tree(place)


@pytest.fixture(params=[HOST, ON_IMAGE, PODMAN, DOCKER])
def backend(request: pytest.FixtureRequest, state: Path) -> Backend:
    match request.param:
        case "bubblewrap":
            return Backend(request.param, Bubblewrap(state=state), state, None, host_python())
        case "bubblewrap-image":
            image = FolderImage(path=request.getfixturevalue("rootfs"))
            return Backend(request.param, Bubblewrap(state=state), state, image, "/usr/bin/python3")
        case name:
            sandbox = request.getfixturevalue(f"{name}_sandbox")
            return Backend(name, sandbox, sandbox.state_folder(), StoredImage(name=NAME), "/usr/bin/python3")


@pytest.fixture
def sandbox(backend: Backend) -> Iterator[Sandbox]:
    yield backend.sandbox
    assert backend.remains() == []


@pytest.fixture
def spec(base: Path, backend: Backend) -> BoxSpec:
    return BoxSpec(base=base, image=backend.image)


@pytest.fixture
def python(backend: Backend) -> str:
    """The Python of the boxes."""
    return backend.python


@pytest.fixture
def bubblewrap(state: Path) -> Iterator[Bubblewrap]:
    yield Bubblewrap(state=state)
    assert remains(state) == []


@pytest.fixture
def plain(base: Path) -> BoxSpec:
    """A box without an image."""
    return BoxSpec(base=base)


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
