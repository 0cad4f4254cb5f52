"""Rewards become advantages once a trial, whatever its number of segments."""

from functools import partial

import numpy as np
import pytest

from lego.learn.advantages import advantages
from lego.records import Outcome
from lego.rollout.credit import Rules, credit
from tests.factories import segment, trajectory

RULES = Rules(advantages=advantages)


def test_a_trial_with_three_segments_weighs_as_much_as_one_with_one():
    got = credit([trajectory("a", 1.0, segments=3), trajectory("a", 0.0, segments=1)], RULES)
    assert [(s.advantage, pytest.approx(s.weight)) for s in got.samples] == [(0.5, 1 / 3)] * 3 + [(-0.5, 1.0)]


def test_trials_without_a_reward_leave_the_baseline():
    got = credit(
        [trajectory("a", 1.0), trajectory("a", 0.0), trajectory("a", None, outcome=Outcome.ENGINE_ERROR)],
        RULES,
    )
    assert [s.advantage for s in got.samples] == [0.5, -0.5]


def test_flat_and_small_groups_are_counted_and_not_trained():
    solved = [trajectory("flat", 1.0), trajectory("flat", 1.0)]
    lone = [trajectory("small", 1.0), trajectory("small", None, outcome=Outcome.TIMEOUT)]
    got = credit(solved + lone, RULES)
    assert (got.samples, got.groups, got.flat, got.small) == ((), 2, 1, 1)


def test_a_segment_without_a_trainable_token_takes_no_weight():
    masked = segment(mask=np.zeros(4, bool))
    got = credit([trajectory("a", 1.0, own=(segment(), masked)), trajectory("a", 0.0)], RULES)
    assert [s.weight for s in got.samples] == [1.0, 1.0]


def test_flat_groups_stay_where_the_algorithm_wants_them_with_no_advantage():
    got = credit(
        [trajectory("flat", 1.0), trajectory("flat", 1.0)], Rules(advantages=advantages, drop_flat_groups=False)
    )
    assert [s.advantage for s in got.samples] == [0.0, 0.0] and got.flat == 1


def test_a_lone_trial_is_a_group_for_algorithms_with_a_critic():
    rules = Rules(advantages=partial(advantages, baseline="none"), least_group=1, drop_flat_groups=False)
    got = credit([trajectory("a", 1.0), trajectory("b", 0.0)], rules)
    assert [(s.advantage, s.reward) for s in got.samples] == [(1.0, 1.0), (0.0, 0.0)]
    assert got.samples[0].trial == "a/0" and got.small == 0


def test_rewards_are_shaped_by_the_tokens_that_the_trial_sampled_but_flat_is_what_the_verdicts_say():
    long, short = trajectory("a", 1.0, segments=3), trajectory("a", 1.0)
    rules = Rules(advantages=advantages, shaped=lambda reward, length: reward - length, drop_flat_groups=False)
    sampled = [sum(int(s.mask_T.sum()) for s in t.segments) for t in (long, short)]
    got = credit([long, short], rules)
    assert sorted({s.reward for s in got.samples}) == [1.0 - sampled[0], 1.0 - sampled[1]]
    assert credit([long, short], Rules(advantages=advantages, shaped=rules.shaped)).samples == ()
