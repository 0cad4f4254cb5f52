"""Samples to packed micro-batches of every rank, and the file that carries them there.

A segment is fed up to, and without, its last sampled token: input row i predicts token i + 1, so every
fed token has a routing row and nothing after the last trained token is computed. What is trained, counted
and weighed follows from the segment's mask alone.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from lego.learn.costs import Cost
from lego.records import Sample, Segment

UNRECORDED = -1
PADDING = -2
ROUTES = np.int16
"""Type of recorded experts in a batch."""

Array = NDArray[np.generic]

OverBudget = Literal["drop", "split", "error"]
"""What becomes of a sample that feeds more tokens than a micro-batch holds."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One packed row. Axes: T input tokens, R trained tokens, S segments.

    `positions_T` restart at 0 with each segment, and with the padding that may stand at the end. Input row `rows_R`
    predicts `labels_R`, sampled with `sampled_R` at `temperature_R`: token `token_R` of the segment that sample
    `sample_S[segment_R]` of the packed list came with. `length_S` counts its tokens here, `cut_S` is 1 if it lost
    context. `routing_TLK` holds -1 where nothing was recorded and -2 on padding; K is 0 in a batch without any routing.
    `advantage_S`, `weight_S` and `reward_S` are the samples'.
    """

    ids_T: Array
    positions_T: Array
    routing_TLK: Array
    rows_R: Array
    labels_R: Array
    sampled_R: Array
    temperature_R: Array
    token_R: Array
    segment_R: Array
    sample_S: Array
    length_S: Array
    cut_S: Array
    advantage_S: Array
    weight_S: Array
    reward_S: Array

    @property
    def tokens(self) -> int:
        """Fed tokens, padding not counted; they come first."""
        return int(self.length_S.sum())

    @property
    def empty(self) -> bool:
        """Whether this only keeps a rank in step with the others: padding and no loss."""
        return len(self.length_S) == 0

    @property
    def documents(self) -> list[int]:
        """Lengths of what attends to itself alone: the segments, then the padding if there is any."""
        padding = len(self.ids_T) - self.tokens
        return [*self.length_S.tolist(), *([padding] if padding else [])]


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """A sample that is not trained on. `sample` is its index, `tokens` what it would have fed."""

    sample: int
    trial: str
    reason: str
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one optimizer step sees: the same number of micro-batches for every rank, and the step's totals.

    `segments` counts each piece of a split one; `split_tokens` are trained tokens whose context was cut.
    """

    ranks: tuple[tuple[MicroBatch, ...], ...]
    trained: int
    weight: float
    segments: int
    dropped: tuple[Dropped, ...]
    split_tokens: int

    @property
    def fed(self) -> int:
        """Tokens that pass the network, padding not counted."""
        return sum(m.tokens for row in self.ranks for m in row)


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """What is packed of sample `index`: its segment from token `start` on, and its share of the weight."""

    index: int
    sample: Sample
    segment: Segment
    start: int
    weight: float

    @property
    def length(self) -> int:
        return fed_length(self.segment)


def fed_length(segment: Segment) -> int:
    """Tokens of a segment that pass the network: those before its last sampled one; 0 if none was sampled."""
    sampled = np.flatnonzero(segment.mask_T)
    return int(sampled[-1]) if len(sampled) else 0


def pack(
    samples: Sequence[Sample],
    *,
    ranks: int,
    token_budget: int,
    temperature: float = 1.0,
    over_budget: OverBudget = "error",
    multiple_of: int = 1,
    cost: Cost | None = None,
) -> Batch:
    """Packs samples into micro-batches of at most `token_budget` tokens, balanced over `ranks` by `cost`.

    Each micro-batch is padded to a multiple of `multiple_of` tokens. Samples without a sampled token are dropped.
    One that feeds more tokens than the budget is dropped too, refused, or split into pieces that share its weight
    by their trained tokens. The first piece is the segment's beginning; each later one trains at most half a budget
    of tokens behind as much context as fits, at least half a budget. That context is cut, so the log-probabilities
    of its tokens are not those that the sampler saw: they are off-policy by construction, and `split_tokens`
    counts them. A ratio or an advantage over a whole sequence sees a piece at a time.

    Without a cost, tokens are balanced. Raises ValueError for a sample over the budget where that is an error, for
    one whose first token is sampled (nothing predicts it), for a sampled log-probability that is not finite or
    experts that are no whole numbers from 0 on, if nothing is left to train on, or if the budget is no multiple of
    `multiple_of`.
    """
    if token_budget % multiple_of:
        raise ValueError(f"token_budget={token_budget} is no multiple of {multiple_of}")
    cut = [_pieces(index, sample, token_budget, over_budget) for index, sample in enumerate(samples)]
    dropped = tuple(d for d in cut if isinstance(d, Dropped))
    pieces = [p for made in cut if not isinstance(made, Dropped) for p in made]
    if not pieces:
        reasons = ", ".join(f"{n} with {reason}" for reason, n in Counter(d.reason for d in dropped).items())
        raise ValueError(f"nothing to train on in {len(samples)} samples: {reasons} (a larger budget, or fewer tokens)")
    pieces.sort(key=lambda p: -p.length)
    shape = next((p.segment.routing_TLK.shape[1:] for p in pieces if p.segment.routing_TLK is not None), (0, 0))
    bins = _bins([p.length for p in pieces], ranks, token_budget, cost or Cost())
    packed = [_micro_batch([pieces[i] for i in members], temperature, shape, multiple_of) for members in bins]
    return Batch(
        ranks=tuple(tuple(packed[rank::ranks]) for rank in range(ranks)),
        trained=sum(int(p.segment.mask_T.sum()) for p in pieces),
        weight=float(sum(p.weight for p in pieces)),
        segments=len(pieces),
        dropped=dropped,
        split_tokens=sum(int(p.segment.mask_T.sum()) for p in pieces if p.start),
    )


def _pieces(index: int, sample: Sample, budget: int, over_budget: OverBudget) -> list[_Piece] | Dropped:
    segment, length = sample.segment, fed_length(sample.segment)
    name = f"sample {index} ({sample.trial})" if sample.trial else f"sample {index}"
    if len(segment.mask_T) and segment.mask_T[0]:
        raise ValueError(f"{name}: its first token is marked as sampled, but no token precedes it")
    for wrong in _wrong_numbers(segment):
        raise ValueError(f"{name}: {wrong}")
    if length > budget and over_budget == "error":
        raise ValueError(f"{name} feeds {length} tokens, more than token_budget={budget}")
    if length > budget and over_budget == "split":
        return _split(index, sample, budget)
    if 0 < length <= budget:
        return [_Piece(index=index, sample=sample, segment=segment, start=0, weight=sample.weight)]
    reason = f"more tokens than token_budget={budget}" if length else "no sampled token"
    return Dropped(sample=index, trial=sample.trial, reason=reason, tokens=length)


def _wrong_numbers(segment: Segment) -> Iterator[str]:
    """What would train as if it were something else, in words."""
    odd = np.flatnonzero(segment.mask_T & ~np.isfinite(segment.logprobs_T))
    if len(odd):
        yield f"token {odd[0]} was sampled with log-probability {segment.logprobs_T[odd[0]]}"
    if segment.routing_TLK is None:
        return
    ids_NLK, most = segment.routing_TLK[segment.routed_T], np.iinfo(ROUTES).max
    if not np.issubdtype(ids_NLK.dtype, np.integer):
        yield f"its experts are of type {ids_NLK.dtype}, want whole numbers"
    # Kept in 16 bits a larger id is another expert's, and a negative one says that nothing was recorded.
    elif ids_NLK.size and not (ids_NLK.min() >= 0 and ids_NLK.max() <= most):
        yield f"its experts are {ids_NLK.min()} to {ids_NLK.max()}, want 0 to {most} at most"


def _split(index: int, sample: Sample, budget: int) -> list[_Piece]:
    sampled = np.flatnonzero(sample.segment.mask_T)
    left, pieces = sampled, []
    while len(left):
        reach = left[0] + (budget + 1) // 2 if pieces or left[0] > budget else budget + 1
        taken, left = left[left < reach], left[left >= reach]
        start, last = max(0, int(taken[-1]) - budget), int(taken[-1])
        segment = _only(sample.segment.window(start, last + 1), int(taken[0]) - start)
        weight = sample.weight * len(taken) / len(sampled)
        pieces.append(_Piece(index=index, sample=sample, segment=segment, start=start, weight=weight))
    return pieces


def _only(segment: Segment, first: int) -> Segment:
    """The segment with only its tokens from `first` on sampled."""
    mask_T = segment.mask_T & (np.arange(len(segment.mask_T)) >= first)
    logprobs_T, versions_T = np.where(mask_T, segment.logprobs_T, 0), np.where(mask_T, segment.versions_T, -1)
    return replace(
        segment,
        mask_T=mask_T,
        logprobs_T=logprobs_T.astype(np.float32),
        versions_T=versions_T.astype(np.int32),
    )


def _bins(lengths: Sequence[int], ranks: int, budget: int, cost: Cost) -> list[list[int]]:
    """Indices by micro-batch, a multiple of `ranks` of them; `lengths` come longest first.

    The bins come dearest first and are dealt so that bin i belongs to rank i modulo `ranks`: the ranks wait for each
    other in every round.
    """

    def filled(rounds: int) -> tuple[list[list[int]], NDArray[np.float64]] | None:
        return _filled(lengths, rounds * ranks, budget, cost)

    least, most = -(-sum(lengths) // (ranks * budget)), -(-len(lengths) // ranks)
    found = filled(bisect_left(range(most), True, lo=least, key=lambda rounds: filled(rounds) is not None))
    assert found is not None, "a bin for each did not do"
    return _deal(*found, ranks)


def _filled(
    lengths: Sequence[int], count: int, budget: int, cost: Cost
) -> tuple[list[list[int]], NDArray[np.float64]] | None:
    """Dearest first into the cheapest bin with room: indices and seconds by bin; None if that needs more bins."""
    bins: list[list[int]] = [[] for _ in range(count)]
    room, seconds = np.full(count, budget), np.zeros(count)
    for index, length in enumerate(lengths):
        cheapest = int(np.where(room >= length, seconds, np.inf).argmin())
        if room[cheapest] < length:
            return None
        bins[cheapest].append(index)
        room[cheapest] -= length
        seconds[cheapest] += cost.seconds([length])
    return bins, seconds


def _deal(bins: list[list[int]], seconds: NDArray[np.float64], ranks: int) -> list[list[int]]:
    order = np.argsort(-seconds, kind="stable").reshape(-1, ranks)
    order[1::2] = order[1::2, ::-1]
    return [bins[i] for i in order.flat]


def _micro_batch(pieces: Sequence[_Piece], temperature: float, shape: tuple[int, ...], multiple_of: int) -> MicroBatch:
    lengths = [p.length for p in pieces]
    starts = np.cumsum([0, *lengths])
    padding = -starts[-1] % multiple_of if pieces else multiple_of
    labels = [np.flatnonzero(p.segment.mask_T) for p in pieces]
    trained = [len(at) for at in labels]

    def joined(parts: Sequence[Array], dtype: type) -> Array:
        return np.concatenate([np.zeros(0, dtype), *parts], dtype=dtype, casting="unsafe")

    return MicroBatch(
        ids_T=joined([*(p.segment.ids_T[: p.length] for p in pieces), np.zeros(padding)], np.int32),
        positions_T=joined([np.arange(n) for n in (*lengths, padding)], np.int32),
        routing_TLK=_routing(pieces, starts, int(starts[-1] + padding), shape),
        rows_R=joined([at - 1 + start for at, start in zip(labels, starts, strict=False)], np.int32),
        labels_R=joined([p.segment.ids_T[at] for p, at in zip(pieces, labels, strict=True)], np.int32),
        sampled_R=joined([p.segment.logprobs_T[at] for p, at in zip(pieces, labels, strict=True)], np.float32),
        temperature_R=np.full(sum(trained), temperature, np.float32),
        token_R=joined([at + p.start for p, at in zip(pieces, labels, strict=True)], np.int32),
        segment_R=np.repeat(np.arange(len(pieces)), trained).astype(np.int32),
        sample_S=np.array([p.index for p in pieces], np.int32),
        length_S=np.array(lengths, np.int32),
        cut_S=np.array([p.start > 0 for p in pieces], np.int32),
        advantage_S=np.array([p.sample.advantage for p in pieces], np.float32),
        weight_S=np.array([p.weight for p in pieces], np.float32),
        reward_S=np.array([p.sample.reward for p in pieces], np.float32),
    )


def _routing(pieces: Sequence[_Piece], starts: Array, tokens: int, shape: tuple[int, ...]) -> Array:
    rows_TLK = np.full((tokens, *shape), PADDING, ROUTES)
    for piece, start in zip(pieces, starts, strict=False):
        recorded, n = piece.segment.routing_TLK, piece.length
        part_TLK = rows_TLK[start : start + n]
        if recorded is None:
            part_TLK[:] = UNRECORDED
        elif recorded.shape[1:] != shape:
            raise ValueError(
                f"sample {piece.index}: routing of {recorded.shape[1:]} (layers, experts) in a batch of {shape}"
            )
        else:
            part_TLK[:] = recorded[:n]
            part_TLK[~piece.segment.routed_T[:n]] = UNRECORDED
    return rows_TLK


def write(batch: Batch, path: Path) -> None:
    """Writes a batch as one safetensors file that every rank can read its part of."""
    arrays = {
        f"{rank}.{index}.{field.name}": np.ascontiguousarray(getattr(part, field.name))
        for rank, row in enumerate(batch.ranks)
        for index, part in enumerate(row)
        for field in fields(MicroBatch)
    }
    totals = {"trained": batch.trained, "weight": batch.weight, "rounds": len(batch.ranks[0])}
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
