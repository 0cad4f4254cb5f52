"""How weights pass from the trainer to engines: where their files lie, and how a reader knows a whole one.

A weights file is an ordinary safetensors file of HF-named tensors. One of ours also names its version, and while it is
written its first eight bytes, the length of the header, are a number that no reader of the format accepts: a file whose
writer died is refused by every reader, not by ours alone. Imports no torch: a recipe holds these specs.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from lego.errors import EngineError

VERSION = "lego_version"
"""Key of the file's metadata under which the version of its weights stands, in decimal digits."""
UNFINISHED = (1 << 64) - 1
"""The length of the header in a file that is being written: more than any file holds."""


@dataclass(frozen=True, kw_only=True)
class SharedMemory:
    """Trainer and engines on one machine: two files in shared memory take turns, each written in place."""


@dataclass(frozen=True, kw_only=True)
class SharedFolder:
    """Engines on other machines: each version is a new file in a folder that all see under the same path."""

    path: Path
    """An existing folder; the run makes one of its own in it and removes it at the end."""


Transfer = SharedMemory | SharedFolder


@dataclass(frozen=True, kw_only=True)
class Broadcast:
    """The trainer's first rank sends to one engine after the other: by NCCL from its GPU, by gloo where it has none."""

    host: str = "127.0.0.1"
    """Address of the trainer's machine, as the engines reach it."""


@dataclass(frozen=True, kw_only=True)
class CudaIpc:
    """Engines that share the trainer's own GPUs open its memory: each takes from the rank on the same GPU."""


Direct = Broadcast | CudaIpc


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a whole weights file says of itself."""

    version: int | None
    """Of its weights; None in a file that no trainer of ours wrote."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of its tensors by name, in the order of the header."""
    raw: bytes
    """The header as it stands, with its length."""


def read_header(path: Path) -> Header:
    """The header of a whole safetensors file. EngineError for one that is missing, cut short or being written."""
    try:
        with path.open("rb") as file:
            return _parse(path, file.fileno())
    except OSError as error:
        raise EngineError(f"weights file {path}: {error.strerror}") from error


def check(path: Path, version: int | None = None) -> Path:
    """The file's absolute path; EngineError if it is not whole, or of another version."""
    _check_version(path, read_header(path), version)
    return path.resolve()


class WeightsFile:
    """An open whole weights file, mapped. Its tensors are views of it; copy what is to last longer than it.

    Opening raises EngineError as `check` does. As a context it is checked once more and closed at the end.
    """

    def __init__(self, path: Path, version: int | None = None) -> None:
        self.path = path
        try:
            self._number = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise EngineError(f"weights file {path}: {error.strerror}") from error
        try:
            self.header = _parse(path, self._number)
            _check_version(path, self.header, version)
            # By number, so that header and tensors are of one file even if another takes its name between.
            self._tensors = safe_open(f"/proc/self/fd/{self._number}", framework="pt")
        except BaseException:
            os.close(self._number)
            raise

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Name and tensor, in the order of the header."""
        return ((name, self._tensors.get_tensor(name)) for name in self.header.shapes)

    def check(self) -> None:
        """EngineError if the file was written into since it was opened. Not seen: the same version written again."""
        if os.pread(self._number, len(self.header.raw), 0) != self.header.raw:
            raise EngineError(f"weights file {self.path} was written into while it was read")

    def close(self) -> None:
        """Lets go of the file; tensors in use keep their mapping. Only once."""
        os.close(self._number)

    def __enter__(self) -> "WeightsFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.check()
        finally:
            self.close()


def _check_version(path: Path, header: Header, version: int | None) -> None:
    if version is not None and header.version not in (None, version):
        raise EngineError(f"weights file {path} holds version {header.version}, wanted {version}")


def _parse(path: Path, number: int) -> Header:
    size, first = os.fstat(number).st_size, os.pread(number, 8, 0)
    length = int.from_bytes(first, "little")
    if len(first) == 8 and length == UNFINISHED:
        raise EngineError(f"weights file {path} is not whole: it is being written, or its writer died")
    if not 0 < length <= size - 8:
        raise EngineError(f"weights file {path} is not a safetensors file, or cut short at {size} bytes")
    raw = first + os.pread(number, length, 8)
    try:
        entries = json.loads(raw[8:])
        metadata = entries.pop("__metadata__", {})
        ends = [entry["data_offsets"][1] for entry in entries.values()]
        shapes = {name: tuple(entry["shape"]) for name, entry in entries.items()}
        version = metadata.get(VERSION)
        version = None if version is None else int(version)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise EngineError(f"weights file {path} is not a safetensors file: {error!r}") from error
    wanted = 8 + length + max(ends, default=0)
    if size != wanted:
        raise EngineError(f"weights file {path} has {size} bytes, its header says {wanted}")
    return Header(version=version, shapes=shapes, raw=raw)
