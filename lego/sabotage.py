"""Two ways to break a run on purpose: if it still learns, or still passes its gates, they were not real."""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lego.records import Sample


def shuffle_advantages(samples: Sequence[Sample], seed: int) -> tuple[Sample, ...]:
    """The same advantages and rewards, handed to other samples: nothing can be learned from them."""
    earned = [(sample.advantage, sample.reward) for sample in samples]
    random.Random(seed).shuffle(earned)
    return tuple(replace(s, advantage=a, reward=r) for s, (a, r) in zip(samples, earned, strict=True))


def permute_replay(samples: Sequence[Sample], seed: int) -> tuple[Sample, ...]:
    """Each segment's recorded rows in another order: the trainer replays experts that did not run."""
    return tuple(replace(s, segment=_permuted(s, seed + i)) for i, s in enumerate(samples))


def _permuted(sample: Sample, seed: int):
    segment = sample.segment
    if segment.routing_TLK is None:
        return segment
    rows = np.flatnonzero(segment.routed_T)
    routing = segment.routing_TLK.copy()
    routing[rows] = routing[np.random.default_rng(seed).permutation(rows)]
    return replace(segment, routing_TLK=routing)
