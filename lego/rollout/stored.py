"""Finished groups on disk, until a checkpoint holds what they taught: nothing is sampled twice after a crash.

One safetensors file a group: token arrays as they are, the rest of each trajectory as JSON in the header, and a digest
of both, as the format has none.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from lego.disk import sync_names
from lego.errors import UsageError
from lego.records import CallKind, Fidelity, Outcome, Segment, Trajectory

GROUPS = "groups"
"""Their folder in that of the run."""
TEXT, DIGEST = "trajectories", "digest"
"""What the header of a file holds beside what safetensors keeps there."""
ARRAYS = tuple(f.name for f in fields(Segment) if f.name != "kind")


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A folder of groups."""

    folder: Path

    def write(self, group: int, trajectories: Iterable[Trajectory]) -> None:
        """Puts the group's trials on disk, whole or not at all; their file's name is on disk too afterwards."""
        self.folder.mkdir(exist_ok=True)
        trials = list(trajectories)
        text = json.dumps([_text(t) for t in trials])
        arrays = {name: array for i, t in enumerate(trials) for name, array in _arrays(i, t)}
        part = self._path(group).with_suffix(".part")
        with part.open("wb") as file:
            file.write(save(arrays, {TEXT: text, DIGEST: _digest(text, arrays)}))
            file.flush()
            os.fsync(file.fileno())
        part.rename(self._path(group))
        for folder in (self.folder, self.folder.parent):
            sync_names(folder)

    def read(self, group: int) -> tuple[Trajectory, ...]:
        """The group's trials as they were written. UsageError for a file that is gone or damaged."""
        path = self._path(group)
        try:
            with safe_open(path, framework="np") as file:
                header = file.metadata()
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            if _digest(header[TEXT], arrays) != header[DIGEST]:
                raise ValueError("it is not what was written")
            return tuple(_trajectory(i, text, arrays) for i, text in enumerate(json.loads(header[TEXT])))
        except (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{path}: the group cannot be read, and the run not gone on with: {error}; wanted the file as it was "
                "written, or a new run (--fresh, with --resume and this run's checkpoints if there are some)"
            ) from error

    def keep(self, groups: Iterable[int]) -> None:
        """Removes all others, and what was being written when a run died."""
        names = {self._path(group).name for group in groups}
        for path in self.folder.glob("*"):
            if path.name not in names:
                path.unlink()

    def remove(self, groups: Iterable[int]) -> None:
        """Removes these, as far as they are there."""
        for path in {self._path(group) for group in groups}.intersection(self.folder.glob("*")):
            path.unlink()

    def _path(self, group: int) -> Path:
        return self.folder / f"{group:06d}.safetensors"


def _digest(text: str, arrays: Mapping[str, np.ndarray]) -> str:
    """Of all that is read again; the order in which a file has its arrays does not count."""
    found = hashlib.blake2b(text.encode(), digest_size=16)
    for name, array in sorted(arrays.items()):
        found.update(f"{name} {array.dtype} {array.shape} ".encode())
        found.update(array.data)
    return found.hexdigest()


def _arrays(trial: int, trajectory: Trajectory) -> Iterable[tuple[str, np.ndarray]]:
    for number, segment in enumerate(trajectory.segments):
        for name in ARRAYS:
            if (array := getattr(segment, name)) is not None:
                yield f"{trial}.{number}.{name}", np.ascontiguousarray(array)


def _text(trajectory: Trajectory) -> dict[str, Any]:
    shallow = {f.name: getattr(trajectory, f.name) for f in fields(trajectory) if f.name != "segments"}
    kinds = [segment.kind.value for segment in trajectory.segments]
    return shallow | {"fidelity": asdict(trajectory.fidelity), "kinds": kinds}


def _trajectory(trial: int, text: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Trajectory:
    segments = tuple(
        Segment(**{name: arrays.get(f"{trial}.{i}.{name}") for name in ARRAYS}, kind=CallKind(kind))  # type: ignore
        for i, kind in enumerate(text["kinds"])
    )
    told = {name: value for name, value in text.items() if name != "kinds"}
    whole = {"outcome": Outcome(text["outcome"]), "fidelity": Fidelity(**text["fidelity"]), "segments": segments}
    return Trajectory(**(told | whole))
