"""A Docker daemon of the tests' own: private store and socket, no bridge, no change to the host's network."""

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from sandbox.base import StoredImage
from sandbox.docker import Docker, DockerEngine, connected
from tools.base_image import NAME, TAR, ensure

START_S = 60.0
END_S = 60.0
QUIET = (
    "--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false",
    "--userland-proxy=false",
)  # fmt: skip


@contextmanager
def docker_daemon(place: Path) -> Iterator[Path]:
    """Starts a daemon that keeps its store below the folder `place`, and yields its socket; ends it by its process."""
    program = shutil.which("dockerd")
    if program is None:
        pytest.skip("dockerd is not installed: apt-get install docker.io")
    socket = place / "docker.sock"
    # Sockets below the second folder must have short paths.
    with (place / "log").open("wb") as log, tempfile.TemporaryDirectory(prefix="dockerd-") as short:
        command = [program, "--data-root", place / "data", "--exec-root", short, "--pidfile", place / "pid"]
        process = subprocess.Popen([*command, "-H", f"unix://{socket}", *QUIET], stdout=log, stderr=log)
        try:
            _wait_until_it_answers(process, socket, place / "log")
            yield socket
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(END_S)
            shutil.rmtree(place / "data", ignore_errors=True)


def _wait_until_it_answers(process: subprocess.Popen[bytes], socket: Path, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not (socket.exists() and b"API listen on" in log.read_bytes()):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"dockerd did not start:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.05)


@pytest.fixture(scope="session")
def docker_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A daemon for all tests, with the base image in its store."""
    ensure(TAR)
    with docker_daemon(tmp_path_factory.mktemp("docker")) as socket:
        subprocess.run(["docker", "-H", f"unix://{socket}", "import", TAR, NAME], check=True, stdout=subprocess.PIPE)
        yield socket


@pytest_asyncio.fixture
async def docker_engine(docker_socket: Path) -> AsyncIterator[DockerEngine]:
    async with connected(docker_socket) as engine:
        yield engine


@pytest.fixture
def docker_sandbox(docker_socket: Path, tmp_path: Path) -> Docker:
    return Docker(image=StoredImage(name=NAME), socket=docker_socket, state=tmp_path / "docker-state")
