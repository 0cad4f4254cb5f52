"""Change sets as values: filter them, name them, turn them into a patch text and back.

Only git's plumbing runs, in a private repository that holds the changed files as objects: no file, attribute,
configuration or hook of the agent reaches it.
"""

import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandbox.base import Change, SandboxError
from sandbox.compare import between
from sandbox.git import AS_THEY_ARE, git, quoted
from sandbox.upper import TooLarge

COMMIT = b"commit refs/heads/%s\ncommitter lego <lego@localhost> 0 +0000\ndata 0\n"
DIFF = ("diff-tree", "-r", "-p", "--binary", "--full-index", "--no-renames", "--no-ext-diff", "--no-textconv",
        "--no-color", "--diff-algorithm=myers", "-U3", "old", "new")  # fmt: skip
HEADER = re.compile(rb"^diff --git (a/[^\"\n]* [^\"\n]* b/[^\"\n]*)\n", re.MULTILINE)
PATCH_BYTES = 1 << 28


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
    """A hash of a change set: equal for equal paths, kinds, permissions and contents, in whatever order."""
    state = hashlib.sha256()
    for change in sorted(changes, key=lambda change: change.path.parts):
        # Links and deletions have no permissions of their own.
        mode = change.mode & 0o7777 if change.kind in ("file", "dir") else 0
        for part in (os.fsencode(change.path), change.kind.encode(), b"%o" % mode, change.content):
            state.update(b"%d:" % len(part) + part)
    return state.hexdigest()


def unified_patch(
    base: Path, changes: Sequence[Change], exclude: Callable[[Path], bool], max_bytes: int = PATCH_BYTES
) -> str:
    """The changes against `base` as one git patch: `git apply` makes them on a base, the text is always the same.

    Git has two modes and no empty folders. Files that are not UTF-8 are binary patches; in a link's target, which git
    always shows as text, such bytes are escaped and so not the same again. `.git` and the names that git
    takes for it are left out, and so are links named `.gitmodules`: `git apply` refuses them. TooLarge where the
    changed files, old and new, have more than `max_bytes`.
    """
    kept = [
        change
        for change in select(changes, lambda path: _is_dotgit(path.name) or exclude(path))
        if not (change.kind == "symlink" and _is_gitmodules(change.path.name))
    ]
    if not kept:
        return ""
    with tempfile.TemporaryDirectory(prefix="lego-patch-") as folder:
        repository = _private_repository(Path(folder, "git"))
        (repository / "binary").write_text("* -diff\n")
        text, binary = _halves(list(_versions(base, kept, max_bytes)))
        return _diff(repository, text) + _diff(repository, binary, "-c", f"core.attributesFile={repository}/binary")


def patch_changes(base: Path, patch: bytes) -> tuple[Change, ...]:
    """What a git patch makes of `base`, which stays as it is; ValueError where the patch does not fit it.

    The way back from `unified_patch`. The patch is applied to the bytes of the files, whatever `.gitattributes` say.
    """
    with tempfile.TemporaryDirectory(prefix="lego-patch-") as folder:
        work = Path(folder, "work")
        shutil.copytree(base, work, symlinks=True, ignore=lambda at, names: {".git"} if Path(at) == base else set())
        repository = _private_repository(Path(folder, "git"))
        (repository / "info").mkdir()
        (repository / "info" / "attributes").write_text(AS_THEY_ARE)
        try:
            git(work, "apply", "-", stdin=patch, env={"GIT_DIR": str(repository), "GIT_WORK_TREE": str(work)})
        except SandboxError as error:
            raise ValueError(f"the patch does not fit {base}: {error}") from error
        return between(base, work)


def _private_repository(folder: Path) -> Path:
    """An empty one without work tree, settings or hooks."""
    for name in ("objects", "refs"):
        (folder / name).mkdir(parents=True)
    (folder / "HEAD").write_text("ref: refs/heads/none\n")
    return folder


@dataclass(frozen=True)
class _Version:
    """Git's mode and the content of one path, in the base or as it was left."""

    path: Path
    mode: bytes
    content: bytes
    ref: bytes


def _versions(base: Path, changes: Sequence[Change], max_bytes: int) -> Iterator[_Version]:
    """Both versions of each changed path, where it has them."""
    left = max_bytes - sum(len(change.content) for change in changes)
    for change in changes:
        if before := _of_base(base, change.path, left):
            left -= len(before.content)
            yield before
        if change.kind == "file":
            mode = b"100755" if change.mode & 0o100 else b"100644"
            yield _Version(change.path, mode, change.content, b"new")
        elif change.kind == "symlink":
            yield _Version(change.path, b"120000", change.content, b"new")


def _of_base(base: Path, path: Path, max_bytes: int) -> _Version | None:
    """A file or link of the base; None for folders and what is not there. No link of the base is followed."""
    if any((base / parent).is_symlink() for parent in path.parents[:-1]):
        return None
    try:
        status = (base / path).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISLNK(status.st_mode):
        return _Version(path, b"120000", os.fsencode((base / path).readlink()), b"old")
    if not stat.S_ISREG(status.st_mode):
        return None
    if status.st_size > max_bytes:
        raise TooLarge(f"a patch of the changes would be too large: {path} had {status.st_size} bytes")
    mode = b"100755" if status.st_mode & 0o100 else b"100644"
    return _Version(path, mode, (base / path).read_bytes(), b"old")


def _halves(versions: Sequence[_Version]) -> tuple[list[_Version], list[_Version]]:
    """What a patch in UTF-8 can show as lines, and what it cannot, both versions of a path in the same half."""
    odd = {version.path for version in versions if not _is_text(version.content)}
    return [v for v in versions if v.path not in odd], [v for v in versions if v.path in odd]


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _diff(repository: Path, versions: Sequence[_Version], *options: str) -> str:
    if not versions:
        return ""
    env = {"GIT_DIR": str(repository)}
    git(repository, "fast-import", "--quiet", "--force", stdin=b"".join(_stream(versions)), env=env)
    patch = git(repository, *options, *DIFF, env=env)
    # Git cuts the line it puts behind @@ at 80 bytes, so also within a character.
    return HEADER.sub(_in_quotes, patch).decode(errors="backslashreplace")


def _in_quotes(header: re.Match[bytes]) -> bytes:
    """The first line of a file's patch with both names in quotes: without them, git misreads some spaces."""
    name = header[1][: len(header[1]) // 2].removeprefix(b"a/")
    return b'diff --git "a/%s" "b/%s"\n' % (name, name)


def _stream(versions: Sequence[_Version]) -> Iterator[bytes]:
    """Input for fast-import: a commit with the base's version of every changed path, and one with the new version."""
    for ref in (b"old", b"new"):
        yield COMMIT % ref + b"deleteall\n"
        for v in versions:
            if v.ref == ref:
                yield b"M %s inline %s\ndata %d\n%s\n" % (v.mode, quoted(v.path), len(v.content), v.content)


def _is_dotgit(name: str) -> bool:
    """Whether git takes a name for its own folder, as it does for spellings that other file systems fold to it."""
    stem = os.fsencode(name).split(b"\\")[0].split(b":")[0].rstrip(b" .").lower()
    return stem in (b".git", b"git~1")


def _is_gitmodules(name: str) -> bool:
    """As `_is_dotgit`, for the list of submodules."""
    stem = os.fsencode(name).split(b":")[0].rstrip(b" .").lower()
    return stem == b".gitmodules" or stem.startswith((b"gitmod~", b"gi7eba~"))
