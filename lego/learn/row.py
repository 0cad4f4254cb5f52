"""A micro-batch on a rank's device."""

from dataclasses import dataclass, fields

import torch

from lego.learn.packing import PADDING, UNRECORDED, MicroBatch
from lego.learn.replay import Replay


@dataclass(frozen=True, kw_only=True)
class Row:
    """A micro-batch on the device, axes as in `MicroBatch`. An empty one has one masked row to call the head with."""

    ids_T: torch.Tensor
    positions_T: torch.Tensor
    routing_TLK: torch.Tensor
    rows_R: torch.Tensor
    labels_R: torch.Tensor
    sampled_R: torch.Tensor
    temperature_R: torch.Tensor
    token_R: torch.Tensor
    segment_R: torch.Tensor
    sample_S: torch.Tensor
    length_S: torch.Tensor
    cut_S: torch.Tensor
    advantage_S: torch.Tensor
    weight_S: torch.Tensor
    reward_S: torch.Tensor
    mask_R: torch.Tensor

    @classmethod
    def of(cls, part: MicroBatch, device: torch.device) -> "Row":
        """A micro-batch moved to the device; whole numbers as int64."""
        arrays = {f.name: torch.from_numpy(getattr(part, f.name)) for f in fields(part)}
        if part.empty:
            arrays |= {name: torch.zeros(1, dtype=a.dtype) for name, a in arrays.items() if name.endswith(("_R", "_S"))}
            arrays |= {"temperature_R": torch.ones(1)}
        moved = {n: a.to(device, torch.float32 if a.is_floating_point() else torch.int64) for n, a in arrays.items()}
        return cls(**moved, mask_R=torch.full_like(moved["labels_R"], not part.empty, dtype=torch.bool))

    def routing(self, replay: Replay, recorded: bool = True) -> torch.Tensor:
        """The rows that a network replays: what was recorded, or the live router's choice for every token."""
        if recorded and self.routing_TLK.shape[-1]:
            return self.routing_TLK
        live = torch.full((len(self.ids_T), replay.layers, replay.top_k), UNRECORDED, device=self.ids_T.device)
        live[int(self.length_S.sum()) :] = PADDING
        return live
