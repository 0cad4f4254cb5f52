"""What differs between two folders of this host, as the changes that lead from one to the other. Follows no links."""

import os
import stat
from pathlib import Path

from sandbox.base import Change


def between(before: Path, after: Path) -> tuple[Change, ...]:
    """The changes, sorted by path, a deleted folder with all that was in it. `.git` at the top is not looked at."""
    old, new = _entries(before), _entries(after)
    gone = [Change(path=path, kind="deleted") for path in old.keys() - new.keys()]
    made = [change for path in new if (change := _changed(before, after, path, old.get(path), new[path]))]
    return tuple(sorted(gone + made, key=lambda change: change.path.parts))


def _entries(top: Path) -> dict[Path, int]:
    """Type and mode of all below a folder; what is no folder, file or link is left out."""
    found = {}
    pending = [Path()]
    while pending:
        folder = pending.pop()
        for entry in os.scandir(top / folder):
            path, mode = folder / entry.name, entry.stat(follow_symlinks=False).st_mode
            if path == Path(".git") or not (stat.S_ISDIR(mode) or stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
                continue
            found[path] = mode
            if stat.S_ISDIR(mode):
                pending.append(path)
    return found


def _changed(before: Path, after: Path, path: Path, old: int | None, new: int) -> Change | None:
    """The change that makes one path what it is after; None where it was that before."""
    if stat.S_ISDIR(new):
        return None if old == new else Change(path=path, kind="dir", mode=stat.S_IMODE(new))
    read = _target if stat.S_ISLNK(new) else Path.read_bytes
    content = read(after / path)
    if old == new and read(before / path) == content:
        return None
    kind = "symlink" if stat.S_ISLNK(new) else "file"
    return Change(path=path, kind=kind, content=content, mode=stat.S_IMODE(new))


def _target(path: Path) -> bytes:
    return os.fsencode(path.readlink())
