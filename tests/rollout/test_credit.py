"""Rewards become advantages once a trial, whatever its number of segments."""

import numpy as np
import pytest

from lego.learn.advantages import group_advantages
from lego.records import Outcome
from lego.rollout.credit import credit
from tests.factories import segment, trajectory


def test_a_trial_with_three_segments_weighs_as_much_as_one_with_one():
    got = credit([trajectory("a", 1.0, segments=3), trajectory("a", 0.0, segments=1)], group_advantages)
    assert [(s.advantage, pytest.approx(s.weight)) for s in got.samples] == [(0.5, 1 / 3)] * 3 + [(-0.5, 1.0)]


def test_trials_without_a_reward_leave_the_baseline():
    got = credit(
        [trajectory("a", 1.0), trajectory("a", 0.0), trajectory("a", None, outcome=Outcome.ENGINE_ERROR)],
        group_advantages,
    )
    assert [s.advantage for s in got.samples] == [0.5, -0.5]


def test_flat_and_small_groups_are_counted_and_not_trained():
    solved = [trajectory("flat", 1.0), trajectory("flat", 1.0)]
    lone = [trajectory("small", 1.0), trajectory("small", None, outcome=Outcome.TIMEOUT)]
    got = credit(solved + lone, group_advantages)
    assert (got.samples, got.groups, got.flat, got.small) == ((), 2, 1, 1)


def test_a_segment_without_a_trainable_token_takes_no_weight():
    masked = segment(mask=np.zeros(4, bool))
    got = credit([trajectory("a", 1.0, own=(segment(), masked)), trajectory("a", 0.0)], group_advantages)
    assert [s.weight for s in got.samples] == [1.0, 1.0]
