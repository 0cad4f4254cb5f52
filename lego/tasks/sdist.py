"""A source distribution on disk: unpacked without trust, then parted into the agent's tree and the hidden tests."""

import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

MAX_BYTES = 256 << 20
"""Unpacked size above which an archive is refused."""


def unpack(archive: Path, into: Path) -> Path:
    """The one top folder of the archive, unpacked: plain files and folders only, none outside `into`.

    ValueError names what an archive holds that it must not.
    """
    total = 0
    with tarfile.open(archive) as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts:
                raise ValueError(f"{archive.name}: path {member.name!r} leaves the archive")
            total += member.size
            if total > MAX_BYTES:
                raise ValueError(f"{archive.name}: more than {MAX_BYTES} bytes unpacked")
            content = tar.extractfile(member) if member.isfile() else None
            if content is not None:
                _write(into / path, content.read(), executable=bool(member.mode & 0o100))
    tops = list(into.iterdir())
    if len(tops) != 1 or not tops[0].is_dir():
        raise ValueError(f"{archive.name}: wanted one folder at its top, found {len(tops)} entries")
    return tops[0]


def is_test(path: PurePosixPath) -> bool:
    """Whether a path of a repository belongs to its tests."""
    name = path.name
    named = name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))
    return named or name == "conftest.py" or bool({"tests", "test"} & set(path.parts))


def part(top: Path, tests: str, base: Path, hidden: Path) -> None:
    """Links everything but tests below `base`, and the folder `tests` of `top` to `hidden`/tests."""
    if not (top / tests).is_dir():
        raise ValueError(f"{top.name}: no folder {tests!r} of tests")
    for path in _files(top):
        relative = path.relative_to(top)
        if not is_test(PurePosixPath(relative)) and not any(p.endswith(".egg-info") for p in relative.parts):
            link(path, base / relative)
    for path in _files(top / tests):
        link(path, hidden / "tests" / path.relative_to(top / tests))


def clone(tree: Path, into: Path) -> None:
    """A tree of the same files as `tree`: hard links, so replace a file there, never write into it."""
    for path in _files(tree):
        link(path, into / path.relative_to(tree))


def link(path: Path, target: Path) -> None:
    """`target` becomes the same file as `path`, or a copy where the file system has no links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.hardlink_to(path)
    except OSError:
        shutil.copy2(path, target)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _write(path: Path, content: bytes, *, executable: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(0o755 if executable else 0o644)
