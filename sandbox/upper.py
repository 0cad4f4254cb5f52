"""Reads what a box changed from its overlay layer, on the host, without running anything and without following links.

Programs of the box may still be writing: folders are opened one below the other, so a link swapped in leads nowhere.
"""

# ruff: noqa: PTH101, PTH115, PTH208
import errno
import os
import stat
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sandbox.base import Change

MAX_DEPTH = 200
MAX_PATH = 2048
"""Bytes of a path below the work folder: with a folder before it, the host can still name it."""
MAX_CHANGES = 100_000
CHUNK = 1 << 20
OPAQUE = ("user.overlay.opaque", "trusted.overlay.opaque")
WHITEOUT = ("user.overlay.whiteout", "trusted.overlay.whiteout")
NO_XATTR = (errno.ENODATA, errno.EOPNOTSUPP, errno.EPERM)


class TooLarge(ValueError):
    """A box changed more than may be taken out of it: the fault of the program in it, not of the place."""


def read_changes(upper: Path, base: Path, max_bytes: int) -> tuple[Change, ...]:
    """All changes, sorted by path: parents first. Contents and names together must fit into `max_bytes`.

    Nothing above that is read: sizes are looked at first, and counted while reading, for a file may grow meanwhile.

    A deleted folder comes with everything that was in it, so that a filter on paths sees each file.
    Sockets, pipes and device files are left out.
    """
    walk = _Walk(base=base, left=max_bytes, max_bytes=max_bytes)
    fd = os.open(upper, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        walk.folder(fd, Path(), hidden=False)
    finally:
        os.close(fd)
    return tuple(sorted(walk.changes, key=lambda change: change.path.parts))


@dataclass
class _Walk:
    base: Path
    left: int
    max_bytes: int
    changes: list[Change] = field(default_factory=list)

    def spend(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise TooLarge(f"the box changed more than {self.max_bytes} bytes")

    def folder(self, fd: int, path: Path, *, hidden: bool) -> None:
        """Adds the changes below one folder of the layer; `hidden` says that the base does not show through here."""
        if len(path.parts) > MAX_DEPTH:
            raise TooLarge(f"the box made folders more than {MAX_DEPTH} deep")
        if len(os.fsencode(path)) > MAX_PATH - 256:
            raise TooLarge(f"the box made paths of more than {MAX_PATH} bytes")
        names = self.names(fd)
        hidden = hidden or _marked(fd, OPAQUE)
        if hidden:
            self.children_gone(path, kept=names)
        for name in names:
            try:
                self.entry(fd, name, path / name, hidden=hidden)
            except FileNotFoundError:
                continue  # removed by a program of the box after we listed it

    def names(self, fd: int) -> list[str]:
        """What a folder of the layer holds, counted while it is listed."""
        names = []
        with os.scandir(fd) as entries:
            for entry in entries:
                self.spend(len(os.fsencode(entry.name)))
                names.append(entry.name)
        return sorted(names)

    def add(self, change: Change) -> None:
        if len(self.changes) == MAX_CHANGES:
            raise TooLarge(f"the box changed more than {MAX_CHANGES} paths")
        self.changes.append(change)

    def entry(self, parent: int, name: str, path: Path, *, hidden: bool) -> None:
        with _found(parent, name) as (fd, status):
            before = _lstat(self.base, path)
            kind = stat.S_IFMT(status.st_mode)
            if before and stat.S_ISDIR(before.st_mode) and kind in (stat.S_IFREG, stat.S_IFLNK):
                self.children_gone(path)
            if kind == stat.S_IFCHR and status.st_rdev == 0:
                self.gone(path)
            elif kind == stat.S_IFDIR:
                self.subfolder(fd, status, path, before, hidden=hidden)
            elif kind == stat.S_IFLNK:
                self.link(os.fsencode(os.readlink("", dir_fd=fd)), path, before)
            elif kind == stat.S_IFREG:
                self.file(fd, status, path, before)

    def subfolder(
        self, fd: int, status: os.stat_result, path: Path, before: os.stat_result | None, *, hidden: bool
    ) -> None:
        if not before or before.st_mode != status.st_mode:
            self.add(Change(path=path, kind="dir", mode=stat.S_IMODE(status.st_mode)))
        with _reopened(fd, status, os.O_RDONLY | os.O_DIRECTORY) as readable:
            self.folder(readable, path, hidden=hidden)

    def link(self, target: bytes, path: Path, before: os.stat_result | None) -> None:
        if before and stat.S_ISLNK(before.st_mode) and os.fsencode(os.readlink(self.base / path)) == target:
            return
        self.spend(len(target))
        self.add(Change(path=path, kind="symlink", content=target, mode=0o777))

    def file(self, fd: int, status: os.stat_result, path: Path, before: os.stat_result | None) -> None:
        with _reopened(fd, status, os.O_RDONLY) as readable:
            if status.st_size == 0 and _marked(readable, WHITEOUT):
                self.gone(path)
                return
            if before and before.st_mode == status.st_mode and _same(readable, self.base / path, before.st_size):
                return
            if os.fstat(readable).st_size > self.left:
                self.spend(self.left + 1)
            content = _read(readable, self.left + 1)
        self.spend(len(content))
        self.add(Change(path=path, kind="file", content=content, mode=stat.S_IMODE(status.st_mode)))

    def gone(self, path: Path) -> None:
        """Adds the deletion of a path that the base has, and of all below it."""
        if _lstat(self.base, path):
            self.spend(len(path.name))
            self.add(Change(path=path, kind="deleted"))
            self.children_gone(path)

    def children_gone(self, path: Path, kept: Collection[str] = ()) -> None:
        status = _lstat(self.base, path)
        if status and stat.S_ISDIR(status.st_mode):
            for name in sorted({*os.listdir(self.base / path)} - {*kept}):
                self.gone(path / name)


@contextmanager
def _found(parent: int, name: str) -> Iterator[tuple[int, os.stat_result]]:
    """A handle on one entry itself, which pins it whatever a program does to the name, and its status."""
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        yield fd, os.fstat(fd)
    finally:
        os.close(fd)


@contextmanager
def _reopened(handle: int, status: os.stat_result, flags: int) -> Iterator[int]:
    """The entry opened for reading, also where the box's program has taken our right to read it."""
    path, mode = f"/proc/self/fd/{handle}", stat.S_IMODE(status.st_mode)
    needed = mode | (0o700 if flags & os.O_DIRECTORY else 0o400)
    with ExitStack() as undo:
        if mode != needed and os.geteuid() != 0:
            os.chmod(path, needed)
            undo.callback(os.chmod, path, mode)
        fd = os.open(path, flags | os.O_CLOEXEC)
        undo.callback(os.close, fd)
        yield fd


def _read(fd: int, limit: int) -> bytes:
    """The file's bytes, at most `limit`."""
    chunks = []
    while limit > 0 and (chunk := os.read(fd, min(limit, CHUNK))):
        chunks.append(chunk)
        limit -= len(chunk)
    return b"".join(chunks)


def _same(fd: int, path: Path, size: int) -> bool:
    """Whether a file has the content of this file of the base, which has `size`; reads on only while they agree."""
    if os.fstat(fd).st_size != size:
        return False
    with path.open("rb", buffering=0) as file:
        while (chunk := file.read(CHUNK)) == os.read(fd, CHUNK):
            if not chunk:
                return True
    os.lseek(fd, 0, os.SEEK_SET)
    return False


def _marked(fd: int, names: Collection[str]) -> bool:
    """Whether the overlay has set one of these marks (it lets no program of the box set them)."""
    for name in names:
        try:
            if os.getxattr(fd, name):
                return True
        except OSError as error:
            if error.errno not in NO_XATTR:
                raise
    return False


def _lstat(base: Path, path: Path) -> os.stat_result | None:
    """The base's own entry at a path; None for what lies behind one of its links, which is another path."""
    if any((base / parent).is_symlink() for parent in path.parents[:-1]):
        return None
    try:
        return (base / path).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
