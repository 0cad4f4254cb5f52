"""Lays a session's tree out for training: each sampled token trainable in exactly one segment."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lego.capture.crosscheck import FAULTS
from lego.records import CallKind, Fidelity, Mask, Routing, Segment, Turn


def segments_of(turns: Sequence[Turn], excluded: Mapping[int, str], kinds: Sequence[CallKind]) -> tuple[Segment, ...]:
    """One segment for each path to a trainable leaf; a shared turn belongs to the first such path.

    A segment's own turns are of one kind: where a summary goes on from the work, the path ends twice, and each end has
    the turns of its kind. Paths are ordered turn by turn, so that what is added later takes no turn from a path before.
    """
    owned: set[int] = set()
    segments = []
    for path in sorted((_path(turns, leaf) for leaf in _leaves(turns, excluded, kinds)), key=_indexes):
        kind = kinds[path[-1].index]
        mine = [t for t in path if t.index not in excluded and t.index not in owned and kinds[t.index] is kind]
        owned |= {t.index for t in mine}
        segments.append(_segment(path, mine, kind))
    return tuple(segments)


def account(turns: Sequence[Turn], excluded: Mapping[int, str], kinds: Sequence[CallKind]) -> Fidelity:
    """Sampled, trained and excluded tokens of a session."""
    causes: Counter[str] = Counter()
    faults = Counter(turn.rejected for turn in turns if turn.rejected in FAULTS)
    trained = 0
    for turn in turns:
        n = len(turn.generation.output_ids)
        if turn.index in excluded:
            causes[excluded[turn.index]] += n
        else:
            trained += n
    return Fidelity(
        sampled=trained + sum(causes.values()),
        trained=trained,
        excluded=dict(causes),
        turns=len(turns),
        drift=dict(Counter(str(turn.drift) for turn in turns)),
        faults=dict(faults),
        kinds=dict(Counter(str(kind) for kind in kinds)),
        truncated=next((t.truncated for t in reversed(turns) if t.index not in excluded), False),
    )


def _leaves(turns: Sequence[Turn], excluded: Mapping[int, str], kinds: Sequence[CallKind]) -> list[int]:
    """Trainable turns that no trainable turn of their kind descends from, in order."""
    inner: set[int] = set()
    for turn in turns:
        if turn.index not in excluded:
            before = _path(turns, turn.index)[:-1]
            inner |= {t.index for t in before if kinds[t.index] is kinds[turn.index]}
    return [t.index for t in turns if t.index not in excluded and t.index not in inner]


def _path(turns: Sequence[Turn], leaf: int) -> list[Turn]:
    path, at = [], leaf
    while at is not None:
        path.append(turns[at])
        at = turns[at].parent
    return path[::-1]


def _indexes(path: Sequence[Turn]) -> list[int]:
    return [turn.index for turn in path]


def _segment(path: Sequence[Turn], mine: Sequence[Turn], kind: CallKind) -> Segment:
    leaf = path[-1]
    ids = np.concatenate([leaf.prompt_ids, leaf.generation.output_ids]).astype(np.int32)
    mask = np.zeros(len(ids), np.bool_)
    logprobs = np.zeros(len(ids), np.float32)
    versions = np.full(len(ids), -1, np.int32)
    for turn in mine:
        start = len(turn.prompt_ids)
        stop = start + len(turn.generation.output_ids)
        assert np.array_equal(ids[start:stop], turn.generation.output_ids), "a turn does not extend its parent"
        mask[start:stop] = True
        logprobs[start:stop] = turn.generation.logprobs
        for span in turn.generation.versions:
            versions[start + span.start : start + span.stop] = span.version
    routing, routed = _merged_routing(path, len(ids))
    return Segment(
        ids_T=ids,
        mask_T=mask,
        logprobs_T=logprobs,
        versions_T=versions,
        routing_TLK=routing,
        routed_T=routed,
        kind=kind,
    )


def _merged_routing(path: Sequence[Turn], length: int) -> tuple[Routing | None, Mask]:
    """Rows of all turns of a path, the first capture of each row; the row of the last token stays empty."""
    routed = np.zeros(length, np.bool_)
    captures = [(t.generation.routing_start, t.generation.routing) for t in path if t.rejected not in FAULTS]
    found = [(start, rows) for start, rows in captures if rows is not None]
    if not found:
        return None, routed
    merged: Any = np.zeros((length, *found[0][1].shape[1:]), found[0][1].dtype)
    for start, rows in found:
        span = slice(start, start + len(rows))
        np.copyto(merged[span], rows, where=~routed[span, None, None])
        routed[span] = True
    return merged, routed
