"""Routing replay: each token goes to the experts that the engine chose for it, with live gate weights.

Rows are -1 where nothing was recorded (the live router decides, counted) and -2 for padding (live, not counted).
Only MoE layers have rows; layers here are counted among those. A micro-batch is known by the memory of its
`positions`, which every layer is given, so a layer that is computed again in the backward pass finds the rows it had
in the forward pass, in any order of batches. A MoE layer that is not given them raises: nothing is routed in silence.
"""

from dataclasses import dataclass, field

import torch

from lego.learn.packing import PADDING, UNRECORDED


class RoutingError(ValueError):
    """Recorded expert ids that cannot be replayed."""


def validate_rows(routing_TLK: torch.Tensor, experts: int) -> None:
    """Raises RoutingError unless each row is all -1, all -2, or distinct ids below `experts`."""
    blank = (routing_TLK == UNRECORDED).all(-1) | (routing_TLK == PADDING).all(-1)
    in_range = ((routing_TLK >= 0) & (routing_TLK < experts)).all(-1)
    ordered = routing_TLK.sort(-1).values
    distinct = (ordered[..., 1:] != ordered[..., :-1]).all(-1)
    bad = ~(blank | (in_range & distinct))
    if bad.any():
        token, layer = (int(i) for i in bad.nonzero()[0])
        raise RoutingError(
            f"{int(bad.sum())} of {bad.numel()} routing rows are invalid, the first at token {token} of MoE layer "
            f"{layer}: {routing_TLK[token, layer].tolist()}; want {routing_TLK.shape[-1]} distinct ids below {experts}"
        )


@dataclass(frozen=True, kw_only=True)
class RowCount:
    """Rows of a micro-batch: MoE layers x tokens."""

    needed: int = 0
    replayed: int = 0
    live: int = 0
    choices: int = 0
    """Experts in the replayed rows."""
    agreed: int = 0
    """Of those, what the live router would have chosen too."""


@dataclass(frozen=True, kw_only=True)
class _Rows:
    positions: torch.Tensor
    """Held, so that its memory is no other's while it is the key."""
    ids_LTK: torch.Tensor
    live_LT: torch.Tensor
    any_live_L: list[bool]
    replayed_L: list[int]
    unrecorded_L: list[int]
    agreed_by_layer: dict[int, torch.Tensor] = field(default_factory=dict)
    """Of each layer that was computed."""


def _key(positions: torch.Tensor) -> tuple[int, int]:
    # A copy's memory is another's and a part's length is; either is a micro-batch that nobody opened.
    return positions.data_ptr(), positions.numel()


class Replay:
    """The recorded rows of the micro-batches in flight, shared by the routers of one model."""

    def __init__(self, *, layers: int, experts: int, top_k: int) -> None:
        self.layers, self.experts, self.top_k = layers, experts, top_k
        self._open: dict[tuple[int, int], _Rows] = {}
        self._current: _Rows | None = None

    def open(self, positions: torch.Tensor, routing_TLK: torch.Tensor) -> None:
        """Holds a micro-batch's rows until `close`. Raises RoutingError on rows that cannot be replayed."""
        if routing_TLK.shape != (positions.numel(), self.layers, self.top_k):
            raise RoutingError(
                f"routing of shape {tuple(routing_TLK.shape)}; want {positions.numel()} tokens x {self.layers} MoE "
                f"layers x {self.top_k} experts"
            )
        if any(rows.positions.data_ptr() == positions.data_ptr() for rows in self._open.values()):
            raise RoutingError("a micro-batch with these positions is open already")
        validate_rows(routing_TLK, self.experts)
        ids_LTK = routing_TLK.to(torch.int64).transpose(0, 1).contiguous()
        first_LT = ids_LTK[..., 0] if self.layers else ids_LTK.sum(-1)
        self._open[_key(positions)] = _Rows(
            positions=positions,
            ids_LTK=ids_LTK,
            live_LT=first_LT < 0,
            any_live_L=(first_LT < 0).any(-1).tolist(),
            replayed_L=(first_LT >= 0).sum(-1).tolist(),
            unrecorded_L=(first_LT == UNRECORDED).sum(-1).tolist(),
        )

    def enter(self, positions: torch.Tensor) -> None:
        """Makes the micro-batch of these positions the current one; called before each layer."""
        self._current = self._open.get(_key(positions))

    def choose(self, layer: int, scores_TE: torch.Tensor) -> torch.Tensor:
        """The expert ids [T, K] of this MoE layer: recorded ones, or the live top-k where there is none.

        `scores_TE` are those to select by, of all the micro-batch's tokens. Raises RoutingError if they are of another
        number of tokens, or if the layer was given a copy or a slice of the positions, or is computed after `close`.
        """
        rows = self._current
        if rows is None:
            raise RoutingError(f"MoE layer {layer} was not given the positions of an open micro-batch")
        ids_TK = rows.ids_LTK[layer]
        if len(scores_TE) != len(ids_TK):
            raise RoutingError(f"MoE layer {layer} routes {len(scores_TE)} tokens, but {len(ids_TK)} have rows")
        live_TK = torch.topk(scores_TE, k=self.top_k, dim=-1, sorted=False).indices
        if layer not in rows.agreed_by_layer:
            rows.agreed_by_layer[layer] = (ids_TK[:, :, None] == live_TK[:, None, :]).sum()
        return torch.where(rows.live_LT[layer][:, None], live_TK, ids_TK) if rows.any_live_L[layer] else ids_TK

    def close(self, positions: torch.Tensor) -> RowCount:
        """Forgets a micro-batch and returns what its layers consumed, each counted once however often computed."""
        rows = self._open.pop(_key(positions))
        self._current = None
        replayed = sum(rows.replayed_L[layer] for layer in rows.agreed_by_layer)
        return RowCount(
            needed=sum(rows.replayed_L) + sum(rows.unrecorded_L),
            replayed=replayed,
            live=sum(rows.unrecorded_L[layer] for layer in rows.agreed_by_layer),
            choices=replayed * self.top_k,
            agreed=int(sum(rows.agreed_by_layer.values())),
        )
