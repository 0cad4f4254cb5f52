import pytest
import torch

from lego.learn.gae import gae, value_loss


def estimate(values, mask=None, segment=None, reward=(1.0,), lambdas=None, gamma=1.0):
    return gae(
        torch.tensor(values),
        torch.tensor(mask or [1] * len(values), dtype=torch.bool),
        torch.tensor(segment or [0] * len(values)),
        reward_S=reward,
        lambda_S=lambdas or [0.5] * len(reward),
        gamma=gamma,
    )


def test_advantages_are_discounted_sums_of_temporal_differences():
    """Differences 0.6 - 0.5, 0.7 - 0.6, 1 - 0.7; then 0.1 + 0.3 / 2 = 0.25 and 0.1 + 0.25 / 2 = 0.225."""
    assert estimate([0.5, 0.6, 0.7]).tolist() == pytest.approx([0.225, 0.25, 0.3])


def test_the_discount_acts_on_values_and_on_the_sum():
    """Differences 0.54 - 0.5, 0.63 - 0.6, 0.3; then 0.03 + 0.45 x 0.3 = 0.165 and 0.04 + 0.45 x 0.165."""
    assert estimate([0.5, 0.6, 0.7], gamma=0.9).tolist() == pytest.approx([0.11425, 0.165, 0.3])


@pytest.mark.parametrize("observation", [9.0, float("inf"), float("nan")])
def test_observations_are_skipped_and_the_reward_falls_on_the_last_sampled_token(observation):
    got = estimate([0.5, observation, observation, 0.6, 0.7, observation], [1, 0, 0, 1, 1, 0])
    assert got.tolist() == pytest.approx([0.225, 0, 0, 0.25, 0.3, 0])


def test_segments_of_a_row_do_not_see_each_other():
    alone = estimate([0.2, 0.4], reward=[-1.0], lambdas=[0.9])
    packed = estimate([0.5, 0.6, 0.7, 0.2, 0.4], segment=[0, 0, 0, 1, 1], reward=[1.0, -1.0], lambdas=[0.5, 0.9])
    mixed = estimate([0.2, 0.5, 0.6, 0.4, 0.7], segment=[1, 0, 0, 1, 0], reward=[1.0, -1.0], lambdas=[0.5, 0.9])
    assert packed.tolist() == pytest.approx([0.225, 0.25, 0.3, *alone.tolist()])
    assert mixed[[1, 2, 4]].tolist() == pytest.approx([0.225, 0.25, 0.3])
    assert mixed[[0, 3]].tolist() == alone.tolist()


def test_with_lambda_one_the_return_is_the_reward():
    values = torch.rand(50)
    returns = estimate(values.tolist(), reward=[0.7], lambdas=[1.0]) + values
    assert torch.allclose(returns, torch.full((50,), 0.7))


def test_the_scan_is_the_sum_of_the_paper():
    """A_t = sum over l of (gamma lambda)^l (r + gamma V - V), equation 16 of arXiv 1506.02438."""
    values, gamma, lam = torch.rand(40, dtype=torch.float64), 0.97, 0.8
    rewards = torch.zeros(40, dtype=torch.float64)
    rewards[-1] = 0.3
    delta = rewards + gamma * torch.cat([values[1:], torch.zeros(1)]) - values
    want = [sum((gamma * lam) ** k * delta[t + k] for k in range(40 - t)).item() for t in range(40)]
    assert estimate(values.tolist(), reward=[0.3], lambdas=[lam], gamma=gamma).tolist() == pytest.approx(want, abs=1e-6)


def test_a_row_without_tokens_has_no_advantages():
    assert estimate([5.0], [0], reward=[0.0]).tolist() == [0.0]


def loss(values, returns, mask=None, **more):
    made = torch.tensor(values, requires_grad=True)
    chosen = torch.tensor(mask or [1] * len(values), dtype=torch.bool)
    result = value_loss(made, torch.tensor(returns), chosen, **more)
    result.backward()
    return result.item(), made.grad.tolist()


def test_the_value_loss_is_half_the_squared_error_over_the_step_s_tokens():
    assert loss([1.0, 3.0], [0.0, 0.0], tokens=4) == (pytest.approx((0.5 + 4.5) / 4), [0.25, 0.75])


def test_a_value_gains_nothing_beyond_the_clip_and_loses_without_bound():
    """From 1 towards 0 at most to 0.8: 0.64 / 2 without gradient; away from 0, the full 9 / 2."""
    near = loss([0.5], [0.0], tokens=1, old_T=torch.tensor([1.0]), clip=0.2)
    far = loss([3.0], [0.0], tokens=1, old_T=torch.tensor([1.0]), clip=0.2)
    assert near == (pytest.approx(0.32), [0.0])
    assert far == (pytest.approx(4.5), [3.0])


@pytest.mark.parametrize("junk", [1e30, float("inf"), float("nan")])
def test_an_observation_s_value_has_no_loss(junk):
    old = torch.tensor([1.0, junk])
    assert loss([0.75, junk], [0.0, junk], [1, 0], tokens=1, old_T=old, clip=0.5) == (0.28125, [0.75, 0.0])
