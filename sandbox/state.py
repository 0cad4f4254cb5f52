"""The folder of one box on the host: named after its owner process, so that a later run can clear it away.

`box-PID-START-BOOT-NAMESPACE-RANDOM/` holds `record` (control groups and labels), `rw/` (the writable layer: a
size-limited memory file system where we may mount one), other mounts, and for a container its streams. START is the
owner's start time, so a reused pid is not mistaken for it; BOOT and NAMESPACE say where that pid means anything.
"""

# ruff: noqa: PTH101, PTH104, PTH108
import fcntl
import functools
import os
import secrets
import signal
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sandbox.base import SandboxError
from sandbox.cgroup import remove_groups
from sandbox.mounts import mount_tmpfs, unmount

PREFIX = "box-"
INODES_PER_MIB = 128
NOBODY = 65534
MEMORY, TTY = 1, 5
DEVICES = {"full": 7, "null": 3, "random": 8, "tty": 0, "urandom": 9, "zero": 5}
"""What bwrap shows of the host's /dev, by minor number (Linux allocated devices, `devices.txt`)."""
OWNER_WORDS, SHORT = 4, 6


@dataclass(frozen=True)
class BoxFolder:
    """Where the files of one box lie."""

    path: Path

    @property
    def upper(self) -> Path:
        """The writable layer: what the box changed, in the kernel's overlay format."""
        return self.path / "rw" / "upper"

    @property
    def work(self) -> Path:
        """A scratch folder that the kernel's overlay needs."""
        return self.path / "rw" / "work"

    @property
    def devices(self) -> Path:
        """Device nodes of a bubblewrap box of root."""
        return self.path / "rw" / "dev"

    @property
    def exchange(self) -> Path:
        """Scripts and streams of a container's commands."""
        return self.path / "exchange"

    @property
    def lower(self) -> Path:
        """Where the base is mounted with its owners as a container's."""
        return self.path / "lower"

    @property
    def merged(self) -> Path:
        """Where base and writable layer are mounted as one for a container."""
        return self.path / "merged"

    @property
    def home(self) -> Path:
        """A container's HOME: engines take the image's mode for a memory file system of their own."""
        return self.path / "home"

    @property
    def mounts(self) -> Path:
        """Where other folders and files are mounted with their owners as a container's."""
        return self.path / "mounts"

    def record(self, groups: Iterable[Path], labels: Mapping[str, str]) -> None:
        """Writes down what must be removed with the folder, before it exists."""
        lines = [f"cgroup {group}" for group in groups] + [f"label {key}={value}" for key, value in labels.items()]
        (self.path / "record").write_text("".join(f"{line.encode('unicode_escape').decode()}\n" for line in lines))

    def fill(self, base: Path, disk_mib: int) -> bool:
        """Makes the writable layer; True where we may mount one in memory that holds `disk_mib` and no more."""
        space = self.path / "rw"
        space.mkdir()
        limited = _mounted(space, disk_mib)
        self.work.mkdir()
        self.upper.mkdir()
        self.upper.chmod(base.stat().st_mode & 0o777 | 0o700)
        return limited

    def fill_devices(self) -> None:
        """Makes /dev/null and its like, for everybody to use and nobody of the box to own; for root alone."""
        self.devices.mkdir()
        for name, minor in DEVICES.items():
            node = self.devices / name
            os.mknod(node, stat.S_IFCHR, os.makedev(TTY if name == "tty" else MEMORY, minor))
            node.chmod(0o666)
            os.chown(node, NOBODY, NOBODY)

    def fill_home(self, owner: int | None, disk_mib: int) -> None:
        """Makes a container's HOME, limited like the writable layer, for this user of the host (None: our own)."""
        self.home.mkdir(mode=0o755)
        _mounted(self.home, disk_mib)
        if owner is not None:
            os.chown(self.home, owner, owner)

    def remove(self) -> None:
        """Removes the box's control groups, mount and files. Blocks."""
        remove_groups(self._groups())
        if os.geteuid() == 0:
            # All but the writable layer are read-only, or lead to it: nothing of the host's could be removed.
            for place in (self.merged, self.lower, *self.mounts.glob("*"), self.home, self.path / "rw"):
                unmount(place)
        remove_tree(self.path)

    @contextmanager
    def claimed(self) -> Iterator[bool]:
        """Whether a dead box is ours to remove: two that remove one at the same time would get in each other's way."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            yield False
            return
        try:
            yield _locked(fd)
        finally:
            os.close(fd)

    def kill_strays(self) -> None:
        """Kills bwrap processes of this box that hang half-way through a start, as they do when one end was killed."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
                if os.fsencode(self.upper) in words and words[0].endswith(b"bwrap"):
                    os.kill(int(path.parent.name), signal.SIGKILL)
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # gone meanwhile, or of another user

    def _groups(self) -> list[Path]:
        try:
            text = (self.path / "record").read_text()
        except FileNotFoundError:
            return []
        lines = [line.encode().decode("unicode_escape") for line in text.splitlines()]
        groups = [Path(line.removeprefix("cgroup ")) for line in lines if line.startswith("cgroup ")]
        return [group for group in groups if group.name == self.path.name]


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _mounted(space: Path, disk_mib: int) -> bool:
    """Whether a size-limited memory file system could be mounted there."""
    if os.geteuid() != 0:
        return False
    try:
        mount_tmpfs(space, disk_mib << 20, max(1024, disk_mib * INODES_PER_MIB))
    except PermissionError:  # root of a container without the right to mount
        return False
    return True


def usual_folder(name: str) -> Path:
    """This user's folder for files of one kind, where nobody has named another. Not made by this."""
    return Path(tempfile.gettempdir(), f"lego-{name}-{os.geteuid()}")


def private_folder(path: Path) -> Path:
    """Makes the state folder for this user alone; SandboxError where it belongs to somebody else."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise SandboxError(f"state={path}: cannot make this folder for boxes: {error.strerror}") from error
    if status.st_uid != os.geteuid() or status.st_mode & 0o022 or not path.is_dir() or path.is_symlink():
        raise SandboxError(f"state={path}: must be a folder of uid {os.geteuid()} that nobody else can write")
    return path


def new_box_folder(state: Path) -> BoxFolder:
    """A fresh folder, owned by this process."""
    path = state / f"{PREFIX}{this_owner()}-{secrets.token_hex(4)}"
    try:
        path.mkdir(mode=0o700)
    except OSError as error:
        raise SandboxError(f"state={state}: cannot make a folder for a box: {error.strerror}") from error
    return BoxFolder(path)


def dead_box_folders(state: Path) -> list[BoxFolder]:
    """The folders whose owner process is gone."""
    return [BoxFolder(path) for path in sorted(state.glob(f"{PREFIX}*")) if not owner_lives(path.name)]


def this_owner() -> str:
    """This process, as names and labels of what it owns have it: PID-START-BOOT-NAMESPACE."""
    pid = os.getpid()
    return f"{pid}-{start_time(pid)}-{_boot()}-{_namespace()}"


def owner_of(name: str) -> str:
    """The owner in the name of a folder."""
    return "-".join(name.removeprefix(PREFIX).split("-")[:OWNER_WORDS])


def owner_lives(name: str) -> bool:
    """Whether the process that a folder is named after still runs, as far as can be seen from here.

    True for names that are not ours, and for processes of another pid namespace: those are not ours to judge.
    """
    try:
        pid, start, boot, namespace = owner_of(name).split("-")
        if boot != _boot():
            return False
        return namespace != _namespace() or start_time(int(pid)) == int(start)
    except ValueError:
        return True


@functools.cache
def _boot() -> str:
    """Which start of this host it is; in short, as it is part of paths."""
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:SHORT]


def _namespace() -> str:
    """Our pid namespace."""
    return f"{Path('/proc/self/ns/pid').stat().st_ino:x}"[-SHORT:]


def start_time(pid: int) -> int | None:
    """When a process started, in ticks since boot; None if there is none, or only its zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return int(fields[19]) if fields[0] not in ("Z", "X") else None


def remove_tree(top: Path) -> None:
    """Removes a folder whatever its depth and modes: agents make trees that recursion and PATH_MAX do not survive."""
    if top.is_symlink() or not top.is_dir():
        return
    pending, serial = [top], 0
    while pending:
        folder = pending.pop()
        folder.chmod(0o700)
        with os.scandir(folder) as entries:
            for entry in list(entries):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)
                # Moved up beside its siblings, a folder keeps a short path however deep it was.
                serial += 1
                moved = top / f"{secrets.token_hex(4)}-{serial}"
                os.rename(entry.path, moved)
                pending.append(moved)
        if folder is not top:
            folder.rmdir()
    top.rmdir()
