"""Weights of a model folder in Hugging Face layout: safetensors files, read by name, written whole or not at all.

The one file here that knows safetensors' index.
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lego.errors import TrainerError, UsageError

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
NOT_COPIED = ("*.safetensors", INDEX, "*.bin", "*.pt", "*.pth", "README*")
"""Weights, and a text that tells of other weights."""
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor in a file, not yet read."""

    file: Any
    shape: tuple[int, ...]
    dtype: torch.dtype


class StoredWeights:
    """The tensors of a model folder. Raises UsageError for a file that is missing, cut short or holds odd types."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, Stored] = {}
        for path in weight_files(folder):
            self.tensors |= _stored(path)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, mapped from its file."""
        return self.tensors[name].file.get_tensor(name)

    @cached_property
    def main_dtype(self) -> torch.dtype:
        """The dtype of most of the folder's numbers."""
        sizes: dict[torch.dtype, int] = {}
        for stored in self.tensors.values():
            sizes[stored.dtype] = sizes.get(stored.dtype, 0) + torch.Size(stored.shape).numel()
        return max(sizes, key=lambda dtype: sizes[dtype])


def weight_files(folder: Path) -> list[Path]:
    """The files that the index names, or all."""
    index = folder / INDEX
    if index.exists():
        try:
            names = {str(name) for name in json.loads(index.read_text())["weight_map"].values()}
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise UsageError(f"{index} is not an index of weights: {error!r}") from None
        return [folder / name for name in sorted(names)]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise UsageError(f"{folder} has no *.safetensors weights")
    return found


def _stored(path: Path) -> dict[str, Stored]:
    try:
        file = safe_open(path, framework="pt")
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path} cannot be read as safetensors: {error}") from None
    odd = sorted({s.get_dtype() for s in slices.values()} - set(_DTYPES))
    if odd:
        raise UsageError(f"{path} holds tensors of type {', '.join(odd)}; wanted one of {', '.join(_DTYPES)}")
    return {
        name: Stored(file=file, shape=tuple(s.get_shape()), dtype=_DTYPES[s.get_dtype()]) for name, s in slices.items()
    }


def copy_others(source: Path, target: Path) -> None:
    """Copies a model folder's config, tokenizer and all else but its weights."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*NOT_COPIED), dirs_exist_ok=True)


def save(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes one safetensors file; it appears complete or not at all. Raises TrainerError if it cannot be written."""
    part = path.with_name(path.name + ".part")
    try:
        save_file(dict(tensors), part, metadata={"format": "pt"})
    except SafetensorError as error:
        raise TrainerError(f"{path} cannot be written: {error}") from error
    part.rename(path)


def save_sharded(
    folder: Path, sizes: Mapping[str, int], tensors: Iterable[tuple[str, torch.Tensor]], limit: int
) -> None:
    """Writes tensors, which come in the order of `sizes` (bytes), as files of at most `limit` bytes each.

    A larger tensor has a file to itself. The index comes last, and only where there is more than one file; weights
    that lay in the folder before are removed first.
    """
    for path in (*folder.glob("*.safetensors"), folder / INDEX):
        path.unlink(missing_ok=True)
    shards = _shards(sizes, limit)
    places, waiting = {}, iter(tensors)
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        part = dict(next(waiting) for _ in names)
        assert list(part) == names
        save(folder / file, part)
        places |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        part = folder / (INDEX + ".part")
        part.write_text(json.dumps(index, indent=1))
        part.rename(folder / INDEX)


def _shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if size > room or not shards:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    return shards
