"""Samples to packed micro-batches of every rank, and the file that carries them there.

A segment is fed up to, and without, its last sampled token: input row i predicts token i + 1, so every
fed token has a routing row and nothing after the last trained token is computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from lego.records import Sample, Segment

UNRECORDED = -1
PADDING = -2

Array = NDArray[np.generic]


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One packed row. Axes: T input tokens, R trained tokens, S segments.

    `positions_T` restart at 0 with each segment. Input row `rows_R` predicts `labels_R`, sampled with
    `sampled_R` at `temperature_R`, of segment `segment_R`. `routing_TLK` holds -1 where nothing was recorded
    (and -2 on padding); K is 0 in a batch without any routing. `advantage_S` and `weight_S` are the samples'.
    """

    ids_T: Array
    positions_T: Array
    routing_TLK: Array
    rows_R: Array
    labels_R: Array
    sampled_R: Array
    temperature_R: Array
    segment_R: Array
    advantage_S: Array
    weight_S: Array

    @property
    def tokens(self) -> int:
        """Fed tokens, padding not counted."""
        return 0 if self.empty else len(self.ids_T)

    @property
    def empty(self) -> bool:
        """Whether this only keeps a rank in step with the others: one padding token, no loss."""
        return len(self.advantage_S) == 0


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one optimizer step sees: the same number of micro-batches for every rank, and the step's totals."""

    ranks: tuple[tuple[MicroBatch, ...], ...]
    trained: int
    weight: float
    segments: int

    @property
    def fed(self) -> int:
        """Tokens that pass the network."""
        return sum(m.tokens for row in self.ranks for m in row)


def fed_length(segment: Segment) -> int:
    """Tokens of a segment that pass the network: those before its last sampled one; 0 if none was sampled."""
    sampled = np.flatnonzero(segment.mask_T)
    return int(sampled[-1]) if len(sampled) else 0


def pack(samples: Sequence[Sample], *, ranks: int, token_budget: int, temperature: float = 1.0) -> Batch:
    """Packs samples into micro-batches of at most `token_budget` fed tokens, balanced over `ranks`.

    Samples without a sampled token are left out. Raises ValueError for one longer than the budget, for one
    whose first token is sampled (nothing predicts it), or if nothing is left to train on.
    """
    for index, sample in enumerate(samples):
        _check(index, sample, token_budget)
    kept = sorted((s for s in samples if fed_length(s.segment)), key=lambda s: -fed_length(s.segment))
    if not kept:
        raise ValueError(f"none of {len(samples)} samples has a sampled token: nothing to train on")
    bins = _bins([fed_length(s.segment) for s in kept], ranks, token_budget)
    shape = next((s.segment.routing_TLK.shape[1:] for s in kept if s.segment.routing_TLK is not None), (0, 0))
    packed = [_micro_batch([kept[i] for i in members], temperature, shape) for members in bins]
    return Batch(
        ranks=tuple(tuple(packed[rank::ranks]) for rank in range(ranks)),
        trained=sum(int(s.segment.mask_T.sum()) for s in kept),
        weight=float(sum(s.weight for s in kept)),
        segments=len(kept),
    )


def _check(index: int, sample: Sample, budget: int) -> None:
    length = fed_length(sample.segment)
    if length > budget:
        raise ValueError(f"sample {index} feeds {length} tokens, more than token_budget={budget}")
    if len(sample.segment.mask_T) and sample.segment.mask_T[0]:
        raise ValueError(f"sample {index}: its first token is marked as sampled, but no token precedes it")


def _bins(lengths: Sequence[int], ranks: int, budget: int) -> list[list[int]]:
    """Indices by micro-batch, a multiple of `ranks` of them; `lengths` come longest first.

    Longest first into the least loaded bin, with as few bins as fit. The bins come heaviest first and are
    dealt so that bin i belongs to rank i modulo `ranks`.
    """
    rounds = -(-sum(lengths) // (ranks * budget))
    while True:
        bins: list[list[int]] = [[] for _ in range(rounds * ranks)]
        loads = np.zeros(len(bins), dtype=np.int64)
        for index, length in enumerate(lengths):
            lightest = int(loads.argmin())
            bins[lightest].append(index)
            loads[lightest] += length
        if loads.max() <= budget:
            return _deal(bins, loads, ranks)
        rounds += 1


def _deal(bins: list[list[int]], loads: NDArray[np.int64], ranks: int) -> list[list[int]]:
    order = np.argsort(-loads, kind="stable").reshape(-1, ranks)
    order[1::2] = order[1::2, ::-1]
    return [bins[i] for i in order.flat]


def _micro_batch(samples: Sequence[Sample], temperature: float, shape: tuple[int, ...]) -> MicroBatch:
    if not samples:
        return _empty(shape)
    lengths = [fed_length(s.segment) for s in samples]
    starts = np.cumsum([0, *lengths[:-1]])
    labels = [np.flatnonzero(s.segment.mask_T) for s in samples]
    trained = [len(at) for at in labels]

    def joined(parts: Sequence[Array], dtype: type) -> Array:
        return np.concatenate(parts).astype(dtype)

    return MicroBatch(
        ids_T=joined([s.segment.ids_T[:n] for s, n in zip(samples, lengths, strict=True)], np.int32),
        positions_T=joined([np.arange(n) for n in lengths], np.int32),
        routing_TLK=joined([_routing(s.segment, n, shape) for s, n in zip(samples, lengths, strict=True)], np.int16),
        rows_R=joined([at - 1 + start for at, start in zip(labels, starts, strict=True)], np.int32),
        labels_R=joined([s.segment.ids_T[at] for s, at in zip(samples, labels, strict=True)], np.int32),
        sampled_R=joined([s.segment.logprobs_T[at] for s, at in zip(samples, labels, strict=True)], np.float32),
        temperature_R=np.full(sum(trained), temperature, np.float32),
        segment_R=np.repeat(np.arange(len(samples)), trained).astype(np.int32),
        advantage_S=np.array([s.advantage for s in samples], np.float32),
        weight_S=np.array([s.weight for s in samples], np.float32),
    )


def _routing(segment: Segment, length: int, shape: tuple[int, ...]) -> Array:
    if segment.routing_TLK is None:
        return np.full((length, *shape), UNRECORDED, np.int16)
    if segment.routing_TLK.shape[1:] != shape:
        raise ValueError(f"routing of {segment.routing_TLK.shape[1:]} (layers, experts) in a batch of {shape}")
    rows = segment.routing_TLK[:length].astype(np.int16)
    rows[~segment.routed_T[:length]] = UNRECORDED
    return rows


def _empty(shape: tuple[int, ...]) -> MicroBatch:
    one, none = np.zeros(1, np.int32), np.zeros(0, np.float32)
    return MicroBatch(
        ids_T=one,
        positions_T=one,
        routing_TLK=np.full((1, *shape), PADDING, np.int16),
        rows_R=one[:0],
        labels_R=one[:0],
        sampled_R=none,
        temperature_R=none,
        segment_R=one[:0],
        advantage_S=none,
        weight_S=none,
    )


def write(batch: Batch, path: Path) -> None:
    """Writes a batch as one safetensors file that every rank can read its part of."""
    arrays = {
        f"{rank}.{index}.{field.name}": np.ascontiguousarray(getattr(part, field.name))
        for rank, row in enumerate(batch.ranks)
        for index, part in enumerate(row)
        for field in fields(MicroBatch)
    }
    totals = {
        "trained": batch.trained,
        "weight": batch.weight,
        "segments": batch.segments,
        "rounds": len(batch.ranks[0]),
    }
    save_file(arrays, path, metadata={name: repr(value) for name, value in totals.items()})


@dataclass(frozen=True, kw_only=True)
class RankBatch:
    """One rank's part of a batch."""

    parts: tuple[MicroBatch, ...]
    trained: int
    weight: float


def read(path: Path, rank: int) -> RankBatch:
    """Reads one rank's part of what `write` wrote."""
    with safe_open(path, framework="np") as file:
        totals = file.metadata()
        parts = tuple(
            MicroBatch(**{f.name: file.get_tensor(f"{rank}.{index}.{f.name}") for f in fields(MicroBatch)})
            for index in range(int(totals["rounds"]))
        )
    return RankBatch(parts=parts, trained=int(totals["trained"]), weight=float(totals["weight"]))
