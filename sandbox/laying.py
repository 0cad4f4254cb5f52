"""Puts a change set into a fresh box of any backend, by programs that every box has; GNU's and busybox's both do."""

import io
import os
import secrets
import tarfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from sandbox.base import Box, Change, SandboxError

REASON_BYTES = 4096


async def apply_changes(box: Box, changes: Sequence[Change], workdir: Path = Path("/repo")) -> None:
    """Makes the changes in a fresh box with the same base. Needs sh, tar, xargs, rm, rmdir, mkdir and chmod in the box.

    ValueError for a path outside `workdir` or below a changed file; SandboxError where the changes do not fit the
    base, as when a path leads through one of its links. The box's own programs write: nothing gets outside the box.
    """
    _refuse_stray(changes)
    if not changes:
        return
    argv = ["sh", "-c", LAY, "sh", f"/tmp/lego-{secrets.token_hex(8)}"]
    result = await box.exec(argv, cwd=workdir, stdin=_order(changes))
    if result.code != 0:
        reason = result.stderr[-REASON_BYTES:].decode(errors="replace").strip()
        raise SandboxError(f"cannot put the changes into the box: {reason or result}")


def _refuse_stray(changes: Sequence[Change]) -> None:
    closed = {change.path for change in changes if change.kind in ("file", "symlink")}
    for change in changes:
        path = change.path
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in str(path):
            raise ValueError(f"path={path}: want a path below the work folder")
        above = closed.intersection(path.parents)
        if above and change.kind != "deleted":
            raise ValueError(f"path={path}: lies below {above.pop()}, which is changed to a file or link")


LAY = r"""
set -u
export t="$1"
trap 'rm -rf "$t"' EXIT
mkdir -m 700 "$t" && : >"$t/closed" && tar -x -f - -C "$t" || exit 1
xargs -0 sh -c '
for entry; do
  path="${entry#?}"
  if [ -L "$path" ] || { [ -e "$path" ] && [ ! -d "$path" ]; }; then
    case "$entry" in n*) rm -f -- "$path" ;; *) echo "$path is no folder in the base" >&2; exit 255 ;; esac
  fi
  if [ -d "$path" ] && [ ! -w "$path" ]; then
    chmod u+w "$path" || exit 255
    case "$entry" in p*) printf "%s\000" "$path" >>"$t/closed" ;; esac
  fi
done' sh <"$t/folders" || exit 1
xargs -0 rm -f -- <"$t/gone" 2>"$t/refused"
xargs -0 rmdir -- <"$t/gone_upwards" 2>"$t/refused"
xargs -0 sh -c '
for path; do
  if [ -L "$path" ] || { [ -e "$path" ] && [ ! -d "$path" ]; }; then
    echo "$path cannot be removed" >&2; exit 255
  fi
done' sh <"$t/gone" || exit 1
tar -x -p -m -f "$t/tree" || exit 1
xargs -0 sh -c '
for entry; do
  path="${entry#????}"
  chmod "${entry%"$path"}" "$path" || exit 255
done' sh <"$t/modes" || exit 1
xargs -0 sh -c 'for path; do [ -L "$path" ] || [ ! -d "$path" ] || chmod u-w "$path"; done' sh <"$t/closed"
"""
"""Lays a change set, whose parts come as a tar archive on the standard input, in the current folder.

From the top down, links and files make room for folders, and folders that are closed to writing are opened; what is
deleted or replaced goes, folders only when they are empty by then (a filter may have kept their files); then all
that is new is unpacked, and folders get their modes, which not every tar sets. No step goes through a link: every
folder on the way was looked at before.
"""


def _order(changes: Sequence[Change]) -> bytes:
    """What `LAY` reads: lists of names, each ended by a NUL, and the new files as an archive of their own."""
    made = {change.path: b"%04o" % (change.mode & 0o7777) for change in changes if change.kind == "dir"}
    folders = {parent for change in changes for parent in change.path.parents} | made.keys()
    gone = _downwards(change.path for change in changes if change.kind != "dir")
    parts = {
        "folders": _names(_downwards(folders), lambda path: b"n" if path in made else b"p"),
        "gone": _names(gone),
        "gone_upwards": _names(reversed(gone)),
        "tree": _archive(changes),
        "modes": _names(reversed(_downwards(made)), made.__getitem__),
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, content in parts.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _downwards(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: path.parts)


def _names(paths: Iterable[Path], mark: Callable[[Path], bytes] = lambda path: b"") -> bytes:
    return b"".join(b"%s./%s\0" % (mark(path), os.fsencode(path)) for path in paths)


def _archive(changes: Sequence[Change]) -> bytes:
    """A tar archive of all that is not a deletion."""
    buffer = io.BytesIO()
    with tarfile.open(
        fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape"
    ) as archive:
        for change in sorted(changes, key=lambda change: change.path.parts):
            if change.kind != "deleted":
                archive.addfile(_entry(change), io.BytesIO(change.content) if change.kind == "file" else None)
    return buffer.getvalue()


def _entry(change: Change) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(str(change.path))
    entry.mode = change.mode
    if change.kind == "dir":
        entry.type, entry.mode = tarfile.DIRTYPE, 0o700
    elif change.kind == "symlink":
        entry.type, entry.linkname = tarfile.SYMTYPE, os.fsdecode(change.content)
    else:
        entry.size = len(change.content)
    return entry
