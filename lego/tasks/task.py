"""A task: what the agent is told, the folder it works in, and the hidden tests that judge it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sandbox.base import Sandbox

SPLITS = ("train", "heldout")
Progress = Callable[[int, int, str], None]
"""Called with steps done, steps in all, and what is done now."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Hidden tests and how they are run: the fields of `Task` of the same meaning."""

    tests: Path
    test_file: str
    testenv: Path
    roots: tuple[str, ...] = (".",)
    cpu_s: int = 5
    wall_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class Task:
    """One problem: a snapshot with a bug and without tests, and the suite that notices the bug."""

    id: str
    package: str
    split: str
    digest: str
    """Changes whenever anything that decides a verdict changes."""
    base: Path
    """Read-only snapshot the agent's box starts from."""
    instruction: str
    tests: Path
    """Folder of the hidden tests; it never enters the agent's box."""
    test_file: str
    """The one file of `tests` that is run."""
    testenv: Path
    """Folder with pytest and what the tests import, apart from the package itself."""
    roots: tuple[str, ...] = (".",)
    """Folders of the snapshot that are import roots."""
    tests_cpu_s: int = 5
    """CPU time the tests may take; more is the agent's failure."""
    tests_s: float = 60.0
    """Wall time the tests may take; more is the agent's failure."""
    fail_to_pass: tuple[str, ...]
    """Tests, as `module.Class::name`, that fail on `base` and pass once it is fixed."""
    pass_to_pass: tuple[str, ...] = ()
    """Tests that pass on `base` and must go on passing."""
    max_patch_bytes: int = 1 << 20
    """A larger change is a failure and is not run."""
    chance: float | None = None
    """Solve rate of a uniformly random candidate edit; None where nobody counted."""

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ValueError(f"task {self.id}: split {self.split!r}, wanted one of {', '.join(SPLITS)}")
        if not self.fail_to_pass:
            raise ValueError(f"task {self.id}: no fail_to_pass test, so nothing could tell a fix")
        both = set(self.fail_to_pass) & set(self.pass_to_pass)
        if both:
            raise ValueError(f"task {self.id}: {sorted(both)[0]} is in both fail_to_pass and pass_to_pass")

    @property
    def suite(self) -> Suite:
        """How its hidden tests are run."""
        return Suite(
            tests=self.tests,
            test_file=self.test_file,
            testenv=self.testenv,
            roots=self.roots,
            cpu_s=self.tests_cpu_s,
            wall_s=self.tests_s,
        )

    @property
    def required(self) -> tuple[str, ...]:
        """Every test that must be reported as passed."""
        return self.fail_to_pass + self.pass_to_pass


@dataclass(frozen=True)
class TaskSet:
    """Tasks of both splits, ids unique."""

    tasks: tuple[Task, ...]

    def __post_init__(self) -> None:
        ids = [task.id for task in self.tasks]
        if len(set(ids)) != len(ids):
            raise ValueError(f"task id {next(i for i in ids if ids.count(i) > 1)!r} appears twice")

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, task_id: str) -> Task:
        for task in self.tasks:
            if task.id == task_id:
                return task
        raise KeyError(task_id)

    @property
    def train(self) -> tuple[Task, ...]:
        return tuple(task for task in self.tasks if task.split == "train")

    @property
    def heldout(self) -> tuple[Task, ...]:
        return tuple(task for task in self.tasks if task.split == "heldout")


class TaskSource(Protocol):
    """A recipe's frozen choice of tasks."""

    async def build(self, cache: Path, sandbox: Sandbox, progress: Progress) -> TaskSet:
        """The tasks, made and verified below `cache` unless they are there; UsageError where that cannot be."""
        ...
