"""Mounting and unmounting on the host, for root only: a few calls of libc and the kernel."""

import ctypes
import functools
import os
import subprocess
import threading
from pathlib import Path

MS_RDONLY, MS_NOSUID, MS_NODEV = 1, 2, 4
MNT_DETACH, UMOUNT_NOFOLLOW = 2, 8
AT_FDCWD, AT_EMPTY_PATH = -100, 0x1000
# These numbers are the same on every architecture that this runs on.
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442
OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH = 1, 4
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_IDMAP = 1, 2, 4, 0x100000
IDS = 65536
"""Uids and gids that a container has."""

_making = threading.Lock()


class _MountAttr(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, path: Path) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), str(path))
    return result


def mount_tmpfs(target: Path, size_bytes: int, inodes: int) -> None:
    """Mounts a memory file system of a limited size; OSError where that is not allowed."""
    options = f"size={size_bytes},nr_inodes={inodes},mode=0755".encode()
    _check(_libc().mount(b"lego-box", os.fsencode(target), b"tmpfs", MS_NOSUID, options), target)


def mount_overlay(target: Path, *, lower: Path, upper: Path, work: Path) -> None:
    """Shows `lower` at `target`; what is changed there lands in `upper`. OSError where that is not allowed."""
    pairs = {"lowerdir": lower, "upperdir": upper, "workdir": work}
    options = ",".join(f"{key}={_escaped(path)}" for key, path in pairs.items())
    _check(
        _libc().mount(b"lego-box", os.fsencode(target), b"overlay", MS_NOSUID | MS_NODEV, os.fsencode(options)), target
    )


def _escaped(path: Path) -> str:
    """A path as an overlay option: commas end an option, colons a layer."""
    return "".join(f"\\{letter}" if letter in ",:\\" else letter for letter in str(path))


def bind_mapped(source: Path, target: Path, first_id: int) -> None:
    """Shows a folder or file read-only at `target`, with its owners as a container's: host root as `agent`.

    OSError where the kernel or the file system of `source` cannot map owners.
    """
    flags = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_IDMAP
    _bind(source, target, _MountAttr(flags, 0, 0, owners_namespace(first_id)))


def _bind(source: Path, target: Path, attr: _MountAttr) -> None:
    call = _libc().syscall
    fd = _check(call(SYS_OPEN_TREE, AT_FDCWD, os.fsencode(source), OPEN_TREE_CLONE | os.O_CLOEXEC), source)
    try:
        size = ctypes.c_size_t(ctypes.sizeof(attr))
        _check(call(SYS_MOUNT_SETATTR, fd, b"", AT_EMPTY_PATH, ctypes.byref(attr), size), source)
        _check(call(SYS_MOVE_MOUNT, fd, b"", AT_FDCWD, os.fsencode(target), MOVE_MOUNT_F_EMPTY_PATH), target)
    finally:
        os.close(fd)


def owners_namespace(first_id: int) -> int:
    """An open user namespace whose map is that of `bind_mapped`; one for each process is enough."""
    with _making:
        return _owners_namespace(first_id)


@functools.cache
def _owners_namespace(first_id: int) -> int:
    command = ["unshare", "--user", "sh", "-c", "echo; read -r _"]
    pipe, env = subprocess.PIPE, {"PATH": os.defpath}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()  # by now it is in its new namespace
        proc = Path(f"/proc/{process.pid}")
        for name in ("uid_map", "gid_map"):
            (proc / name).write_text(owners_map(first_id))
        return os.open(proc / "ns" / "user", os.O_RDONLY | os.O_CLOEXEC)


def owners_map(first_id: int, agent: int = 1000) -> str:
    """Lines `id on disk, id on the host, count`: root's files are the agent's, the agent's root's, all others as is."""
    rows = (
        (0, first_id + agent, 1),
        (1, first_id + 1, agent - 1),
        (agent, first_id, 1),
        (agent + 1, first_id + agent + 1, IDS - agent - 1),
    )
    return "".join(f"{disk} {host} {count}\n" for disk, host, count in rows)


def unmount(target: Path) -> None:
    """Unmounts `target`, at once for us even if somebody still uses it; does nothing if it is no mount."""
    _libc().umount2(os.fsencode(target), MNT_DETACH | UMOUNT_NOFOLLOW)
