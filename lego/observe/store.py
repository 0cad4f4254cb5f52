"""The run folder: the only interface between a run and those who look at it. JSON is always strict."""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from lego.observe.tensorboard import Curves
from lego.records import Histogram, Trajectory

NAMES = ("events", "metrics", "trials")
"""Of the files of lines."""


def strict(value: object) -> object:
    """`value` with non-finite numbers as strings, so that any JSON reader takes it."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return value


class RunStore:
    """Writes recipe.json, events.jsonl, metrics.jsonl, trials.jsonl, summary.json and TensorBoard files."""

    def __init__(self, folder: Path, curves: Curves, files: Mapping[str, IO[str]]) -> None:
        self.folder = folder
        self._curves = curves
        self._files = files

    def event(self, kind: str, **fields: object) -> None:
        """One line about the run's life."""
        self._line("events", {"time": time.time(), "kind": kind, **fields})

    def metrics(
        self, step: int, values: Mapping[str, float], histograms: Mapping[str, Histogram] | None = None
    ) -> None:
        """The numbers and distributions of one step, also for TensorBoard."""
        histograms = histograms or {}
        self._line("metrics", {"step": step, **values, **{name: vars(h) for name, h in histograms.items()}})
        self._curves.add(step, values, histograms)

    def curve(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers for TensorBoard alone."""
        self._curves.add(step, values, {})

    def trial(self, trajectory: Trajectory, measurement: str = "") -> dict[str, object]:
        """One finished trial, without its token arrays; `measurement` is the one it belongs to, such as end/heldout."""
        row = trial_row(trajectory) | {"measurement": measurement}
        self._line("trials", row)
        return row

    def sync(self) -> None:
        """All lines so far are on the disk afterwards."""
        for file in self._files.values():
            os.fsync(file.fileno())

    def document(self, name: str, value: object) -> Path:
        """Writes a whole JSON file, in one piece or not at all."""
        path = self.folder / name
        part = path.with_suffix(".part")
        part.write_text(json.dumps(strict(value), indent=1, allow_nan=False) + "\n")
        part.rename(path)
        return path

    def _line(self, name: str, value: Mapping[str, object]) -> None:
        self._files[name].write(json.dumps(strict(value), allow_nan=False) + "\n")
        self._files[name].flush()


def trial_row(trajectory: Trajectory) -> dict[str, object]:
    """A trial as its line in trials.jsonl tells it."""
    t = trajectory
    return {
        "task": t.task,
        "split": t.split,
        "attempt": t.attempt,
        "group": t.group,
        "harness": t.harness,
        "version": t.version,
        "outcome": t.outcome.value,
        "reward": t.reward,
        "turns": t.fidelity.turns,
        "sampled": t.fidelity.sampled,
        "trainable": t.fidelity.trained,
        "excluded": dict(t.fidelity.excluded),
        "drift": dict(t.fidelity.drift),
        "kinds": dict(t.fidelity.kinds),
        "faults": dict(t.fidelity.faults),
        "segments": len(t.segments),
        "seconds": dict(t.seconds),
        "verdict_reused": t.verdict_reused,
        "patch": t.patch,
        "detail": t.detail,
        "recording": t.recording,
    }


@contextmanager
def open_run(folder: Path, first: int = 0) -> Iterator[RunStore]:
    """A run folder to add to; numbers of steps from `first` on are those to come, whatever its curves hold."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: (folder / f"{name}.jsonl").open("a") for name in NAMES}
    curves = Curves(folder / "tensorboard", first)
    try:
        yield RunStore(folder, curves, files)
    finally:
        curves.close()
        for file in files.values():
            file.close()
