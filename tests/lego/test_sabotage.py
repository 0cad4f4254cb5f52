"""Sabotage changes what it says and nothing else."""

import numpy as np

from lego.records import Sample
from lego.sabotage import permute_replay, shuffle_advantages
from tests.factories import segment

SAMPLES = [Sample(segment=segment(12, seed=i), advantage=float(i), weight=1.0) for i in range(8)]


def test_shuffled_advantages_are_the_same_numbers_on_other_samples():
    got = shuffle_advantages(SAMPLES, seed=1)
    assert [s.segment for s in got] == [s.segment for s in SAMPLES]
    assert sorted(s.advantage for s in got) == sorted(s.advantage for s in SAMPLES)
    assert [s.advantage for s in got] != [s.advantage for s in SAMPLES]


def test_permuted_rows_are_the_same_rows_at_other_tokens():
    for before, after in zip(SAMPLES, permute_replay(SAMPLES, seed=1), strict=True):
        rows = np.flatnonzero(before.segment.routed_T)
        old, new = before.segment.routing_TLK[rows], after.segment.routing_TLK[rows]
        assert not np.array_equal(old, new)
        assert sorted(map(tuple, old.reshape(len(rows), -1))) == sorted(map(tuple, new.reshape(len(rows), -1)))
        assert np.array_equal(before.segment.ids_T, after.segment.ids_T)
