"""Tasks that lie ready in a folder: `NAME/task.json`, `NAME/base/` and `NAME/tests/` each."""

import hashlib
import json
from collections.abc import Iterator, Set
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from lego.errors import UsageError
from lego.tasks.task import PytestSuite, Task, TaskSet
from sandbox.base import Progress, Sandbox

MADE_HERE = frozenset({"id", "digest", "base", "tests", "testenv", "verifier", "image", "workdir", "limits"})
"""Fields that follow from where the task lies, or are the same for all tasks of a folder."""
OF_TASK = frozenset(f.name for f in fields(Task)) - MADE_HERE
OF_SUITE = frozenset(f.name for f in fields(PytestSuite)) - MADE_HERE
NEEDED = frozenset(f.name for f in fields(Task) + fields(PytestSuite) if f.default is MISSING) - MADE_HERE


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder of tasks. `task.json` holds the other fields of `Task` and `PytestSuite`: split, fail_to_pass, …"""

    path: Path
    """The folder."""
    testenv: Path
    """Folder with pytest and what the tests import (made by `pip install --target`)."""

    async def build(self, cache: Path, sandbox: Sandbox, progress: Progress) -> TaskSet:
        """All tasks of the folder in the order of their names; UsageError names file and field."""
        if not self.testenv.is_dir():
            raise UsageError(f"tasks.testenv: no folder {self.testenv}; make it by pip install --target")
        files = sorted(self.path.glob("*/task.json"))
        if not files:
            raise UsageError(f"tasks.path: no NAME/task.json below {self.path}")
        tasks = []
        for done, file in enumerate(files, 1):
            tasks.append(self._task(file))
            progress(done, len(files), "reading tasks")
        return TaskSet(tuple(tasks))

    def _task(self, file: Path) -> Task:
        text = file.read_text()
        try:
            given = json.loads(text)
            unknown, missing = given.keys() - OF_TASK - OF_SUITE, NEEDED - given.keys()
            if unknown or missing:
                raise ValueError(_misfits(unknown, missing))
            values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
            return Task(
                id=file.parent.name,
                digest=_digest(file.parent),
                base=_existing(file.parent / "base"),
                verifier=PytestSuite(
                    tests=_existing(file.parent / "tests"),
                    testenv=_existing(self.testenv),
                    **{name: values[name] for name in OF_SUITE & values.keys()},
                ),
                **{name: values[name] for name in OF_TASK & values.keys()},
            )
        except (ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"{file}: {error}") from error


def _misfits(unknown: Set[str], missing: Set[str]) -> str:
    """What to add and what to take away, in words."""
    wanted = f"missing fields {sorted(missing)}" if missing else ""
    known = f"unknown fields {sorted(unknown)}, known are {sorted(OF_TASK | OF_SUITE)}" if unknown else ""
    return "; ".join(filter(None, (wanted, known)))


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        raise ValueError(f"no folder {folder}")
    return folder.resolve()


def _digest(folder: Path) -> str:
    """SHA-256 over names and contents of all files of a task."""
    total = hashlib.sha256()
    for name, content in _files(folder):
        total.update(f"{name}\0{len(content)}\0".encode() + content)
    return total.hexdigest()


def _files(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield str(path.relative_to(folder)), path.read_bytes()
