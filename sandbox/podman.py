"""The Podman backend: boxes by Podman's own service, for root or for an ordinary user.

Its calls block, so each runs in a thread. What is asked is `libpod`, how it gets there `wire`.
"""

import asyncio
import functools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import TypeVar

from sandbox import images as store
from sandbox import libpod
from sandbox.base import BoxSpec, Capabilities, Image, Progress, SandboxError, no_progress
from sandbox.container import ContainerBox, check, open_container, reap
from sandbox.description import FIRST_ID
from sandbox.engine import Container, Exec, ExecState, Listed
from sandbox.podmanconf import Setup, default_runtime, program
from sandbox.probing import probe
from sandbox.service import Service, reap_services
from sandbox.state import usual_folder
from sandbox.wire import NO_PACKAGE, Stream, Wire

CALLS = 16
"""Calls to the service at once."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Podman:
    """Boxes by Podman, for root or for an ordinary user with subordinate ids."""

    image: Image | None = None
    """What boxes that name no image are made of."""
    runtime: str | None = None
    """OCI runtime, such as runc or crun; the default is one that works with this host's control groups.

    One with a kernel of its own, such as runsc, hides its processes and network from the host: no `listen` and no exec.
    """
    storage: Path | None = None
    """Folder for Podman's images and containers; the default is this user's own, with all images that are there."""
    socket: Path | None = None
    """A Podman service of this user that runs already; the default is to start one, which ends with this process."""
    state: Path | None = None
    """Folder for the boxes' files; the default is lego-podman-UID/boxes in the system's folder for temporary files."""

    def probe(self, image: Image | None = None) -> Capabilities:
        """Opens small boxes that try to break each limit; the answer is kept for this process."""
        return probe(self, image)

    def missing(self) -> str | None:
        """What this host or `image` surely lacks, and the command that brings it. Quick; starts no service."""
        try:
            program()
            if self.runtime is None:
                default_runtime()
        except SandboxError as error:
            return str(error)
        return store.unusable(self.image) if find_spec("podman") else NO_PACKAGE

    async def prepare(self, images: Iterable[Image], progress: Progress = no_progress) -> None:
        """Fetches, imports or builds what is not in the store yet."""
        await store.prepare(engine(self), [*images, *filter(None, [self.image])], progress)

    async def extract(self, image: Image, folder: PurePosixPath, into: Path) -> Path:
        """Copies a folder of a prepared image out to a folder below `into`; a copy that is there is kept."""
        return await store.extract(engine(self), image, folder, into)

    def open(self, spec: BoxSpec) -> AbstractAsyncContextManager[ContainerBox]:
        """A fresh box. ValueError names the field of a spec that cannot be, SandboxError what the host lacks."""
        check(spec)
        image = spec.image or self.image
        if image is None:
            raise SandboxError("sandbox.image: None, and a task without an image; Podman wants one of the two")
        return open_container(engine(self), spec, image, self.state_folder(), engine(self).runtime)

    async def reap(self) -> int:
        """Removes what dead processes left in the store and in the state folder; live ones are not touched."""
        await asyncio.to_thread(reap_services)
        return await reap(engine(self), self.state_folder())

    def state_folder(self) -> Path:
        """Where the boxes' files lie."""
        return self.state or usual_folder("podman") / "boxes"


@functools.cache
def engine(podman: Podman) -> "PodmanEngine":
    """This process's connection for a spec; its service starts with the first call."""
    return PodmanEngine(podman)


def release(podman: Podman) -> None:
    """Ends this process's service for a spec, and leaves its `storage` as a folder that may be removed. Blocks."""
    service = engine(podman).service
    service.stop()
    service.setup.release()


class PodmanEngine:
    """An `Engine`. Its calls may be made from any event loop, and block threads of its own only."""

    def __init__(self, podman: Podman) -> None:
        self.runtime = podman.runtime or default_runtime()
        self.service = Service(Setup(storage=podman.storage, runtime=self.runtime))
        self.command = self.service.setup.command_line()
        self.first_id = FIRST_ID if os.geteuid() == 0 else None
        self.mounts_overlay = self.first_id is None
        self._wire = Wire(podman.socket, self.service)
        self._threads = ThreadPoolExecutor(CALLS, "podman")
        self._folders: dict[str, Path] = {}

    async def create(self, container: Container) -> str:
        return await self._do(f"cannot create a container of {container.image}", libpod.create, container)

    async def start(self, container: str) -> int:
        pid, self._folders[container] = await self._do("cannot start a container", libpod.start, container)
        return pid

    async def exec(self, container: str, command: Exec) -> str:
        what, folder = f"cannot run {command.argv[0]}", self._folders[container]
        return str(await self._do(what, libpod.execute, container, folder, command, self.service))

    async def state(self, exec_id: str) -> ExecState:
        folder = Path(exec_id)
        if (code := await self._written(folder / "exit" / folder.parent.parent.name)) is not None:
            return ExecState(code=code, pid=0)
        pid = await self._written(folder / "exec_pid")
        if pid is None:
            raise SandboxError(f"Podman does not tell the pid of a command: no {folder}/exec_pid")
        return ExecState(code=None, pid=pid)

    async def _written(self, path: Path) -> int | None:
        """The number in one of conmon's files; None where there is none yet."""
        try:
            if self.first_id is not None:
                return self.service.read_number(path)
            return await self._in_thread(self.service.read_number, path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SandboxError(f"cannot read how a command ended: {error}; is it this user's own Podman?") from error

    async def remove(self, container: str) -> None:
        self._folders.pop(container, None)
        await self._do("cannot remove a container", libpod.remove, container, self.service)

    async def delete(self, path: Path) -> None:
        command = self.service.as_root(["rm", "-rf", "--", str(path)])
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, start_new_session=True)
        _, said = await process.communicate()
        if process.returncode:
            raise SandboxError(f"cannot remove {path}: {said.decode(errors='replace').strip()}")

    async def listed(self, label: str) -> list[Listed]:
        return await self._do("cannot list containers", libpod.listed, label)

    async def image_id(self, name: str) -> str | None:
        return await self._do(f"cannot look for image {name}", libpod.image_id, name)

    async def pull(self, reference: str, progress: Progress) -> None:
        what = f"cannot pull {reference} (where it needs a login, `{self.command} pull {reference}` asks)"
        with Stream() as stream:
            await self._do(what, libpod.pull, reference, _on_this_loop(progress), stream)

    async def load(self, tar: Path, name: str) -> None:
        await self._do(f"cannot import {name}", libpod.load, tar, name)

    async def build(self, tar: Path, dockerfile: Path, name: str, *, network: bool, progress: Progress) -> None:
        how = libpod.build_options(name, dockerfile, network=network)
        with Stream() as stream:
            await self._do(f"cannot build {name}", libpod.build, tar, how, _on_this_loop(progress), stream)

    async def archive(self, container: str, path: Path, tar: Path) -> None:
        await self._do(f"cannot read {path}", libpod.archive, container, path, tar)

    async def _do(self, what: str, work: Callable[..., T], *args: object) -> T:
        """What a function of `libpod` returns; its errors get our words in front."""
        return await self._in_thread(self._wire.call, what, work, *args)

    async def _in_thread(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)


def _on_this_loop(progress: Progress) -> Progress:
    """Brings what a thread reports to those who watch."""
    loop = asyncio.get_running_loop()
    return lambda done, total, what: loop.call_soon_threadsafe(progress, done, total, what) and None
