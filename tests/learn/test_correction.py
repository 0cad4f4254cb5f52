import math

import pytest
import torch

from lego.learn.algorithms import Correction, expected_ess
from lego.learn.correction import correction_weights, log_ratio
from lego.learn.losses import effective_sample_share

RATIOS = torch.tensor([2.0, 0.4, 4.0, 9.0])
"""A segment of two tokens with product 0.8 and geometric mean 0.894, one of 4, and a token off the mask."""


def weights(ratios=RATIOS, mask=(1, 1, 1, 0), segment=(0, 0, 1, 1), **fields):
    made = correction_weights(
        Correction(**fields),
        ratios.log(),
        torch.tensor(mask, dtype=torch.bool),
        torch.tensor(segment),
        max(segment) + 1,
    )
    return made[torch.tensor(mask, dtype=torch.bool)].tolist()


@pytest.mark.parametrize(
    ("level", "mode", "bounds", "expected"),
    [
        ("none", "mask", (1.0, 1.0), [1, 1, 1]),
        ("token", "truncate", (0.0, 3.0), [2, 0.4, 3]),
        ("token", "truncate", (0.5, 3.0), [2, 0.5, 3]),
        ("token", "mask", (0.5, 3.0), [2, 0, 0]),
        ("sequence", "truncate", (0.0, 3.0), [0.8, 0.8, 3]),
        ("sequence", "mask", (0.85, 4.5), [0, 0, 4]),
        ("geometric", "truncate", (0.9, 5.0), [0.9, 0.9, 4]),
        ("geometric", "mask", (0.85, 3.0), [0.894427, 0.894427, 0]),
    ],
)
def test_weights_are_of_tokens_or_of_segments_and_truncated_or_masked(level, mode, bounds, expected):
    assert weights(level=level, mode=mode, low=bounds[0], high=bounds[1]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_a_weight_has_no_gradient_and_is_finite(level, mode):
    """Five log-ratios of 20 sum to 100, whose exponential is beyond float32."""
    ratio_T = torch.full((5,), 20.0, requires_grad=True)
    mask_T, segment_T = torch.ones(5, dtype=torch.bool), torch.zeros(5, dtype=torch.int64)
    made = correction_weights(Correction(level=level, mode=mode), ratio_T, mask_T, segment_T, 1)
    assert not made.requires_grad
    assert made.tolist() == [2.0 if mode == "truncate" else 0.0] * 5


def test_the_geometric_weight_does_not_depend_on_the_length_and_the_sequence_weight_does():
    long = torch.full((1000,), 1.01)
    for level, expected in (("geometric", 1.01), ("sequence", 1.01**1000)):
        (first, *_) = weights(long, [1] * 1000, [0] * 1000, level=level, high=1e6)
        assert first == pytest.approx(expected, rel=1e-3)


def test_the_log_ratio_is_bounded_and_zero_off_the_mask():
    trainer, rollout = torch.tensor([-2.0, -91.0, math.inf]), torch.tensor([-91.0, -2.0, math.nan])
    got = log_ratio(trainer, rollout, torch.tensor([True, True, False]))
    assert got.tolist() == [20.0, -20.0, 0.0]


def test_the_effective_sample_share_is_one_for_equal_weights_and_falls_to_one_part():
    assert effective_sample_share(4.0, 4.0, 4) == 1.0
    assert effective_sample_share(1.0, 1.0, 4) == 0.25
    assert effective_sample_share(0.0, 0.0, 0) is None


def test_the_share_expected_of_long_segments_is_what_sampled_weights_keep():
    """2800 tokens with k3 5e-4: log-weights with mean -1.4 and variance 2.8."""
    torch.manual_seed(0)
    weight = (torch.randn(1_000_000, dtype=torch.float64) * math.sqrt(2.8) - 1.4).exp()
    share = effective_sample_share(weight.sum().item(), weight.square().sum().item(), len(weight))
    assert share == pytest.approx(expected_ess(2800, 5e-4), rel=0.15)
