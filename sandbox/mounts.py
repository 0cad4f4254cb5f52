"""Mounting and unmounting on the host, for root only: libc's two calls."""

import ctypes
import functools
import os
from pathlib import Path

MS_NOSUID, MS_NODEV = 2, 4
MNT_DETACH = 2


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def mount_tmpfs(target: Path, size_bytes: int, inodes: int) -> None:
    """Mounts a memory file system of a limited size; OSError where that is not allowed."""
    options = f"size={size_bytes},nr_inodes={inodes},mode=0755".encode()
    if _libc().mount(b"lego-box", os.fsencode(target), b"tmpfs", MS_NOSUID | MS_NODEV, options) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), str(target))


def unmount(target: Path) -> None:
    """Unmounts `target`, at once for us even if somebody still uses it; does nothing if it is no mount."""
    _libc().umount2(os.fsencode(target), MNT_DETACH)
