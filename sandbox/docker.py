"""The Docker backend: the calls of `Engine` on a daemon's socket, by aiodocker.

Root of a box is the host's root without its capabilities, unless the daemon runs with `userns-remap`: Docker maps users
for all its containers or for none.
"""

import asyncio
import os
import re
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from sandbox import images as store
from sandbox.base import Box, BoxSpec, Capabilities, Image, Progress, SandboxError, no_progress
from sandbox.container import check, open_container, reap
from sandbox.engine import AGENT_ID, Container, Exec, ExecState, Listed
from sandbox.hostconfig import description
from sandbox.probing import probe
from sandbox.state import remove_tree, usual_folder

if TYPE_CHECKING:
    import aiodocker

SOCKET = Path("/var/run/docker.sock")
CALL_S = 300.0
"""The longest that a daemon under load may take for one call."""
GONE_S = 60.0
NO_CONNECTION = 900
NOT_THERE = 404
BUSY = 409
LAST_LINES = 20
NO_PACKAGE = "aiodocker is not installed: pip install aiodocker"
COLOUR = re.compile(r"\x1b\[\d*m")
KEPT_LAYERS = ("Pull complete", "Already exists")


@dataclass(frozen=True, kw_only=True)
class Docker:
    """Boxes by a Docker daemon of this host, for root: its group may not mount the workspaces."""

    image: Image | None = None
    """What boxes that name no image are made of."""
    runtime: str | None = None
    """OCI runtime that the daemon knows, such as runsc; the default is its own."""
    socket: Path = SOCKET
    """Where the daemon answers."""
    state: Path | None = None
    """Folder for the boxes' files; the default is lego-boxes-UID in the system's folder for temporary files."""

    def probe(self, image: Image | None = None) -> Capabilities:
        """Opens small boxes that try to break each limit; the answer is kept for this process."""
        return probe(self, image)

    def missing(self) -> str | None:
        """What this host or `image` surely lacks, and the command that brings it. Quick; asks no daemon."""
        if os.geteuid() != 0:
            return _not_root()
        if not find_spec("aiodocker"):
            return NO_PACKAGE
        reachable = os.access(self.socket, os.R_OK | os.W_OK)
        return store.unusable(self.image) if reachable else unreachable(self.socket)

    async def prepare(self, images: Iterable[Image], progress: Progress = no_progress) -> None:
        """Fetches, imports or builds what is not in the daemon's store yet."""
        async with connected(self.socket) as engine:
            await store.prepare(engine, [*images, *filter(None, [self.image])], progress)

    async def extract(self, image: Image, folder: PurePosixPath, into: Path) -> Path:
        """Copies a folder of a prepared image out to a folder below `into`; a copy that is there is kept."""
        async with connected(self.socket) as engine:
            return await store.extract(engine, image, folder, into)

    def open(self, spec: BoxSpec) -> AbstractAsyncContextManager[Box]:
        """A fresh box. ValueError names the field of a spec that cannot be, SandboxError what the host lacks."""
        check(spec)
        image = spec.image or self.image
        if image is None:
            raise SandboxError("sandbox.image: None, and a task without an image; Docker wants one of the two")
        return _opened(self, spec, image)

    async def reap(self) -> int:
        """Removes what dead processes left in the daemon and in the state folder; live ones are not touched."""
        async with connected(self.socket) as engine:
            return await reap(engine, self.state_folder())

    def state_folder(self) -> Path:
        """Where the boxes' files lie."""
        return self.state or usual_folder("boxes")


@asynccontextmanager
async def _opened(docker: Docker, spec: BoxSpec, image: Image) -> AsyncIterator[Box]:
    if os.geteuid() != 0:
        raise SandboxError(_not_root())
    async with (
        connected(docker.socket) as engine,
        open_container(engine, spec, image, docker.state_folder(), docker.runtime) as box,
    ):
        yield box


@dataclass(frozen=True)
class DockerEngine:
    """An `Engine`."""

    client: "aiodocker.Docker"
    socket: Path
    first_id: int
    mounts_overlay: bool = False

    @property
    def command(self) -> str:
        """The command line client, pointed at the same daemon."""
        return "docker" if self.socket == SOCKET else f"docker -H unix://{self.socket}"

    async def create(self, container: Container) -> str:
        with self._told(f"cannot create a container of {container.image}"):
            image = await self.client.images.inspect(container.image)
            volumes = tuple((image.get("Config") or {}).get("Volumes") or ())
            made = await self.client.containers.create(description(container, volumes), name=container.name)
            return made.id

    async def start(self, container: str) -> int:
        with self._told("cannot start a container"):
            running = self.client.containers.container(container)
            await running.start()
            return (await running.show())["State"]["Pid"]

    async def exec(self, container: str, command: Exec) -> str:
        user = AGENT_ID if command.user == "agent" else 0
        with self._told(f"cannot run {command.argv[0]}"):
            made = await self.client.containers.container(container).exec(
                list(command.argv), user=f"{user}:{user}", environment=command.env, stdout=False, stderr=False
            )
            await made.start(detach=True)
            return made.id

    async def state(self, exec_id: str) -> ExecState:
        with self._told("cannot ask about a command"):
            seen = await self.client.containers.exec(exec_id).inspect()
            return ExecState(code=None if seen["Running"] else seen["ExitCode"], pid=seen["Pid"])

    async def remove(self, container: str) -> None:
        import aiodocker

        with self._told("cannot remove a container"):
            try:
                await self.client.containers.container(container).delete(force=True, v=True)
            except aiodocker.DockerError as error:
                if error.status == BUSY:  # somebody else is removing it
                    await self._gone(container)
                elif error.status != NOT_THERE:
                    raise

    async def delete(self, path: Path) -> None:
        await asyncio.to_thread(remove_tree, path)

    async def listed(self, label: str) -> list[Listed]:
        with self._told("cannot list containers"):
            found = await self.client.containers.list(all=True, filters={"label": [label]})
            return [Listed(id=one.id, labels=one["Labels"]) for one in found]

    async def image_id(self, name: str) -> str | None:
        import aiodocker

        with self._told(f"cannot look for image {name}"):
            try:
                return (await self.client.images.inspect(name))["Id"]
            except aiodocker.DockerError as error:
                if error.status == NOT_THERE:
                    return None
                raise

    async def pull(self, reference: str, progress: Progress) -> None:
        layers: dict[str, bool] = {}
        with self._told(f"cannot pull {reference} (where it needs a login, `{self.command} pull {reference}` asks)"):
            async for line in self.client.images.pull(reference, stream=True):
                if "id" in line and "progressDetail" in line:
                    layers[line["id"]] = layers.get(line["id"], False) or line.get("status") in KEPT_LAYERS
                    progress(sum(layers.values()), len(layers), "layers pulled")

    async def load(self, tar: Path, name: str) -> None:
        repository, _, tag = name.rpartition(":")
        with self._told(f"cannot import {name}"):
            async for _ in self._sent("images/create", tar, {"fromSrc": "-", "repo": repository, "tag": tag}):
                pass

    async def build(self, tar: Path, dockerfile: Path, name: str, *, network: bool, progress: Progress) -> None:
        said = deque[str](maxlen=LAST_LINES)
        how = {"t": name, "dockerfile": str(dockerfile), "rm": "1", "forcerm": "1"}
        how["networkmode"] = "default" if network else "none"
        with self._told(f"cannot build {name}", said):
            async for line in self._sent("build", tar, how):
                text = COLOUR.sub("", line.get("stream", "")).strip()
                said.append(text)
                if text.startswith("Step "):
                    done, _, total = text.split()[1].partition("/")
                    progress(int(done) - 1, int(total), text.partition(" : ")[2])

    async def archive(self, container: str, path: Path, tar: Path) -> None:
        with self._told(f"cannot read {path}"), tar.open("wb") as file:
            call = self.client._query(f"containers/{container}/archive", params={"path": str(path)}, timeout=None)
            async with call as response:
                async for block in response.content.iter_chunked(1 << 20):
                    await asyncio.to_thread(file.write, block)

    async def _sent(self, path: str, tar: Path, params: dict[str, str]) -> AsyncIterator[dict[str, Any]]:
        """The daemon's answers to a tar file; aiodocker's own calls have no network mode and no import."""
        from aiodocker.jsonstream import json_stream_stream

        with tar.open("rb") as file:
            headers = {"Content-Type": "application/x-tar"}
            call = self.client._query(path, "POST", params=params, data=file, headers=headers, timeout=None)
            async with call as response:
                try:
                    async for line in json_stream_stream(response):
                        yield line
                finally:
                    response.close()  # a build ends with its connection

    async def _gone(self, container: str) -> None:
        import aiodocker

        async with asyncio.timeout(GONE_S):
            while True:
                try:
                    await self.client.containers.container(container).show()
                except aiodocker.DockerError as error:
                    if error.status == NOT_THERE:
                        return
                    raise
                await asyncio.sleep(0.1)

    @contextmanager
    def _told(self, what: str, said: deque[str] | None = None) -> Iterator[None]:
        """Makes any failure of a call a SandboxError: what we wanted, and what the daemon said."""
        import aiodocker
        import aiohttp

        try:
            yield
        except aiodocker.DockerError as error:
            if error.status == NO_CONNECTION:
                raise SandboxError(unreachable(self.socket)) from error
            lines = "".join(f"\n{line}" for line in said or () if line)
            raise SandboxError(f"Docker: {what}: {error.message}{lines}") from error
        except TimeoutError as error:
            raise SandboxError(f"Docker: {what}: the daemon at {self.socket} did not answer in time") from error
        except aiohttp.ClientError as error:
            raise SandboxError(f"Docker: {what}: lost the daemon at {self.socket}: {error}") from error


def _not_root() -> str:
    return f"boxes by Docker want root, not uid {os.geteuid()}: run as root, or use Podman, which does not"


def unreachable(socket: Path) -> str:
    """Why nobody can be spoken to at this socket, and what to do about it."""
    if not os.access(socket, os.F_OK):
        return f"no Docker daemon: there is no socket {socket}; run `systemctl start docker`, or set `socket`"
    if not os.access(socket, os.R_OK | os.W_OK):
        return (
            f"uid {os.geteuid()} may not use the Docker socket {socket}: it is for group {_group(socket)}; "
            f"run `sudo usermod -aG {_group(socket)} $USER` and log in again"
        )
    return f"no Docker daemon answers at {socket}; run `systemctl restart docker`"


def _group(socket: Path) -> str:
    try:
        return socket.group()
    except KeyError:
        return str(socket.stat().st_gid)


@asynccontextmanager
async def connected(socket: Path) -> AsyncIterator[DockerEngine]:
    """A connection to the daemon; SandboxError says why there is none."""
    try:
        import aiodocker
        import aiohttp
    except ImportError as error:
        raise SandboxError(NO_PACKAGE) from error
    timeout = aiohttp.ClientTimeout(total=CALL_S)
    async with aiodocker.Docker(f"unix://{socket}", timeout=timeout) as client:
        engine = DockerEngine(client, socket, first_id=0)
        with engine._told("cannot ask what it is"):
            info = await client.system.info()
        yield DockerEngine(client, socket, first_id=_first_id(info, socket))


def _first_id(info: Mapping[str, Any], socket: Path) -> int:
    """The host's uid of root in a container: not 0 for a daemon that runs with `userns-remap`."""
    options = info["SecurityOptions"]
    if any(option.startswith("name=rootless") for option in options):
        raise SandboxError(f"the Docker daemon at {socket} is rootless, which cannot share files; use Podman instead")
    if not any(option.startswith("name=userns") for option in options):
        return 0
    return int(Path(info["DockerRootDir"]).name.partition(".")[0])
