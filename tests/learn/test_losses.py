import math

import pytest
import torch

from lego.learn.algorithms import GRPO, GSPO
from lego.learn.losses import Tokens, Totals, effective_sample_share, grpo, gspo, k3, log_ratio, objective


def tokens(ratios, mask, segment=None, advantage=(1.0,), weight=None, sampled=None):
    sampled = torch.zeros(len(ratios)) if sampled is None else torch.tensor(sampled)
    made = Tokens(
        logprobs_T=(torch.tensor(ratios) + sampled).requires_grad_(),
        sampled_T=sampled,
        mask_T=torch.tensor(mask, dtype=torch.bool),
        segment_T=torch.tensor(segment or [0] * len(ratios)),
        advantage_S=torch.tensor(advantage),
        weight_S=torch.tensor(weight or [1.0] * len(advantage)),
    )
    return made


WIDE = GSPO(clip_low=0.9, clip_high=9.0)


def test_the_sequence_ratio_is_the_mean_over_sampled_tokens_only():
    result = gspo(tokens([0.2, -0.1, 5.0], [1, 1, 0]), Totals(tokens=2, weight=1), WIDE)
    assert result.ratio_T[0].item() == pytest.approx(1.05127, abs=1e-5)
    assert result.loss.item() == pytest.approx(-1.05127, abs=1e-5)


def test_sequences_of_different_length_with_tool_tokens_between_keep_their_own_ratio():
    made = tokens([0.2, 9.0, -0.1, 0.3, 9.0], [1, 0, 1, 1, 0], [0, 0, 0, 1, 1], (1.0, 2.0))
    result = gspo(made, Totals(tokens=3, weight=2), WIDE)
    assert result.loss.item() == pytest.approx(-(math.exp(0.05) + 2 * math.exp(0.3)) / 2, abs=1e-5)


@pytest.mark.parametrize("config", [WIDE, GRPO(clip_low=0.9, clip_high=9.0)])
@pytest.mark.parametrize("masked", [5.0, -91.0, 1e30, math.inf])
def test_a_masked_token_changes_neither_loss_nor_gradient(config, masked):
    made = tokens([0.2, -0.1, masked], [1, 1, 0])
    loss = objective(config)(made, Totals(tokens=2, weight=1)).loss
    loss.backward()
    plain = tokens([0.2, -0.1, 0.0], [1, 1, 0])
    want = objective(config)(plain, Totals(tokens=2, weight=1)).loss
    want.backward()
    assert loss.item() == want.item()
    assert torch.equal(made.logprobs_T.grad, plain.logprobs_T.grad)


@pytest.mark.parametrize("config", [GSPO(), GRPO(), GRPO(normalise="sequence"), GSPO(normalise="token")])
@pytest.mark.parametrize("mask", [1, 0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_huge_log_ratio_gives_finite_loss_and_gradient(config, mask, advantage):
    made = tokens([89.0], [mask], advantage=(advantage,), sampled=[-91.0])
    loss = objective(config)(made, Totals(tokens=1, weight=1)).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(made.logprobs_T.grad).all()


def test_k3_of_a_huge_difference_is_capped_with_a_finite_gradient():
    d = torch.tensor([100.0, -100.0], requires_grad=True)
    value = k3(d)
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert torch.isfinite(d.grad).all()


def test_k3_is_zero_at_agreement_and_half_the_square_near_it():
    assert k3(torch.zeros(1)).item() == 0
    assert k3(torch.tensor([1e-2])).item() == pytest.approx(5e-5, rel=1e-2)


def test_token_losses_are_averaged_over_the_step_however_they_are_split():
    """Losses 1, 1, 1 on one rank and 5 on another: 2, not the mean of means 3."""
    config, totals = GRPO(clip_low=0.9, clip_high=9.0), Totals(tokens=4, weight=2)

    def part(values):
        return tokens([0.0] * len(values), [1] * len(values), list(range(len(values))), tuple(-v for v in values))

    whole = [part([1.0, 1.0, 1.0, 5.0])]
    halves = [part([1.0, 1.0, 1.0]), part([5.0])]
    quarters = [part([1.0, 1.0]), part([1.0]), part([5.0])]
    for split in (whole, halves, quarters):
        losses = [grpo(p, totals, config).loss for p in split]
        sum(losses).backward()
        assert sum(losses).item() == pytest.approx(2.0, abs=1e-6)
        grads = torch.cat([p.logprobs_T.grad for p in split])
        assert torch.allclose(grads, torch.tensor([0.25, 0.25, 0.25, 1.25]))


def test_segments_weigh_by_their_weight_and_not_by_their_length():
    made = tokens([0.0] * 5, [1] * 5, [0, 0, 0, 0, 1], (-1.0, -3.0), [0.5, 0.5])
    for config in (GSPO(), GRPO(normalise="sequence")):
        assert objective(config)(made, Totals(tokens=5, weight=1)).loss.item() == pytest.approx(2.0)
    for config in (GSPO(normalise="token"), GRPO()):
        assert objective(config)(made, Totals(tokens=5, weight=1)).loss.item() == pytest.approx(7 / 5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"), [(0.4, 1.0, True), (0.4, -1.0, False), (-0.4, 1.0, False), (-0.4, -1.0, True)]
)
def test_clipping_stops_the_gradient_only_where_the_step_went_the_right_way(ratio, advantage, clipped):
    for config in (GRPO(), GSPO(clip_low=0.2, clip_high=0.2)):
        made = tokens([ratio], [1], advantage=(advantage,))
        result = objective(config)(made, Totals(tokens=1, weight=1))
        result.loss.backward()
        assert bool(result.clipped_T[0]) is clipped
        assert (made.logprobs_T.grad[0].item() == 0) is clipped


def test_the_gradient_of_gspo_on_policy_is_the_advantage_spread_over_the_segment():
    made = tokens([0.0, 0.0], [1, 1], advantage=(3.0,))
    gspo(made, Totals(tokens=2, weight=1), GSPO()).loss.backward()
    assert made.logprobs_T.grad.tolist() == pytest.approx([-1.5, -1.5])


def test_the_log_ratio_is_bounded():
    assert log_ratio(torch.tensor([0.0]), torch.tensor([-91.0]), torch.tensor([True])).item() == 20.0


def test_the_effective_sample_share_is_one_for_equal_ratios_and_falls_to_one_part():
    assert effective_sample_share(4.0, 4.0, 4) == 1.0
    assert effective_sample_share(1.0, 1.0, 4) == 0.25
    assert effective_sample_share(0.0, 0.0, 0) is None


@pytest.mark.parametrize("field", [{"clip_low": 1.0}, {"clip_low": -0.1}, {"clip_high": -1}, {"normalise": "mean"}])
@pytest.mark.parametrize("kind", [GSPO, GRPO])
def test_a_clip_that_cannot_be_is_refused_by_name(kind, field):
    with pytest.raises(ValueError, match=next(iter(field))):
        kind(**field)
