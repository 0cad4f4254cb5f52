"""A task: what the agent is told, the folder it works in, and the verifier that judges the work."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args

from sandbox.base import Image, Limits, Progress, Sandbox, User

SPLITS = ("train", "heldout")


Plugin = Literal[
    "doctest", "faulthandler", "legacypath", "logging", "pytester", "threadexception", "unraisableexception"
]


@dataclass(frozen=True, kw_only=True)
class PytestSuite:
    """Hidden tests in one file, run by pytest; a work is good when every required test passes."""

    tests: Path
    """Folder of the hidden tests; it never enters the agent's box."""
    test_file: str
    """The one file of `tests` that is run."""
    testenv: Path
    """Folder with pytest and what the tests import, apart from the package itself."""
    roots: tuple[str, ...] = (".",)
    """Folders of the snapshot that are import roots."""
    cpu_s: int = 5
    """CPU time the tests may take; more is the agent's failure."""
    plugins: tuple[Plugin, ...] = ()
    """Parts of pytest that the tests need and a verdict leaves out: `logging` for caplog, `legacypath` for tmpdir."""
    wall_s: float = 60.0
    """Wall time the tests may take; more is the agent's failure."""
    fail_to_pass: tuple[str, ...] = ()
    """Tests, as `module.Class::name`, that fail on the base and pass once it is fixed; a `Task` needs one."""
    pass_to_pass: tuple[str, ...] = ()
    """Tests that pass on the base and must go on passing."""

    def __post_init__(self) -> None:
        unknown = set(self.plugins) - set(get_args(Plugin))
        if unknown:
            raise ValueError(f"plugins: {sorted(unknown)[0]!r}, wanted some of {', '.join(get_args(Plugin))}")
        both = set(self.fail_to_pass) & set(self.pass_to_pass)
        if both:
            raise ValueError(f"{sorted(both)[0]} is in both fail_to_pass and pass_to_pass")

    @property
    def required(self) -> tuple[str, ...]:
        """Every test that must be reported as passed."""
        return self.fail_to_pass + self.pass_to_pass


@dataclass(frozen=True, kw_only=True)
class Script:
    """A verifier that is a program of the task's own: `test.sh` in a folder, which writes a reward file."""

    folder: Path
    """Folder of `test.sh` and what it needs; it never enters the agent's box."""
    timeout_s: float = 600.0
    """Wall time the script may take."""
    user: User = "root"
    """Who the script runs as in the box."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One problem: what the agent is told, the snapshot it works on, and what judges the work."""

    id: str
    package: str
    split: str
    digest: str
    """Changes whenever anything that decides a verdict changes."""
    base: Path
    """Read-only snapshot the agent's box starts from."""
    instruction: str
    verifier: PytestSuite | Script
    """Hidden tests, or a hidden script."""
    image: Image | None = None
    """What the boxes' file system comes from; None for what the sandbox has by itself."""
    workdir: Path = Path("/repo")
    """Where the boxes show `base`."""
    limits: Limits | None = None
    """What each of its boxes may use; None for what recipe and verifier give. The deadline is theirs in any case."""
    harness_s: float | None = None
    """Wall time that the task gives the agent; None for what the recipe gives."""
    harness: str | None = None
    """Name of the harness that its training trials run; None for what the recipe draws."""
    max_patch_bytes: int = 1 << 20
    """A larger change is a failure and is not run."""
    chance: float | None = None
    """Solve rate of a uniformly random candidate edit; None where nobody counted."""

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ValueError(f"task {self.id}: split {self.split!r}, wanted one of {', '.join(SPLITS)}")
        if self.harness is not None and not (isinstance(self.harness, str) and self.harness):
            raise ValueError(f"task {self.id}: harness: {self.harness!r}, wanted a name or none")
        if isinstance(self.verifier, PytestSuite) and not self.verifier.fail_to_pass:
            raise ValueError(f"task {self.id}: no fail_to_pass test, so nothing could tell a fix")


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
