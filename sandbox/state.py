"""The folder of one box on the host: named after its owner process, so that a later run can clear it away.

`box-PID-START-RANDOM/` holds `record` (control groups and labels) and `rw/` (the writable layer: a size-limited
memory file system where we may mount one). START is the owner's start time, so a reused pid is not mistaken for it.
"""

# ruff: noqa: PTH101, PTH104, PTH108
import os
import secrets
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sandbox.base import SandboxError
from sandbox.cgroup import remove_groups
from sandbox.mounts import mount_tmpfs, unmount

PREFIX = "box-"
INODES_PER_MIB = 128


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

    def remove(self) -> None:
        """Removes the box's control groups, mount and files. Blocks."""
        remove_groups(self._groups())
        if os.geteuid() == 0:
            unmount(self.path / "rw")
        remove_tree(self.path)

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


def _mounted(space: Path, disk_mib: int) -> bool:
    """Whether a size-limited memory file system could be mounted there."""
    if os.geteuid() != 0:
        return False
    try:
        mount_tmpfs(space, disk_mib << 20, max(1024, disk_mib * INODES_PER_MIB))
    except PermissionError:  # root of a container without the right to mount
        return False
    return True


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
    pid = os.getpid()
    path = state / f"{PREFIX}{pid}-{start_time(pid)}-{secrets.token_hex(4)}"
    try:
        path.mkdir(mode=0o700)
    except OSError as error:
        raise SandboxError(f"state={state}: cannot make a folder for a box: {error.strerror}") from error
    return BoxFolder(path)


def dead_box_folders(state: Path) -> list[BoxFolder]:
    """The folders whose owner process is gone."""
    return [BoxFolder(path) for path in sorted(state.glob(f"{PREFIX}*")) if not owner_lives(path.name)]


def owner_lives(name: str) -> bool:
    """Whether the process that a folder is named after still runs; True for names that are not ours."""
    try:
        pid, start = (int(word) for word in name.removeprefix(PREFIX).split("-")[:2])
    except ValueError:
        return True
    return start_time(pid) == start


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
