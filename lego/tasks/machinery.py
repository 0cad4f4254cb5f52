"""Which of an agent's changes count: its code, and nothing that steers the tests."""

import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from lego.errors import VerdictError
from lego.tasks.task import Script, Task
from sandbox.base import Change

_INI = {"pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml"}
_SETTINGS = frozenset(_INI | {"conftest.py", "sitecustomize.py", "usercustomize.py"})
_FOLDERS = frozenset({".git", "__pycache__", ".pytest_cache", "tests", "test"})
_INSTALLED = (".dist-info", ".egg-info", ".egg-link", ".egg")
_NEVER = frozenset({".pth", ".pyc", ".pyo"})
_BINARY = frozenset({".so", ".pyd", ".dll", ".dylib", ".o", ".a", ".whl"})


def is_test_machinery(path: Path) -> bool:
    """Whether a path could steer the tests rather than the code under test."""
    name = path.name
    return (
        bool(_FOLDERS & set(path.parts))
        or name in _SETTINGS
        or path.suffix in _NEVER
        or any(part.endswith(_INSTALLED) for part in path.parts)
        or (name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py")))
    )


def counts(task: Task, change: Change) -> bool:
    """Whether a change is part of the work: no test machinery, no new machine code, no link out of the repository.

    For a script all counts: what it is steered by lies outside the work folder, or is its author's own choice.
    What does not count is as in the base again. This also drops honest work: a dependency added to pyproject.toml,
    code in a folder called `test`, a rebuilt library that the base did not have.
    """
    if isinstance(task.verifier, Script):
        return True
    if is_test_machinery(change.path):
        return False
    if change.path.suffix in _BINARY or ".so." in change.path.name:
        return (task.base / change.path).is_file()
    return change.kind != "symlink" or _stays(change)


def _stays(change: Change) -> bool:
    """Whether a link stays below the repository, wherever the links lead that its target goes through."""
    target = PurePosixPath(os.fsdecode(change.content))
    ups = next((i for i, part in enumerate(target.parts) if part != ".."), len(target.parts))
    return not target.is_absolute() and ".." not in target.parts[ups:] and ups <= len(change.path.parts) - 1


def judged(task: Task, changes: Iterable[Change]) -> tuple[Change, ...]:
    """The changes that count, in path order, without those that equal the base."""
    kept = [change for change in changes if counts(task, change)]
    for change in kept:
        if change.path.is_absolute() or ".." in change.path.parts or not change.path.parts:
            raise VerdictError(f"task {task.id}: the box reports a change at {change.path}")
    return tuple(sorted((c for c in kept if not _as_in_base(task.base, c)), key=lambda c: (c.path.parts, c.kind)))


def _as_in_base(base: Path, change: Change) -> bool:
    path = base / change.path
    if any((base / parent).is_symlink() for parent in change.path.parents[:-1]):
        return False
    if change.kind == "dir":
        return path.is_dir() and not path.is_symlink()
    if change.kind != "file" or path.is_symlink() or not path.is_file():
        return False
    status = path.stat()
    same = status.st_size == len(change.content) and status.st_mode & 0o111 == _mode(change)
    return same and path.read_bytes() == change.content


def _mode(change: Change) -> int:
    return change.mode & 0o111 if change.kind == "file" else 0
