"""Which folder a run lives in, and that folder cut back to what its journal tells: the same command goes on there."""

import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lego.cli import described
from lego.errors import UsageError
from lego.journal import FILE, LOCK, Journal, Past, occupied, read
from lego.lines import rows
from lego.recipe import Recipe
from lego.rollout.stored import GROUPS, Stored

log = logging.getLogger(__name__)

_OF_ENGINE = (
    "replicas urls port env transfer direct pause admission restarts restart_window_s unhealthy_s start_timeout_s"
)
_OF_TRAINER = "threads stall_s start_timeout_s activation_checkpointing cpu_offload world_size replicate"
FREE = (
    *("steps", "run_dir", "fresh", "cache", "budget", "checkpoints", "fidelity", "validation.timeout_s"),
    *("rollout.concurrency", "rollout.keep_sessions", "rollout.max_unscored"),
    *(f"engine.{name}" for name in f"{_OF_ENGINE} stop_grace_s kv_cache_mib max_num_seqs".split()),
    *(f"trainer.{name}" for name in f"{_OF_TRAINER} expert_parallel tensor_parallel".split()),
)
"""What may change from one life of a run to the next: how it is run, and nothing of what is learned."""
SESSIONS = "sessions"
"""Session files of trials, in the folder of the run."""


def identity(recipe: Recipe) -> dict[str, Any]:
    """The recipe's values by dotted name, without those that may change."""
    return {name: value for name, value in _flat("", described(recipe)) if not _is_free(name)}


def _is_free(name: str) -> bool:
    return any(name == free or name.startswith(f"{free}.") for free in FREE)


def _flat(name: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), item)
    else:
        yield name, value


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`field: value, now value` of each that differs."""
    names = sorted(before.keys() | now.keys())
    return [f"{n}: {before.get(n)}, now {now.get(n)}" for n in names if before.get(n) != now.get(n)]


def home(recipe: Recipe, runs: Path, name: str, now: str) -> Path:
    """The folder of this recipe's run: its own `run_dir`, or an unfinished one in `runs`, or a new one there.

    UsageError for a run that it cannot begin or go on with in this one.
    """
    wanted = identity(recipe)
    left = None if recipe.fresh else unfinished(runs, name, wanted)
    folder = recipe.run_dir or left or runs / f"{name}-{now}"
    past = read(folder / FILE)
    if recipe.fresh and past.identity:
        raise UsageError(f"run_dir: {folder} holds a run, wanted a new or empty folder for a fresh one")
    if past.identity == wanted and past.done > recipe.steps:
        raise UsageError(f"steps: {recipe.steps}, wanted {past.done} or more, which {folder} has behind it")
    return folder


def unfinished(runs: Path, stem: str, wanted: Mapping[str, Any]) -> Path | None:
    """The newest run in `runs` of this recipe that was left before its end, and that no process is in."""
    for folder in sorted(runs.glob(f"{stem}-*"), reverse=True):
        if not (folder / FILE).is_file() or _is_held(folder):
            continue
        try:
            past = read(folder / FILE)
        except (UsageError, OSError) as error:
            log.warning("%s is passed over: %s", folder, error)
            continue
        if not past.finished and past.identity == wanted:
            return folder
    return None


def _is_held(folder: Path) -> bool:
    try:
        with claimed(folder):
            return False
    except UsageError:
        return True


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """The folder is this process's alone. UsageError if another is in it, or if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        told = f"run_dir: {folder}: {os.strerror(error.errno or 0)}; wanted a folder that can be written"
        raise UsageError(told) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"run_dir: {folder} is in use by another process; wanted one of its own") from error
        yield
    finally:
        os.close(handle)


def open_journal(folder: Path, wanted: Mapping[str, Any], first: int) -> Journal:
    """The journal of a new run, or of one that goes on; its other files are cut back to what it tells.

    `first` is the number of a new run's first step. UsageError for a folder that holds anything else.
    """
    journal = Journal(folder)
    past = journal.past
    if not past.identity:
        if told := occupied(folder):
            raise UsageError(told)
        journal.run(wanted, first)
        return journal
    if past.finished:
        raise UsageError(f"run_dir: {folder} holds a finished run; wanted a new or empty folder")
    if differing := differences(past.identity, wanted):
        raise UsageError(f"run_dir: {folder} holds another recipe's run: {'; '.join(differing[:5])}; wanted the same")
    trim(folder, past)
    return journal


def trim(folder: Path, past: Past) -> None:
    """Takes out what was written of groups, steps and measurements that did not come to their end."""
    told = {f"{moment}/{split}" for moment, split in past.measured}
    _keep(folder / "trials.jsonl", lambda row: row["measurement"] in told or row["group"] in past.ended)
    _keep(folder / "metrics.jsonl", lambda row: row["step"] < past.done)
    _keep(folder / "events.jsonl", lambda row: row["kind"] != "measured" or f"{row['moment']}/{row['split']}" in told)
    Stored(folder=folder / GROUPS).keep(past.ended)
    named = {row["recording"] for row in rows(folder / "trials.jsonl")}
    for path in (folder / SESSIONS).glob("*"):
        if path.name not in named:
            path.unlink()


def _keep(file: Path, wanted: Callable[[Mapping[str, Any]], bool]) -> None:
    """Rewrites a file of lines with those that are wanted, whole or not at all."""
    if not file.exists():
        return
    try:
        kept = [row for row in rows(file) if wanted(row)]
    except (LookupError, TypeError) as error:
        raise UsageError(f"{file}: a record that this program did not write: {error!r}") from error
    part = file.with_suffix(".part")
    with part.open("w") as out:
        out.writelines(json.dumps(row, allow_nan=False) + "\n" for row in kept)
        out.flush()
        os.fsync(out.fileno())
    part.rename(file)
