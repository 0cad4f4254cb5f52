"""A box that is a container of any engine: its files on the host, its commands, and its end.

The engine only makes containers and starts commands in them. Streams, the listener, limits on the workspace and the
killing of processes are the host's own: they are quick, and the same for every engine.
"""

import asyncio
import errno
import logging
import math
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from sandbox import images, rootfs
from sandbox.base import BoxSpec, Change, Image, Mount, SandboxError
from sandbox.commands import OOM_CODE, BoxEnded, Command, CommandBox, Get, Order, Put, Run
from sandbox.engine import AGENT_ID, BOX_LABEL, OWNER_LABEL, Bind, Container, Engine, Exec, Overlay, Tmpfs
from sandbox.exchange import Exchange
from sandbox.inside import Inside
from sandbox.mounts import bind_mapped, mount_overlay
from sandbox.netns import listen_inside
from sandbox.script import PLACE, Streams, command_script, get_script, put_script
from sandbox.state import BoxFolder, dead_box_folders, new_box_folder, owner_lives, owner_of, private_folder
from sandbox.unbroken import unbroken

log = logging.getLogger(__name__)

GRACE_S = 15.0
EXIT_S = 10.0
DYING_S = 0.3
KEEPERS = 2
"""The engine's init and our `sleep` count as processes of the container too."""
MEMORY_FOLDERS = (Path("/tmp"), Path("/var/tmp"))


class ContainerBox(CommandBox):
    """A `Box`. Its root has no capabilities."""

    users = ("agent", "root")

    def __init__(self, spec: BoxSpec, engine: Engine, container: str, inside: Inside, folder: BoxFolder) -> None:
        super().__init__(spec, folder)
        self._engine, self._container, self.inside = engine, container, inside
        self._exchange = Exchange(folder.exchange, engine.first_id)

    async def changes(self, max_bytes: int = 1 << 24) -> tuple[Change, ...]:
        try:
            return await super().changes(max_bytes)
        except PermissionError as error:
            raise SandboxError(f"the box's root made files that its owner may not read: {error}") from error

    def oom_kills(self) -> int:
        return self.inside.oom_kills()

    @contextmanager
    def _started(self, order: Order, stdin: bytes, cap: int) -> Iterator[Command]:
        user = order.user if isinstance(order, Run) else "agent"
        with self._exchange.opened(lambda streams: _script(streams, order), user, stdin, cap) as files:
            command = Exec(argv=("/bin/sh", str(files.script)), env={}, user=user)
            yield Command(stdout=files.stdout, stderr=files.stderr, code=lambda: self._exit_code(command))

    async def _listen(self, port: int) -> socket.socket:
        sock = await listen_inside(self.inside.pid, port)
        sock.setblocking(False)
        return sock

    async def _kill(self, patience_s: float) -> None:
        await unbroken(asyncio.to_thread(self.inside.kill_commands, patience_s))

    async def _exit_code(self, command: Exec) -> int:
        try:
            code = await self._ended(await unbroken(self._engine.exec(self._container, command)))
        except SandboxError as error:
            if self.inside.ended():
                why = "by its deadline, from outside, or for want of `sleep`"
                raise BoxEnded(f"the box has ended, {why} ({error})") from error
            raise
        # The kernel ends a box's first process last: its commands are seen to be killed a little earlier.
        if await self.inside.ends_within(DYING_S if code == OOM_CODE else 0):
            raise BoxEnded("the box ended with its command")
        return code

    async def _ended(self, exec_id: str) -> int:
        """Waits for a command's end without asking again and again, then for the engine to know of it."""
        loop = asyncio.get_running_loop()
        state = await self._engine.state(exec_id)
        if state.code is None:
            await self.inside.gone(state.pid)
        pause, patience = 0.001, loop.time() + EXIT_S
        while (state := await self._engine.state(exec_id)).code is None:
            if loop.time() > patience:
                raise SandboxError("the engine does not tell how a command has ended")
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.1)
        return state.code


def _script(streams: Streams, order: Order) -> bytes:
    match order:
        case Run(argv=argv, env=env, cwd=cwd):
            return command_script(streams, argv, env, cwd)
        case Put(path=path, mode=mode):
            return put_script(streams, path, mode)
        case Get(path=path, max_bytes=max_bytes):
            return get_script(streams, path, max_bytes)


@asynccontextmanager
async def open_container(
    engine: Engine, spec: BoxSpec, image: Image, state: Path, runtime: str | None
) -> AsyncIterator[ContainerBox]:
    """Builds up a box step by step; whatever was built is taken down again, in the reverse order."""
    name = await images.resolve(engine, image)
    folder = _new_folder(state, spec)  # quick, and a cancelled wait for it would lose it
    try:
        await unbroken(asyncio.to_thread(_lay_out, folder, spec, engine))
        container = _container(folder, spec, engine, name, runtime)
        try:
            await unbroken(engine.create(container))
            inside = _inside(await unbroken(engine.start(container.name)))
            try:
                yield ContainerBox(spec, engine, container.name, inside, folder)
                if inside.ended():
                    log.warning("a box ended by itself: %s", container.name)
            finally:
                inside.end()
                inside.close()
        finally:
            await unbroken(engine.remove(container.name))
    finally:
        await unbroken(_clear(folder, engine))


def check(spec: BoxSpec) -> None:
    """Refuses a spec that cannot be a container; ValueError names the field."""
    rootfs.check(spec)
    reserved = [key for key in spec.labels if key in (OWNER_LABEL, BOX_LABEL)]
    if reserved:
        raise ValueError(f"labels: {reserved[0]!r} is ours; want another name")


async def reap(engine: Engine, state: Path) -> int:
    """Removes the containers, mounts and files of dead processes; returns how many boxes that was."""
    boxes: set[str] = set()
    for one in await engine.listed(OWNER_LABEL):
        if not owner_lives(one.labels[OWNER_LABEL]):
            await engine.remove(one.id)
            boxes.add(one.labels.get(BOX_LABEL, one.id))
    for folder in dead_box_folders(private_folder(state)):
        with suppress(FileNotFoundError), folder.claimed() as ours:  # somebody else may be reaping too
            if ours:
                await asyncio.to_thread(folder.kill_strays)  # a bubblewrap box may have used the same folder
                await _clear(folder, engine)
        boxes.add(folder.path.name)
    return len(boxes)


async def _clear(folder: BoxFolder, engine: Engine) -> None:
    """Removes a box's files; those of its root are not an ordinary user's to remove."""
    try:
        await asyncio.to_thread(folder.remove)
    except PermissionError:
        await engine.delete(folder.path)


def _new_folder(state: Path, spec: BoxSpec) -> BoxFolder:
    folder = new_box_folder(private_folder(state))
    folder.record((), spec.labels)
    return folder


def _lay_out(folder: BoxFolder, spec: BoxSpec, engine: Engine) -> None:
    """Makes all that the host shows to the container."""
    folder.exchange.mkdir()
    folder.exchange.chmod(0o711)
    folder.fill(spec.base, spec.limits.disk_mib)
    owner = None if engine.first_id is None else engine.first_id + AGENT_ID
    folder.fill_home(owner, spec.limits.disk_mib)
    if engine.first_id is None or owner is None:
        return
    os.chown(folder.upper, owner, owner)
    for place in (folder.lower, folder.merged, folder.mounts):
        place.mkdir()
    try:
        bind_mapped(spec.base, folder.lower, engine.first_id)
        mount_overlay(folder.merged, lower=folder.lower, upper=folder.upper, work=folder.work)
    except OSError as error:
        raise SandboxError(_no_overlay(spec.base, error)) from error
    for number, mount in enumerate(spec.mounts):
        _show(mount.source, folder.mounts / str(number), engine.first_id)


def _show(source: Path, place: Path, first_id: int) -> None:
    """A folder or file for the box to read, as its agent's own where the file system can do that."""
    place.mkdir() if source.is_dir() else place.touch()
    try:
        bind_mapped(source, place, first_id)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM):
            raise SandboxError(f"mounts: source={source}: {error.strerror}") from error
        log.debug("%s is shown with its own owners: %s", source, error.strerror)
        place.rmdir() if source.is_dir() else place.unlink()
        place.symlink_to(source)


def _shown(folder: BoxFolder, number: int, mount: Mount, engine: Engine) -> Path:
    """Where the host shows what the box is to read."""
    return mount.source.resolve() if engine.first_id is None else (folder.mounts / str(number)).resolve()


def _no_overlay(base: Path, error: OSError) -> str:
    """What to do about a workspace that cannot be mounted."""
    if error.errno in (errno.EPERM, errno.EACCES):
        return f"cannot mount the workspace ({error}): this root may not mount; want CAP_SYS_ADMIN, or an ordinary user"
    return f"cannot mount base={base} for a box ({error}); put it on ext4, xfs, btrfs or tmpfs, and use Linux 5.19"


def _container(folder: BoxFolder, spec: BoxSpec, engine: Engine, image: str, runtime: str | None) -> Container:
    name = folder.path.name
    seconds = math.ceil(spec.limits.deadline_s + GRACE_S)
    binds = [
        Bind(source=_shown(folder, number, mount, engine), target=mount.target)
        for number, mount in enumerate(spec.mounts)
    ]
    binds.append(Bind(source=folder.home, target=rootfs.HOME, writable=True))
    overlay = None
    if engine.mounts_overlay:
        overlay = Overlay(lower=spec.base, upper=folder.upper, work=folder.work, target=spec.workdir)
    else:
        binds.append(Bind(source=folder.merged, target=spec.workdir, writable=True))
    return Container(
        name=f"lego-{name}",
        image=image,
        argv=("sleep", str(max(1, seconds))),
        env={key: value for key, value in rootfs.ENVIRONMENT.items() if key != "PATH"},
        binds=(Bind(source=folder.exchange, target=PLACE), *binds),
        overlay=overlay,
        tmpfs=tuple(Tmpfs(target=place, size_mib=spec.limits.disk_mib) for place in MEMORY_FOLDERS),
        limits=replace(spec.limits, pids=spec.limits.pids + KEEPERS),
        labels={**spec.labels, OWNER_LABEL: owner_of(name), BOX_LABEL: name},
        runtime=runtime,
    )


def _inside(pid: int) -> Inside:
    try:
        return Inside(pid)
    except (ProcessLookupError, FileNotFoundError) as error:
        raise SandboxError("the box ended while it started; has its image a `sleep`?") from error
