"""The demo's list of bugs, read from its index file: which packages, which functions, which one-token edits."""

import hashlib
import inspect
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lego.errors import UsageError
from lego.tasks import boot, mutate, report, sdist, witness
from lego.tasks.pip import Pin
from lego.tasks.pytest_verifier import TESTS, pytest_arguments

FORMAT = 1
"""Raised when a build holds something else for the same list."""


@dataclass(frozen=True, kw_only=True)
class Package:
    """A source distribution that tasks are made of."""

    pin: Pin
    tests: str
    roots: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A bug: `edit` put into a function, noticed by `test_file`."""

    package: str
    function: mutate.Function
    edit: mutate.Edit
    test_file: str
    split: str
    candidates: int

    @property
    def id(self) -> str:
        return f"{self.package}-{Path(self.function.path).stem.strip('_')}-{self.function.line}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the index file says."""

    packages: Mapping[str, Package]
    mutants: tuple[Mutant, ...]
    test_environment: tuple[Pin, ...]
    backends: tuple[Pin, ...]
    digest: str

    @classmethod
    def read(cls, path: Path, test_environment: tuple[Pin, ...], backends: tuple[Pin, ...]) -> "Plan":
        """UsageError names the file and what is wrong with it."""
        try:
            text = path.read_text(encoding="utf-8")
            rows = json.loads(text)
            packages = {row["name"]: _package(row) for row in rows["packages"]}
            mutants = tuple(_mutant(row, packages) for row in rows["tasks"])
            if not mutants:
                raise ValueError("no tasks in it")
        except OSError as error:
            raise UsageError(f"tasks.index: cannot read {path}: {error.strerror}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"tasks.index: {path} is not a list of demo tasks: {error!r}") from error
        return cls(
            packages=packages,
            mutants=mutants,
            test_environment=test_environment,
            backends=backends,
            digest=_digest(text, test_environment),
        )


def instruction(function: mutate.Function, test: str) -> str:
    """What the agent is told: where, and which test fails."""
    name = test.rpartition("::")[2].partition("[")[0]
    return f"{function.path}:{function.line} {name} fails."


def _digest(text: str, test_environment: tuple[Pin, ...]) -> str:
    """Changes with the list, the pins, the interpreter and the code that decides what a build holds."""
    parts = [str(FORMAT), text, sys.version, repr(test_environment), repr(pytest_arguments(TESTS, ""))]
    parts += [inspect.getsource(module) for module in (boot, mutate, report, sdist, witness)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _package(row: dict[str, Any]) -> Package:
    pin = Pin(name=row["name"], version=row["version"], sha256=row["sha256"])
    return Package(pin=pin, tests=row["tests"], roots=tuple(row["roots"]))


def _mutant(row: dict[str, Any], packages: Mapping[str, Package]) -> Mutant:
    if row["package"] not in packages:
        raise ValueError(f"package {row['package']!r} of a task is not listed")
    return Mutant(
        package=row["package"],
        function=mutate.Function(row["path"], row["name"], row["line"], row["end"]),
        edit=mutate.Edit(**row["edit"]),
        test_file=row["test_file"],
        split=row["split"],
        candidates=row["candidates"],
    )
