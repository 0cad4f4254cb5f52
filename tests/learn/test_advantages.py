import math
from statistics import pstdev

import pytest

from lego.learn.advantages import advantages, flat, soft_overlong

BASELINES = ["group", "leave_one_out", "batch"]


def test_a_reward_counts_against_the_mean_of_its_group():
    assert advantages([[1.0, 0.0, 0.0, 0.0], [5.0, 7.0]]) == [[0.75, -0.25, -0.25, -0.25], [-1.0, 1.0]]


def test_grpo_divides_by_the_sample_standard_deviation_of_the_group():
    """Of [1, 0]: sqrt(0.25 + 0.25) = 0.7071, and 0.5 / 0.7071 = 0.7071."""
    ((high, low),) = advantages([[1.0, 0.0]], scale="group")
    assert (high, low) == (pytest.approx(0.7071, abs=1e-4), pytest.approx(-0.7071, abs=1e-4))


def test_rloo_takes_the_mean_of_the_others():
    """3 against (1 + 2) / 2, 1 against (3 + 2) / 2, 2 against (3 + 1) / 2."""
    assert advantages([[3.0, 1.0, 2.0]], baseline="leave_one_out") == [[1.5, -1.5, 0.0]]


def test_reinforce_plus_plus_whitens_over_the_batch():
    """Rewards 1, 0, 0, 0 have mean 0.25 and variance (0.5625 + 3 x 0.0625) / 3 = 0.25."""
    got = advantages([[1.0, 0.0], [0.0, 0.0]], baseline="batch", scale="batch")
    assert got == [[1.5, -0.5], [-0.5, -0.5]]


def test_reinforce_plus_plus_with_baseline_divides_centred_groups_by_one_spread():
    """Centred 0.5, -0.5, 2, -2 have variance 8.5 / 3 = 2.8333, spread 1.6833."""
    (first, second) = advantages([[1.0, 0.0], [4.0, 0.0]], scale="batch")
    assert first == pytest.approx([0.29704, -0.29704], abs=1e-5)
    assert second == pytest.approx([1.18818, -1.18818], abs=1e-5)


def test_without_a_baseline_the_reward_is_the_advantage():
    assert advantages([[1.0], [0.0, 0.5]], baseline="none") == [[1.0], [0.0, 0.5]]


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", ["none", "group", "batch"])
@pytest.mark.parametrize("rewards", [[1, 1, 1, 1], [1.0], [0.1] * 8, [0.1 + 0.2, 0.3], []])
def test_a_group_without_spread_has_no_advantage(rewards, baseline, scale):
    assert advantages([rewards], baseline=baseline, scale=scale) == [[0.0] * len(rewards)]


def test_a_group_without_spread_has_none_though_the_batch_has_one():
    flat_group, other = advantages([[0.1] * 8, [1.0, 0.0]], scale="batch")
    assert flat_group == [0.0] * 8
    assert other[0] == pytest.approx(0.5 / math.sqrt(0.5 / 9))
    assert advantages([[1.0], [1.0, 0.0]], scale="group")[0] == [0.0]


def test_a_spread_of_a_rounding_is_none():
    rewards = [0.1 + 0.2, 0.3]
    assert rewards[0] != rewards[1] and pstdev(rewards) > 0
    assert advantages([rewards], baseline="none", scale="group") == [[0.0, 0.0]]
    assert flat(rewards) and flat([]) and flat([5.0]) and not flat([0.0, 1e-6])


def test_negative_advantages_are_scaled_and_positive_ones_are_not():
    assert advantages([[1.0, 0.0]], negative=0.2) == [[0.5, -0.1]]


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused(reward):
    with pytest.raises(ValueError, match="finite"):
        advantages([[1.0, 0.0], [1.0, reward]])


def test_a_negative_factor_below_zero_is_refused():
    with pytest.raises(ValueError, match="negative=-1"):
        advantages([[1.0, 0.0]], negative=-1)


@pytest.mark.parametrize(("length", "expected"), [(0, 0), (75, 0), (80, -0.2), (99, -0.96), (100, -1), (500, -1)])
def test_the_overlong_penalty_grows_over_the_buffer(length, expected):
    assert soft_overlong(length, max_length=100, buffer=25) == pytest.approx(expected)
