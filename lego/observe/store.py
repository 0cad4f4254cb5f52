"""The run folder: the only interface between a run and those who look at it. JSON is always strict."""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from lego.errors import UsageError
from lego.observe.tensorboard import Curves
from lego.records import Histogram, Trajectory


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

    def trial(self, step: int, trajectory: Trajectory) -> None:
        """One finished trial, without its token arrays."""
        t = trajectory
        self._line(
            "trials",
            {
                "step": step,
                "task": t.task,
                "split": t.split,
                "attempt": t.attempt,
                "version": t.version,
                "outcome": t.outcome.value,
                "reward": t.reward,
                "turns": t.fidelity.turns,
                "sampled": t.fidelity.sampled,
                "trainable": t.fidelity.trained,
                "excluded": dict(t.fidelity.excluded),
                "drift": dict(t.fidelity.drift),
                "faults": dict(t.fidelity.faults),
                "segments": len(t.segments),
                "seconds": dict(t.seconds),
                "verdict_reused": t.verdict_reused,
                "patch": t.patch,
                "detail": t.detail,
                "recording": t.recording,
            },
        )

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


@contextmanager
def open_run(folder: Path) -> Iterator[RunStore]:
    """A new run folder; UsageError if it cannot be written or holds another run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        occupied = any(folder.iterdir())
    except OSError as error:
        raise UsageError(
            f"run_dir: {folder}: {os.strerror(error.errno or 0)}; wanted a folder that can be written"
        ) from error
    if occupied:
        raise UsageError(f"run_dir: {folder} is not empty; wanted a new or empty folder")
    names = ("events", "metrics", "trials")
    files = {name: (folder / f"{name}.jsonl").open("w") for name in names}
    curves = Curves(folder / "tensorboard")
    try:
        yield RunStore(folder, curves, files)
    finally:
        curves.close()
        for file in files.values():
            file.close()
