"""What a run has done, in one append-only file: enough to go on after any death, with nothing lost or counted twice.

A line is on the disk before what it tells of counts. The first names the run; then groups start and end, steps are
done, measurements are made or lost, and the last says that the run is finished.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lego.errors import UsageError
from lego.lines import append, rows
from lego.observe.interval import Rate

FILE = "journal.jsonl"
LOCK = "lock"
"""Held by the process that a run folder belongs to."""
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A group that was started."""

    task: str
    visit: int


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A group whose trials are on the disk."""

    version: int
    """Of the weights when its first trial started."""
    drop: str | None
    """Why it is not trained."""
    solved: int
    """Trials that were solved, of those `asked` that the environment did not spoil."""
    asked: int
    replaced: bool
    """It fills no slot of a step: another group has its place."""


@dataclass
class Past:
    """What a journal tells; empty for a new run."""

    identity: Mapping[str, Any] = field(default_factory=dict)
    tasks: str | None = None
    """Digest of the tasks."""
    first: int = 0
    """Number of the run's first step."""
    begun: dict[int, Begun] = field(default_factory=dict)
    ended: dict[int, Ended] = field(default_factory=dict)
    steps: list[tuple[int, ...]] = field(default_factory=list)
    """The groups of each step done, in the order in which they were trained."""
    measured: dict[tuple[str, str], Rate] = field(default_factory=dict)
    """Rates by moment and split."""
    lost: set[tuple[str, str]] = field(default_factory=set)
    """Moments and splits that will never have a rate."""
    finished: bool = False

    @property
    def done(self) -> int:
        """The number of the step that comes next."""
        return self.first + len(self.steps)

    @property
    def consumed(self) -> set[int]:
        """Groups that a step has used up, or that others took the place of."""
        return {number for number, ended in self.ended.items() if ended.replaced}.union(*self.steps)

    def waiting(self) -> list[int]:
        """Groups that ended and were not used yet."""
        return sorted(self.ended.keys() - self.consumed)

    def unfinished(self) -> list[int]:
        """Groups that were under way, to be run again."""
        return sorted(self.begun.keys() - self.ended.keys() - self.consumed)

    @property
    def next_group(self) -> int:
        """The first number that no group had."""
        return max(self.begun, default=-1) + 1


class Journal:
    """Appends to a run's journal, and knows its past."""

    def __init__(self, folder: Path) -> None:
        """Reads what there is. UsageError for a file of another format."""
        self.path = folder / FILE
        self.past = read(self.path)

    def run(self, identity: Mapping[str, Any], first: int = 0) -> None:
        """The first line: which run this is, and the number of its first step."""
        self._line("run", format=FORMAT, identity=dict(identity), first=first)

    def tasks(self, digest: str) -> None:
        """Which tasks the run has. UsageError if it had others before."""
        if self.past.tasks is None:
            self._line("tasks", digest=digest)
        elif self.past.tasks != digest:
            raise UsageError(
                f"tasks: they are not those that {self.path.parent} began with (digest {digest}, then "
                f"{self.past.tasks}); wanted the same tasks, or a new run"
            )

    def begin(self, group: int, task: str, visit: int, version: int) -> None:
        """A group starts."""
        self._line("begin", group=group, task=task, visit=visit, version=version)

    def end(self, group: int, ended: Ended) -> None:
        """A group's trials have ended and lie on the disk."""
        self._line("end", group=group, **vars(ended))

    def step(self, step: int, groups: Sequence[int]) -> None:
        """A step is done, and its numbers are on the disk."""
        self._line("step", step=step, groups=list(groups))

    def measured(self, moment: str, split: str, rate: Rate) -> None:
        """A solve rate was measured."""
        self._line("measured", moment=moment, split=split, hits=rate.hits, asked=rate.asked)

    def lost(self, moment: str, split: str, reason: str) -> None:
        """A solve rate will not be measured any more."""
        self._line("lost", moment=moment, split=split, reason=reason)

    def finish(self) -> None:
        """The run is over; nothing may follow."""
        self._line("finish")

    def _line(self, kind: str, **told: Any) -> None:
        append(self.path, {"kind": kind, **told})
        _add(self.past, kind, told)


def occupied(folder: Path) -> str | None:
    """Why a run cannot begin in the folder, as `run_dir: …, wanted …`; None where nothing else lies in it."""
    left = sorted(path.name for path in folder.glob("*") if path.name not in (LOCK, FILE))
    wanted = "wanted a new or empty folder, or one of this recipe's run"
    return f"run_dir: {folder} is not empty ({left[0]}), {wanted}" if left else None


def read(path: Path) -> Past:
    """What the file tells; an empty past where there is none."""
    past = Past()
    for row in rows(path):
        try:
            _add(past, row.pop("kind"), row)
        except (LookupError, TypeError, ValueError) as error:
            raise UsageError(f"{path}: no journal of this program: {error!r}") from error
    return past


def _add(past: Past, kind: str, told: Mapping[str, Any]) -> None:
    match kind:
        case "run":
            if told["format"] != FORMAT:
                raise ValueError(f"format {told['format']}, wanted {FORMAT}")
            past.identity, past.first = dict(told["identity"]), _count(told, "first")
        case "tasks":
            past.tasks = told["digest"]
        case "begin":
            past.begun[_count(told, "group")] = Begun(task=told["task"], visit=_count(told, "visit"))
        case "end":
            ended = Ended(**{name: value for name, value in told.items() if name != "group"})
            if told["group"] not in past.begun or _count(told, "solved") > _count(told, "asked"):
                raise ValueError(f"{ended} of group {told['group']}, wanted one that began, solved no more than asked")
            past.ended[told["group"]] = ended
        case "step":
            if told["step"] != past.done:
                raise ValueError(f"step {told['step']} after {past.done} steps")
            if not past.ended.keys() >= set(told["groups"]):
                raise ValueError(f"step {told['step']} of groups {told['groups']}, wanted ones that ended")
            past.steps.append(tuple(told["groups"]))
        case "measured":
            past.measured[told["moment"], told["split"]] = Rate(_count(told, "hits"), _count(told, "asked"))
        case "lost":
            past.lost.add((told["moment"], told["split"]))
        case "finish":
            past.finished = True
        case _:
            raise ValueError(f"kind {kind!r}")


def _count(told: Mapping[str, Any], name: str) -> int:
    value = told[name]
    if type(value) is not int or value < 0:
        raise ValueError(f"{name}: {value!r}, wanted a whole number of 0 or more")
    return value


def digest(value: object) -> str:
    """A name for a value made of JSON's types."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
