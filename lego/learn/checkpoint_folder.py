"""Checkpoint folders of a run: which are whole, which is the newest, which may go; imports no torch.

`step-000012` is whole: it was written as `step-000012.part` and renamed once every file lay on the disk. What may go
is renamed to `step-000012.gone` before its files are removed. Nobody finds either, and the next save removes them.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lego.disk import sync_names
from lego.errors import UsageError

FORMAT = 1
META = "meta.json"
PART, GONE = ".part", ".gone"
_NAME = re.compile(r"step-(\d{6,})")
_LEFTOVER = re.compile(rf"{_NAME.pattern}({re.escape(PART)}|{re.escape(GONE)})")


@dataclass(frozen=True, kw_only=True)
class Meta:
    """What a checkpoint says of itself."""

    step: int
    """Optimizer steps behind its weights."""
    model_type: str
    layout: Mapping[str, Any]
    """Of the ranks that wrote it; others can read it."""
    metrics: Mapping[str, float | None]
    """What was measured of its weights; None for what is not finite."""
    critic: bool
    """Whether it holds a critic beside the policy."""
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Which checkpoints stay: the `last` newest, and the `best` by solve rate."""

    last: int = 1
    best: int = 0


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A whole checkpoint; `score` is its solve rate, None if that was not measured."""

    folder: Path
    step: int
    score: float | None


def place(root: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return root / f"step-{step:06d}"


def steps(root: Path) -> list[Path]:
    """The whole checkpoints in `root`, by step."""
    named = [path for path in root.glob("step-*") if _NAME.fullmatch(path.name) and (path / META).is_file()]
    return sorted(named, key=_step)


def latest(root: Path) -> Path | None:
    """The newest whole checkpoint in `root`, if there is one."""
    return next(reversed(steps(root)), None)


def find(path: Path) -> Path:
    """`path` if it is a checkpoint, or the newest one in it. Raises UsageError if there is none."""
    found = path if (path / META).is_file() else latest(path)
    if found is None:
        raise UsageError(f"{path}: no checkpoint here; wanted a folder step-… of a trainer, or one that holds some")
    return found


def read_meta(folder: Path) -> Meta:
    """What a checkpoint says of itself. Raises UsageError for one of another format, or damaged."""
    try:
        values = json.loads((folder / META).read_text())
        if values.get("format") != FORMAT:
            raise UsageError(f"{folder}: checkpoint format {values.get('format')}, wanted {FORMAT}")
        return Meta(**values)
    except (ValueError, AttributeError, TypeError) as error:
        raise UsageError(f"{folder}: its {META} cannot be read: {error}") from None


def saved(root: Path) -> list[Saved]:
    """The whole checkpoints in `root` with their scores, by step."""
    return [Saved(folder=f, step=_step(f), score=read_meta(f).metrics.get("solve_rate")) for f in steps(root)]


def to_remove(checkpoints: Sequence[Saved], keep_last: int, keep_best: int) -> list[Saved]:
    """Those that are neither among the newest nor among the best, oldest first; never the newest.

    Of equal scores the newer is the better.
    """
    by_step = sorted(checkpoints, key=lambda c: c.step)
    scored = [(c.score, c.step) for c in by_step if c.score is not None]
    kept = {c.step for c in by_step[-max(1, keep_last) :]} | {
        step for _, step in sorted(scored, reverse=True)[:keep_best]
    }
    return [c for c in by_step if c.step not in kept]


def prune(root: Path, keep: Keep) -> None:
    """Removes the checkpoints that need not stay."""
    for checkpoint in to_remove(saved(root), keep.last, keep.best):
        remove(checkpoint.folder)


def remove(folder: Path) -> None:
    """Removes a checkpoint; a half-removed one is not found."""
    gone = folder.with_name(folder.name + GONE)
    folder.rename(gone)
    shutil.rmtree(gone)


def clean(root: Path) -> None:
    """Removes what unfinished saves and removals left."""
    for path in root.glob("step-*"):
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path)


def part_of(folder: Path) -> Path:
    """Where a checkpoint lies while it is written."""
    return folder.with_name(folder.name + PART)


def publish(folder: Path, meta: Meta) -> None:
    """Makes the written part of `folder` whole, in place of an older one of the same step. Its files are on disk."""
    part = part_of(folder)
    finite = {name: v if v is not None and math.isfinite(v) else None for name, v in meta.metrics.items()}
    with (part / META).open("w") as file:
        json.dump(asdict(meta) | {"metrics": finite}, file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    sync_names(part)
    if folder.exists():
        remove(folder)
    part.rename(folder)
    sync_names(folder.parent)


def _step(folder: Path) -> int:
    return int(folder.name.partition("-")[2])
