"""Writes the files that carry weights to engines: in place in memory that processes share, or new ones in a folder.

Each is an ordinary safetensors file; what else it promises is told in `lego.engine.transfer`. A written file is not
touched until the second write after it begins: an engine may read the newest file at any time, and the one before
until the trainer exports again.
"""

import errno
import json
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from lego.disk import sync_names
from lego.engine.transfer import UNFINISHED, VERSION
from lego.errors import TrainerError

Forms = Mapping[str, torch.Tensor]
"""Tensors on the meta device by name: shapes and dtypes of what is written."""
Tensors = Iterable[tuple[str, torch.Tensor]]
"""All that the forms name, in any dtype, on any device, each read before the next is asked for."""

_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_LARGEST_VERSION = (1 << 63) - 1


class WeightFiles(Protocol):
    """Where weights are written, version after version."""

    def write(self, version: int, tensors: Tensors) -> Path:
        """Writes one version; returns the file, whole. TrainerError if there is no room, before anything is written."""
        ...


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where each tensor lies in a file: the wider types first, so that all are aligned."""

    forms: Forms
    offsets: Mapping[str, int]
    """Of each tensor's first byte, from the end of the header."""
    entries: str
    """What the header says of the tensors, in JSON."""
    room: int
    """Bytes of the header with its length; the same for every version."""
    size: int
    """Bytes of the file."""

    @classmethod
    def of(cls, forms: Forms) -> "Plan":
        offsets, data = {}, 0
        for name in sorted(forms, key=lambda name: -forms[name].itemsize):
            offsets[name] = data
            data += forms[name].nbytes
        entries = json.dumps({name: _entry(form, offsets[name]) for name, form in forms.items()}, separators=(",", ":"))
        room = -(-len(_text(_LARGEST_VERSION, entries)) // 8) * 8 + 8
        return cls(forms=forms, offsets=offsets, entries=entries, room=room, size=room + data)

    def header(self, version: int) -> bytes:
        """The file's first `room` bytes."""
        text = _text(version, self.entries).ljust(self.room - 8)
        return len(text).to_bytes(8, "little") + text


def _entry(form: torch.Tensor, start: int) -> dict[str, object]:
    return {"dtype": _NAMES[form.dtype], "shape": list(form.shape), "data_offsets": [start, start + form.nbytes]}


def _text(version: int, entries: str) -> bytes:
    metadata = json.dumps({"__metadata__": {"format": "pt", VERSION: str(version)}})
    return f"{metadata[:-1]},{entries[1:]}".encode()


class InPlace:
    """Two files of one folder that take turns, allocated once: fresh pages would cost ten times the copy into them.

    For engines on this machine, which map the same memory. TrainerError if the folder has no room for both.
    """

    def __init__(self, folder: Path, forms: Forms) -> None:
        plan = Plan.of(forms)
        _check_room(folder, 2 * plan.size)
        self._slots = [_Slot(folder / f"weights-{i}.safetensors", plan) for i in range(2)]

    def write(self, version: int, tensors: Tensors) -> Path:
        """See `WeightFiles`. If it fails the other file stays whole, and the next write is to this one again."""
        self._slots[0].write(version, tensors)
        written = self._slots[0].path
        self._slots.reverse()
        return written


class _Slot:
    """A file and its mapping."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self.path, self._plan = path, plan
        with path.open("w+b") as file:
            try:
                # Reserved now: a page that shared memory cannot give while it is written to is a signal, not an error.
                os.posix_fallocate(file.fileno(), 0, plan.size)
            except OSError as error:
                path.unlink()
                raise _no_room(path.parent, plan.size, error) from error
            self._map = mmap.mmap(file.fileno(), plan.size)
        self._places = {name: self._place(name, form) for name, form in plan.forms.items()}

    def _place(self, name: str, form: torch.Tensor) -> torch.Tensor:
        if not form.numel():
            return torch.empty(form.shape, dtype=form.dtype)
        start = self._plan.room + self._plan.offsets[name]
        flat = torch.frombuffer(self._map, dtype=form.dtype, count=form.numel(), offset=start)
        return flat.view(form.shape)

    def write(self, version: int, tensors: Tensors) -> None:
        header = self._plan.header(version)
        self._map[:8] = UNFINISHED.to_bytes(8, "little")
        for name, tensor in _all_of(self._plan.forms, tensors):
            self._places[name].copy_(tensor)
        self._map[8 : len(header)] = header[8:]
        self._map[:8] = header[:8]  # last: from here on the file is whole


class Replaced:
    """A new file for each version in a folder of this run alone: written aside, brought to disk, renamed, and the file
    of two versions before removed. For engines on other machines: nothing is written into a file that they may read.
    """

    def __init__(self, folder: Path, forms: Forms) -> None:
        self._folder, self._plan = folder, Plan.of(forms)
        self._written: list[Path] = []

    def write(self, version: int, tensors: Tensors) -> Path:
        """See `WeightFiles`. If it fails, the files written before stay and nothing of this one does."""
        for old in self._written[:-1]:
            old.unlink(missing_ok=True)
        self._written = self._written[-1:]
        _check_room(self._folder, self._plan.size)
        path = self._folder / f"weights-{version}.safetensors"
        part = path.with_name(path.name + ".part")
        try:
            self._fill(part, version, tensors)
            part.rename(path)
            sync_names(self._folder)
        except OSError as error:
            raise _no_room(self._folder, self._plan.size, error) from error
        finally:
            part.unlink(missing_ok=True)
        self._written = [*(p for p in self._written if p != path), path]
        return path

    def _fill(self, part: Path, version: int, tensors: Tensors) -> None:
        with part.open("wb") as file:
            file.write(self._plan.header(version))
            for name, tensor in _all_of(self._plan.forms, tensors):
                file.seek(self._plan.room + self._plan.offsets[name])
                whole = tensor.to(device="cpu", dtype=self._plan.forms[name].dtype).contiguous()
                file.write(whole.view(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())


def _all_of(forms: Forms, tensors: Tensors) -> Iterable[tuple[str, torch.Tensor]]:
    """The tensors, checked: each that the forms name once, in its shape. A copy would stretch a smaller one."""
    waiting = dict(forms)
    for name, tensor in tensors:
        form = waiting.pop(name)
        if form.shape != tensor.shape:
            raise ValueError(f"{name}: {tuple(tensor.shape)}, wanted {tuple(form.shape)}")
        yield name, tensor
    if waiting:
        raise ValueError(f"{len(waiting)} tensors were not given, first {next(iter(waiting))}")


def _check_room(folder: Path, wanted: int) -> None:
    found = os.statvfs(folder)
    if found.f_bavail * found.f_frsize < wanted:
        raise _no_room(folder, wanted, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def _no_room(folder: Path, wanted: int, error: OSError) -> TrainerError:
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    return TrainerError(f"{folder}: weights need {wanted} bytes, {free} are free: {error.strerror}")
