"""A network's weights under the names of the HF folder they came from: checked, read, and written back.

A layer at a time: torchtitan's adapters translate whole tensors, of which each rank keeps its part.
"""

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lego.errors import UsageError
from lego.learn import hf_folder
from lego.learn.titan_models import Architecture, matches

log = logging.getLogger(__name__)

_WRAPPER = "_checkpoint_wrapped_module."
_HEAD, _VALUES = "lm_head.weight", "score.weight"
_EMBEDDING = "tok_embeddings.weight"
_NESTED, _FLAT = "model.language_model.", "model."
_ONE = re.compile(r"^(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
_LAYER = re.compile(r"^layers\.\d+\.")


Shapes = Mapping[str, tuple[int, ...]]
"""Of tensors by name."""
_NAMED = 3
"""Tensors that a message names."""


def clean(name: str) -> str:
    """A parameter's name without what activation checkpointing adds to it."""
    return name.replace(_WRAPPER, "")


@dataclass(frozen=True, kw_only=True)
class FileNames:
    """How a folder's names differ from those of the family's adapter."""

    fused: bool | None
    """A layer's experts in one tensor where the adapter has one each (True), the reverse (False), or as it has them."""
    flat: bool
    """A text model by itself where the adapter nests it."""
    values: bool
    """A value head in the place of the language model's."""

    def to_file(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The adapter's tensors as the file has them."""
        out = dict(tensors)
        if self.fused is not None:
            out = _fuse(out) if self.fused else _unfuse(out)
        if self.flat:
            out = {_renamed(name, _NESTED, _FLAT): tensor for name, tensor in out.items()}
        return {_VALUES if self.values and name == _HEAD else name: tensor for name, tensor in out.items()}

    def from_file(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The file's tensors as the adapter wants them."""
        out = {_HEAD if self.values and name == _VALUES else name: tensor for name, tensor in tensors.items()}
        if self.flat:
            out = {_renamed(name, _FLAT, _NESTED): tensor for name, tensor in out.items()}
        if self.fused is not None:
            out = _unfuse(out) if self.fused else _fuse(out)
        return out


class Weights:
    """The parameters and kept buffers of a sharded model, and the folder they came from. Its methods are collective.

    Raises UsageError if the folder holds other tensors than the model.
    """

    def __init__(self, arch: Architecture, model: torch.nn.Module, folder: Path) -> None:
        self.arch, self.stored = arch, hf_folder.StoredWeights(folder)
        # Taken once: while FSDP has gathered a layer, the model's own attributes are other, passing tensors.
        self._places = places(arch, model)
        self.carried = [name for name in self.stored.tensors if matches(arch.carried, name)]
        named = set(self.stored.tensors) - set(self.carried)
        self._names = _file_names(arch, self._to_hf(self._places).keys(), named)
        self._groups = [
            (group, {name: tuple(t.shape) for name, t in self._names.to_file(self._to_hf(group)).items()})
            for group in _by_layer(self._places)
        ]
        self._head_stored = arch.config.enable_weight_tying and _HEAD in self.stored.tensors
        self._check()

    def _to_hf(self, group: Iterable[str]) -> dict[str, torch.Tensor]:
        return self.arch.adapter.to_hf({n: torch.empty(self._places[n].shape, device="meta") for n in group})

    def _check(self) -> None:
        spare = {_HEAD} if self.arch.config.enable_weight_tying or self._names.values else set()
        wanted = {name: shape for _, shapes in self._groups for name, shape in shapes.items()}
        found = {name: stored.shape for name, stored in self.stored.tensors.items() if name not in self.carried}
        unneeded = (spare - set(wanted)) | ({_VALUES} - set(found))
        wrong = misfits(*({n: s for n, s in shapes.items() if n not in unneeded} for shapes in (found, wanted)))
        if wrong:
            raise UsageError(f"{self.stored.folder}: {'; '.join(wrong)}")
        if self._head_stored and not torch.equal(self.stored.read(_HEAD), self.stored.read(self._embedding())):
            tie = f"tie_word_embeddings is set but {_HEAD} differs from {self._embedding()}"
            raise UsageError(f"{self.stored.folder}: {tie}")
        if self.carried:
            log.info("%d tensors are not trained and stay as they are: %s", len(self.carried), self.carried[0])

    def _embedding(self) -> str:
        return next(iter(self._names.to_file(self._to_hf([_EMBEDDING]))))

    @torch.no_grad()
    def load(self) -> None:
        """Fills the model from the folder; a value head that it does not have stays as it is."""
        for group, shapes in self._groups:
            tensors = {name: self.stored.read(name) for name in shapes if name in self.stored.tensors}
            if not tensors:
                continue
            whole = self.arch.adapter.from_hf(self._names.from_file(tensors))
            for name in group:
                _fill(self._places[name], whole[name])

    def held(self, *, everywhere: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """All of the folder's tensors with the model's values, as the model has them, gathered a layer at a time.

        Yields them on rank 0 and nothing on others, unless `everywhere`. Views of the model where nothing had to be
        gathered: copy each before the next step.
        """
        mine = everywhere or dist.get_rank() == 0
        for group, shapes in self._groups:
            whole = {name: _collected(self._places[name], mine) for name in group}
            if mine:
                tensors = self._names.to_file(self.arch.adapter.to_hf(whole))
                for name in shapes:
                    yield name, tensors.pop(name)
                    if self._head_stored and name == self._embedding():
                        yield _HEAD, whole[_EMBEDDING]
        if mine:
            yield from ((name, self.stored.read(name)) for name in self.carried)

    def stream(self, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
        """What `held` yields, on CPU and contiguous, in the dtype that `forms` tells; a tied head is a copy."""
        for name, tensor in self.held():
            copy = self._head_stored and name == _HEAD
            yield name, tensor.to(device="cpu", dtype=self._dtype(name, dtype), copy=copy).contiguous()

    def forms(self, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        """Shape and dtype of each tensor that `stream` yields, in its order, as tensors without memory.

        With a dtype, they come in it; but those that the folder keeps in another one than most, such as a selection
        bias, keep theirs, and so do all without a dtype.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for _, group in self._groups:
            for name, shape in group.items():
                shapes[name] = shape
                if self._head_stored and name == self._embedding():
                    shapes[_HEAD] = shape
        trained = {n: torch.empty(shape, dtype=self._dtype(n, dtype), device="meta") for n, shape in shapes.items()}
        kept = {name: self.stored.tensors[name] for name in self.carried}
        return trained | {n: torch.empty(s.shape, dtype=s.dtype, device="meta") for n, s in kept.items()}

    def _dtype(self, name: str, wanted: torch.dtype | None) -> torch.dtype:
        main = self.stored.main_dtype
        own = self.stored.tensors[name].dtype if name in self.stored.tensors else main
        return wanted if wanted is not None and own == main else own


def misfits(found: Shapes, wanted: Shapes) -> list[str]:
    """What keeps tensors of these shapes from being the wanted ones, in words that name the first."""
    kinds = {
        "are missing": [name for name in wanted if name not in found],
        "have no place in this model": [name for name in found if name not in wanted],
        "have another shape": [
            f"{name} {found[name]} (want {wanted[name]})"
            for name in wanted
            if found.get(name, wanted[name]) != wanted[name]
        ],
    }
    return [
        f"{len(names)} tensors {what}: {', '.join(sorted(names)[:_NAMED])}" for what, names in kinds.items() if names
    ]


def places(arch: Architecture, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and the buffers that are saved, by torchtitan name; a tied head is its embedding."""
    kept = {clean(name) for name in model.state_dict()}
    buffers = {clean(name): buffer for name, buffer in model.named_buffers() if clean(name) in kept}
    places: dict[str, Any] = {clean(name): p for name, p in model.named_parameters(remove_duplicate=False)} | buffers
    if arch.config.enable_weight_tying:
        del places[_HEAD]
    return places


def _by_layer(names: Iterable[str]) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        layer = _LAYER.match(name)
        groups.setdefault(layer[0] if layer else name, []).append(name)
    return list(groups.values())


def _file_names(arch: Architecture, ours: Collection[str], found: Collection[str]) -> FileNames:
    single, stored_single = (any(_ONE.match(name) for name in names) for names in (ours, found))
    stored_fused = any(name.endswith(".experts.gate_up_proj") for name in found)
    nested, stored_nested = (any(name.startswith(_NESTED) for name in names) for names in (ours, found))
    return FileNames(
        fused=True if single and stored_fused else False if stored_single and not single else None,
        flat=nested and not stored_nested,
        values=arch.head == "values",
    )


def _renamed(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name


def _fuse(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts of a layer as gate_up_proj [E, 2F, D] and down_proj [E, D, F]."""
    out = {}
    layers: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if found := _ONE.match(name):
            layers.setdefault(found[1], {})[int(found[2]), found[3]] = tensor
        else:
            out[name] = tensor
    for prefix, parts in layers.items():
        ids = sorted({expert for expert, _ in parts})
        pairs = [torch.cat([parts[e, "gate"], parts[e, "up"]]) for e in ids]
        out[f"{prefix}.gate_up_proj"] = torch.stack(pairs)
        out[f"{prefix}.down_proj"] = torch.stack([parts[e, "down"] for e in ids])
    return out


def _unfuse(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each expert by itself as gate_proj and up_proj [F, D] and down_proj [D, F]."""
    out = {}
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition(".")
        if not prefix.endswith(".experts") or last not in ("gate_up_proj", "down_proj"):
            out[name] = tensor
            continue
        for expert, weight in enumerate(tensor):
            pieces = weight.chunk(2) if last == "gate_up_proj" else (weight,)
            kinds = ("gate", "up") if last == "gate_up_proj" else ("down",)
            out |= {f"{prefix}.{expert}.{kind}_proj.weight": w for kind, w in zip(kinds, pieces, strict=True)}
    return out


def _fill(place: torch.Tensor, whole: torch.Tensor) -> None:
    """Copies this rank's part."""
    if isinstance(place, DTensor):
        shape, offset = compute_local_shape_and_global_offset(whole.shape, place.device_mesh, place.placements)
        whole = whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
        place = place.to_local()
    place.copy_(whole)


def _collected(place: torch.Tensor, mine: bool) -> torch.Tensor:
    """All of a tensor, which all ranks gather together; an empty one where it is not wanted."""
    value = place.detach()
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole if mine else torch.empty(0)
