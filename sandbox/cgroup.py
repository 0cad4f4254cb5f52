"""Memory, process and CPU limits of a box by control groups, version 1 or 2, where this process may make some."""

import errno
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sandbox.base import Limits, SandboxError

log = logging.getLogger(__name__)

CONTROLLERS = ("memory", "pids", "cpu")
PERIOD_US = 100_000
REMOVE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Hierarchy:
    """Where groups for boxes can be made: one folder per controller (one for all in version 2)."""

    version: str  # "v1" | "v2" | "none"
    folders: Mapping[str, Path] = field(default_factory=dict)


def find_hierarchy(mountinfo: str, own: str) -> Hierarchy:
    """Reads the texts of /proc/self/mountinfo and /proc/self/cgroup; keeps what is writable.

    Groups are made below this process's own group, so that limits on this process hold for its boxes too.
    """
    folders = dict(_v1_folders(mountinfo, own))
    if folders:
        return Hierarchy(version="v1", folders=folders)
    folder = _v2_folder(mountinfo, own)
    if folder is not None:
        return Hierarchy(version="v2", folders=dict.fromkeys(CONTROLLERS, folder))
    return Hierarchy(version="none")


def _v1_folders(mountinfo: str, own: str, *, strict: bool = False) -> Iterator[tuple[str, Path]]:
    """Writable folders by controller; with `strict` only those of groups that are named and not the topmost."""
    rows = (line.split(":", 2) for line in own.splitlines())
    groups = {name: path for _, names, path in rows for name in names.split(",")}
    for root, mount, kind, options in _mounts(mountinfo):
        for controller in set(options) & set(CONTROLLERS) if kind == "cgroup" else ():
            folder = _below(root, mount, groups.get(controller, "/"))
            if os.access(folder, os.W_OK) and not (strict and folder == mount):
                yield controller, folder


def _v2_folder(mountinfo: str, own: str) -> Path | None:
    group = next((line[3:] for line in own.splitlines() if line.startswith("0::")), "/")
    for root, mount, kind, _ in _mounts(mountinfo):
        if kind == "cgroup2":
            below = _below(root, mount, group)
            # A group with processes cannot hand controllers down, so the boxes become siblings of our own group.
            candidates = [folder for folder in (below, *below.parents) if folder.is_relative_to(mount)]
            return next((folder for folder in candidates if _hands_down(folder)), None)
    return None


def _hands_down(folder: Path) -> bool:
    try:
        names = (folder / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False
    return set(CONTROLLERS) <= set(names) and os.access(folder, os.W_OK)


def _mounts(mountinfo: str) -> Iterator[tuple[str, Path, str, list[str]]]:
    """Root inside the file system, mount point, type and super options of each mount."""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        yield fields[3], Path(fields[4]), tail[0], tail[2].split(",")


def _below(root: str, mount: Path, group: str) -> Path:
    """The folder of `group` under a mount that shows the hierarchy from `root` on."""
    if root != "/" and Path(group).is_relative_to(root):
        group = str(Path(group).relative_to(root))
    folder = mount / group.lstrip("/")
    return folder if folder.is_dir() else mount


def groups_of(pid: int) -> Hierarchy:
    """The groups that another process is in, where they are not ours too and we may write to them."""
    own, other = (Path(f"/proc/{name}/cgroup").read_text() for name in ("self", pid))
    mountinfo = Path("/proc/self/mountinfo").read_text()
    shared = {*own.splitlines()}
    private = "\n".join(line for line in other.splitlines() if line not in shared)
    folders = dict(_v1_folders(mountinfo, private, strict=True))
    if folders:
        return Hierarchy(version="v1", folders=folders)
    folder = _own_v2_folder(mountinfo, private)
    return Hierarchy(version="v2", folders=dict.fromkeys(CONTROLLERS, folder)) if folder else Hierarchy(version="none")


def _own_v2_folder(mountinfo: str, own: str) -> Path | None:
    group = next((line[3:] for line in own.splitlines() if line.startswith("0::")), None)
    for root, mount, kind, _ in _mounts(mountinfo) if group else ():
        folder = _below(root, mount, group or "")
        if kind == "cgroup2" and folder != mount and os.access(folder, os.W_OK):
            return folder
    return None


def this_hierarchy() -> Hierarchy:
    """What this process may use now."""
    proc = Path("/proc/self")
    return find_hierarchy((proc / "mountinfo").read_text(), (proc / "cgroup").read_text())


class Cgroup:
    """The groups of one box."""

    def __init__(self, hierarchy: Hierarchy, name: str) -> None:
        self.version = hierarchy.version
        self._folders = {controller: folder / name for controller, folder in hierarchy.folders.items()}

    @property
    def folders(self) -> list[Path]:
        """Every folder that `create` makes."""
        return sorted(set(self._folders.values()))

    def limits(self, controller: str) -> bool:
        """Whether this host lets us limit by "memory", "pids" or "cpu"."""
        return controller in self._folders

    def create(self, limits: Limits) -> None:
        """Makes the groups and sets their limits; SandboxError names the limit that the host refuses."""
        for folder in self.folders:
            try:
                folder.mkdir()
            except OSError as error:
                raise SandboxError(f"cannot make the control group {folder}: {error.strerror}") from error
        for controller, file, value, needed in self._settings(limits):
            path = self._folders[controller] / file
            try:
                if needed or path.exists():
                    path.write_text(value)
            except OSError as error:
                raise SandboxError(f"the host refuses the {controller} limit {value!r} ({path}): {error}") from error

    def _settings(self, limits: Limits) -> Iterator[tuple[str, str, str, bool]]:
        memory, quota = str(int(limits.memory_gib * 2**30)), int(limits.cpus * PERIOD_US)
        rows = [("pids", "pids.max", str(limits.pids + 1), True)]  # one more: the box's own first process
        if self.version == "v1":
            rows += [("memory", "memory.limit_in_bytes", memory, True)]
            rows += [("memory", "memory.memsw.limit_in_bytes", memory, False)]
            rows += [("cpu", "cpu.cfs_period_us", str(PERIOD_US), True), ("cpu", "cpu.cfs_quota_us", str(quota), True)]
        else:
            rows += [("memory", "memory.max", memory, True), ("memory", "memory.swap.max", "0", False)]
            rows += [("cpu", "cpu.max", f"{quota} {PERIOD_US}", True)]
        return (row for row in rows if row[0] in self._folders)

    def entrances(self) -> list[Path]:
        """A file for each group: a process with one thread that writes 0 there joins, and so do all its later children.

        `tasks`, which version 1 has, moves one thread at once; `cgroup.procs` waits for all forks on the host.
        """
        return [folder / ("tasks" if self.version == "v1" else "cgroup.procs") for folder in self.folders]

    def oom_kills(self) -> int:
        """How many processes the kernel has killed here for want of memory."""
        if "memory" not in self._folders:
            return 0
        file = "memory.oom_control" if self.version == "v1" else "memory.events"
        for line in (self._folders["memory"] / file).read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
        return 0


def remove_groups(folders: list[Path]) -> None:
    """Kills what is left in these groups and removes them. Blocks while the kernel lets go of the last process."""
    deadline = time.monotonic() + REMOVE_S
    for folder in folders:
        while not _removed(folder):
            if time.monotonic() > deadline:
                log.error("cannot remove the control group %s: it stays busy", folder)
                break
            time.sleep(0.003)


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        _kill_members(folder)
        return False
    return True


def _kill_members(folder: Path) -> None:
    for pid in (folder / "cgroup.procs").read_text().split():
        try:
            os.kill(int(pid), 9)
        except ProcessLookupError:
            continue
