import math

import pytest

from lego.learn.advantages import group_advantages


def test_a_reward_counts_against_the_mean_of_its_group():
    assert group_advantages([1.0, 0.0, 0.0, 0.0]) == [0.75, -0.25, -0.25, -0.25]


def test_scaling_uses_the_sample_standard_deviation():
    high, low = group_advantages([1.0, 0.0], scale="std")
    assert high == pytest.approx(0.7071, abs=1e-4)
    assert low == pytest.approx(-0.7071, abs=1e-4)


@pytest.mark.parametrize("scale", ["none", "std"])
@pytest.mark.parametrize("rewards", [[1, 1, 1, 1], [1.0], [0.1] * 8, []])
def test_a_group_without_spread_has_no_advantage(rewards, scale):
    assert group_advantages(rewards, scale=scale) == [0.0] * len(rewards)


def test_negative_advantages_are_scaled_and_positive_ones_are_not():
    assert group_advantages([1.0, 0.0], negative=0.2) == [0.5, -0.1]


def test_a_reward_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="finite"):
        group_advantages([1.0, math.nan])
