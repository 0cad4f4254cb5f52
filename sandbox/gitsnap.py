"""Change sets as values: filter them, turn them into a patch text or a digest, and put them into a fresh box.

Only git's plumbing runs, in a private repository that holds the changed files as objects: no file, attribute,
configuration or hook of the agent reaches it.
"""

import hashlib
import io
import os
import shutil
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from sandbox.base import Box, Change, SandboxError

COMMIT = b"commit refs/heads/%s\ncommitter lego <lego@localhost> 0 +0000\ndata 0\n"
DIFF = ("diff-tree", "-r", "-p", "--binary", "--full-index", "--no-renames", "--no-ext-diff", "--no-textconv",
        "--no-color", "--diff-algorithm=myers", "-U3", "old", "new")  # fmt: skip
ARCHIVE_ERROR_BYTES = 4096


def select(changes: Sequence[Change], exclude: Callable[[Path], bool]) -> tuple[Change, ...]:
    """The changes that `exclude` lets through, such that nothing excluded is touched on a detour.

    Goes too: what lies below an excluded path, and a file or link that takes the place of a folder with
    excluded paths in it.
    """
    out = {change.path for change in changes if any(exclude(path) for path in (change.path, *change.path.parents[:-1]))}
    around = {parent for path in out for parent in path.parents}
    return tuple(
        change
        for change in changes
        if change.path not in out and not (change.path in around and change.kind in ("file", "symlink"))
    )


def digest(changes: Sequence[Change]) -> str:
    """A hash of a change set: equal for equal paths, kinds, modes and contents, in whatever order."""
    state = hashlib.sha256()
    for change in sorted(changes, key=lambda change: change.path.parts):
        name = os.fsencode(change.path)
        state.update(b"%d %s%s %o %d " % (len(name), name, change.kind.encode(), change.mode, len(change.content)))
        state.update(change.content)
    return state.hexdigest()


def unified_patch(base: Path, changes: Sequence[Change], exclude: Callable[[Path], bool]) -> str:
    """The changes against `base` as one git patch, the same text for the same changes on every run.

    A record to read and compare, not what grading applies: empty folders are not in it, modes are git's two,
    bytes that are not UTF-8 are escaped, and `.git` is always left out.
    """
    kept = select(changes, lambda path: path.name == ".git" or exclude(path))
    if not kept:
        return ""
    with tempfile.TemporaryDirectory(prefix="lego-patch-") as folder:
        repository = Path(folder)
        for name in ("objects", "refs"):
            (repository / name).mkdir()
        (repository / "HEAD").write_text("ref: refs/heads/none\n")
        _git(repository, "fast-import", "--quiet", stdin=b"".join(_stream(base, kept)))
        return _git(repository, *DIFF).decode(errors="backslashreplace")


def _stream(base: Path, changes: Sequence[Change]) -> Iterator[bytes]:
    """Input for fast-import: a commit with the base's version of every changed path, and one with the new version."""
    yield COMMIT % b"old"
    before = [(change.path, entry) for change in changes if (entry := _of_base(base / change.path))]
    for path, (mode, content) in before:
        yield _put(mode, path, content)
    yield COMMIT % b"new" + b"from refs/heads/old\n"
    for path, _ in before:
        yield b"D %s\n" % _quoted(path)
    for change in changes:
        if change.kind == "file":
            yield _put(b"100755" if change.mode & 0o100 else b"100644", change.path, change.content)
        elif change.kind == "symlink":
            yield _put(b"120000", change.path, change.content)


def _of_base(path: Path) -> tuple[bytes, bytes] | None:
    """Git's mode and the content of a file or link of the base; None for folders and what is not there."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISLNK(mode):
        return b"120000", os.fsencode(path.readlink())
    if stat.S_ISREG(mode):
        return b"100755" if mode & 0o100 else b"100644", path.read_bytes()
    return None


def _put(mode: bytes, path: Path, content: bytes) -> bytes:
    return b"M %s inline %s\ndata %d\n%s\n" % (mode, _quoted(path), len(content), content)


def _quoted(path: Path) -> bytes:
    """The path as fast-import reads it: in quotes, every byte beside letters and digits as an octal escape."""
    plain = b"/._-"
    return b'"%s"' % b"".join(
        bytes([byte]) if bytes([byte]).isalnum() or byte in plain else b"\\%03o" % byte for byte in os.fsencode(path)
    )


def _git(repository: Path, *args: str, stdin: bytes = b"") -> bytes:
    program = shutil.which("git")
    if program is None:
        raise SandboxError("git is not installed: it is needed to write patches")
    env = {
        "GIT_DIR": str(repository),
        "HOME": str(repository),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "LC_ALL": "C",
    }
    done = subprocess.run([program, *args], input=stdin, env=env, capture_output=True, cwd=repository)
    if done.returncode != 0:
        raise SandboxError(f"git {args[0]} failed: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


async def apply_changes(box: Box, changes: Sequence[Change], workdir: Path = Path("/repo")) -> None:
    """Makes the changes in a fresh box with the same base. Needs sh, xargs, rm, rmdir and tar in the box.

    The box's own programs write, so a link can lead nowhere outside the box; paths outside `workdir` are a ValueError.
    """
    for change in changes:
        if change.path.is_absolute() or ".." in change.path.parts or not change.path.parts:
            raise ValueError(f"path={change.path}: want a path below the work folder")
    gone = [change.path for change in changes if change.kind == "deleted"]
    if gone:
        # Folders go only when they are empty then: a filter may have kept the deletion of their files out.
        deepest_first = sorted(gone, key=lambda path: path.parts, reverse=True)
        names = b"".join(b"./%s\0" % os.fsencode(path) for path in deepest_first)
        for program in (["rm", "-f"], ["rmdir"]):
            await box.exec(["xargs", "-0", *program, "--"], cwd=workdir, stdin=names)
    if len(gone) < len(changes):
        result = await box.exec(["tar", "-x", "-p", "-m", "-f", "-"], cwd=workdir, stdin=_archive(changes))
        if result.code != 0:
            reason = result.stderr[:ARCHIVE_ERROR_BYTES].decode(errors="replace").strip()
            raise SandboxError(f"cannot put the changes into the box: {reason or result}")


def _archive(changes: Iterable[Change]) -> bytes:
    """A tar archive of all that is not a deletion."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as archive:
        for change in changes:
            entry = tarfile.TarInfo(str(change.path))
            entry.mode, entry.size = change.mode, len(change.content)
            if change.kind == "dir":
                entry.type = tarfile.DIRTYPE
            elif change.kind == "symlink":
                entry.type, entry.size, entry.linkname = tarfile.SYMTYPE, 0, os.fsdecode(change.content)
            elif change.kind == "deleted":
                continue
            archive.addfile(entry, io.BytesIO(change.content) if change.kind == "file" else None)
    return buffer.getvalue()
