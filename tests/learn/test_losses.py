import math
from dataclasses import fields, replace
from itertools import product

import pytest
import torch

from lego.learn.algorithms import (
    ALGORITHMS,
    CISPO,
    DAPO,
    GRPO,
    GSPO,
    PPO,
    RLOO,
    SAO,
    Correction,
    DrGRPO,
    ReinforcePlusPlus,
)
from lego.learn.losses import Tokens, Totals, kl_penalty, objective

WIDE = {"clip_low": 0.9, "clip_high": 9.0}


def tokens(log_ratios, advantages, mask=None, segment=None, weight=None, sampled=-1.0):
    """Tokens whose log-ratio trainer / rollout is given; `sampled` is the rollout's log-probability."""
    segment = segment or [0] * len(log_ratios)
    sampled_T = torch.full((len(log_ratios),), sampled)
    return Tokens(
        logprobs_T=(torch.tensor(log_ratios) + sampled_T).requires_grad_(),
        sampled_T=sampled_T,
        mask_T=torch.tensor(mask or [1] * len(log_ratios), dtype=torch.bool),
        segment_T=torch.tensor(segment),
        advantage_T=torch.tensor(advantages),
        weight_S=torch.tensor(weight or [1.0] * (max(segment, default=0) + 1)),
    )


def loss_and_gradient(algorithm, made, totals):
    result = objective(algorithm, made, totals)
    result.loss.backward()
    return result.loss.item(), made.logprobs_T.grad.tolist()


def fresh(made):
    return made.logprobs_T.detach().clone().requires_grad_()


RATIOS = [1.5, 0.5, 1.1, 0.7, 2.0]
"""Of two segments, one token each row; below, two tokens belong to the first and three to the second."""
GROUP = [1.0, 1.0, -0.5, -0.5, -0.5]
BAND = Correction(level="token", mode="mask", low=0.6, high=1.8)
ROOT = math.sqrt(1.5 * 0.5)
CUBE = (1.1 * 0.7 * 2.0) ** (1 / 3)


@pytest.mark.parametrize(
    ("algorithm", "advantages", "gain", "gradient"),
    [
        # ((min(1.5, 1.2) + 0.5) / 2 + (-0.55 + min(-0.35, -0.4) - 1) / 3) / 2
        (GRPO(), GROUP, (0.85 - 0.65) / 2, [0, 0.5 / 4, -0.55 / 6, 0, -1 / 6]),
        # (1.7 - 1.95) / (2 trials x 10 tokens)
        (DrGRPO(constant_length=10), GROUP, -0.0125, [0, 0.5 / 20, -0.55 / 20, 0, -1 / 20]),
        # (min(1.5, 1.28) + 0.5 - 1.95) / 5 tokens
        (DAPO(), GROUP, -0.034, [0, 0.1, -0.11, 0, -0.2]),
        (ReinforcePlusPlus(), GROUP, -0.05, [0, 0.1, -0.11, 0, -0.2]),
        # ((ln 1.5 - 1) + (ln 0.5 - 1) - (ln 1.1 + ln 0.7 + ln 2 - 3) / 2) / 5
        (RLOO(), GROUP, -0.2007146, [0.2, 0.2, -0.1, -0.1, -0.1]),
        # (sqrt(1.5 x 0.5) - cbrt(1.1 x 0.7 x 2) / 2) / 2; each token has its part of the segment's gradient
        (GSPO(), GROUP, (0.8660254 - 0.5774000) / 2, [ROOT / 4, ROOT / 4, -CUBE / 12, -CUBE / 12, -CUBE / 12]),
        # (1.2 (ln 1.5 - 1) + 0.5 (ln 0.5 - 1) - (1.1 (ln 1.1 - 1) + 0.7 (ln 0.7 - 1) + 1.2 (ln 2 - 1)) / 2) / 5
        (CISPO(clip_high=0.2), GROUP, -0.0806975, [0.24, 0.1, -0.11, -0.07, -0.12]),
        # 1.2 + min(-0.5, -0.8) + 0.55 + 0.35 + min(-4, -2.4) = -2.7, over 5
        (PPO(), [1.0, -1.0, 0.5, 0.5, -2.0], -0.54, [0, 0, 0.11, 0.07, -0.8]),
        # (1.5 (ln 1.5 - 1) - (1.1 (ln 1.1 - 1) + 0.7 (ln 0.7 - 1)) / 2) / 5, of the three tokens within the band
        (SAO(correction=BAND), GROUP, 0.0161227, [0.3, 0, -0.11, -0.07, 0]),
    ],
)
def test_an_objective_is_its_paper_s_formula(algorithm, advantages, gain, gradient):
    made = tokens([math.log(r) for r in RATIOS], advantages, segment=[0, 0, 1, 1, 1])
    loss, got = loss_and_gradient(algorithm, made, Totals(tokens=5, weight=2))
    assert loss == pytest.approx(-gain, abs=1e-6)
    assert got == pytest.approx([-g for g in gradient], abs=1e-6)


def test_each_named_algorithm_has_an_example_above():
    mark = next(m for m in test_an_objective_is_its_paper_s_formula.pytestmark if m.name == "parametrize")
    assert {type(case[0]) for case in mark.args[1]} == set(ALGORITHMS.values())


def test_gspo_has_the_value_and_gradient_of_the_sequence_form():
    made = tokens([0.2, 0.1, -0.3, 0.4, 0.0], [1.5, 1.5, -0.5, -0.5, -0.5], segment=[0, 0, 1, 1, 1])
    again = fresh(made)
    gains = []
    for part, advantage in ((slice(2), 1.5), (slice(2, 5), -0.5)):
        ratio = (again - made.sampled_T)[part].mean().exp()
        gains.append(torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
    want = -sum(gains) / 2
    want.backward()
    loss, gradient = loss_and_gradient(GSPO(clip_low=0.2, clip_high=0.2), made, Totals(tokens=5, weight=2))
    assert loss == pytest.approx(want.item())
    assert gradient == pytest.approx(again.grad.tolist())


def test_the_sequence_ratio_is_the_mean_over_sampled_tokens_only():
    """exp((0.2 - 0.1) / 2) = 1.05127; with the third token 5.474, divided by three 1.0339."""
    made = tokens([0.2, -0.1, 5.0], [1.0, 1.0, 1.0], [1, 1, 0])
    result = objective(GSPO(**WIDE), made, Totals(tokens=2, weight=1))
    assert result.ratio_T[0].item() == pytest.approx(1.05127, abs=1e-5)
    assert result.loss.item() == pytest.approx(-1.05127, abs=1e-5)


def test_sequences_of_different_length_with_tool_tokens_between_keep_their_own_ratio():
    made = tokens([0.2, 9.0, -0.1, 0.3, 9.0], [1.0, 1.0, 1.0, 2.0, 2.0], [1, 0, 1, 1, 0], [0, 0, 0, 1, 1])
    loss = objective(GSPO(**WIDE), made, Totals(tokens=3, weight=2)).loss
    assert loss.item() == pytest.approx(-(math.exp(0.05) + 2 * math.exp(0.3)) / 2, abs=1e-5)


def test_ratio_one_where_engine_and_trainer_agree_at_the_same_temperature():
    """Logits 2, 1, 0 at temperature 0.5: log-probability -0.1429 on both sides."""
    made = replace(
        tokens([0.0], [1.0], sampled=-0.1429),
        logprobs_T=torch.log_softmax(torch.tensor([2.0, 1.0, 0.0]) / 0.5, -1)[:1],
    )
    assert objective(GRPO(), made, Totals(tokens=1, weight=1)).ratio_T.item() == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"), [(0.4, 1.0, True), (0.4, -1.0, False), (-0.4, 1.0, False), (-0.4, -1.0, True)]
)
def test_clipping_stops_the_gradient_only_where_the_step_went_the_right_way(ratio, advantage, clipped):
    for config in (GRPO(), GSPO(clip_low=0.2, clip_high=0.2)):
        made = tokens([ratio], [advantage])
        result = objective(config, made, Totals(tokens=1, weight=1))
        result.loss.backward()
        assert bool(result.clipped_T[0]) is clipped
        assert (made.logprobs_T.grad[0].item() == 0) is clipped


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(("ratio", "inside"), [(0.19, False), (0.21, True), (3.9, True), (4.1, False)])
def test_sao_leaves_out_tokens_outside_its_band_whatever_their_advantage(ratio, inside, advantage):
    made = tokens([math.log(ratio)], [advantage])
    result = objective(SAO(), made, Totals(tokens=1, weight=1))
    result.loss.backward()
    assert bool(result.clipped_T[0]) is not inside
    assert made.logprobs_T.grad.item() == pytest.approx(-ratio * advantage if inside else 0)


def test_token_losses_are_averaged_over_the_step_however_they_are_split():
    """Losses 1, 1, 1 on one rank and 5 on another: 2, not the mean of means 3."""
    totals = Totals(tokens=4, weight=2)

    def part(values):
        return tokens([0.0] * len(values), [-v for v in values], segment=list(range(len(values))))

    for split in ([[1.0, 1.0, 1.0, 5.0]], [[1.0, 1.0, 1.0], [5.0]], [[1.0, 1.0], [1.0], [5.0]]):
        got = [loss_and_gradient(DAPO(), part(values), totals) for values in split]
        assert sum(loss for loss, _ in got) == pytest.approx(2.0)
        assert [g for _, gradient in got for g in gradient] == pytest.approx([0.25, 0.25, 0.25, 1.25])


def test_segments_weigh_by_their_weight_and_not_by_their_length():
    """A trial of advantage -1 with segments of 4 and 1 tokens, and one of -3 with 1 token."""
    made = tokens([0.0] * 6, [-1.0] * 5 + [-3.0], segment=[0, 0, 0, 0, 1, 2], weight=[0.5, 0.5, 1.0])
    expected = {"sequence": 2.0, "token": 8 / 6, "constant": 8 / (2 * 10)}
    for aggregate, want in expected.items():
        for kind in (GSPO, GRPO):
            config = kind(aggregate=aggregate, constant_length=10)
            assert objective(config, made, Totals(tokens=6, weight=2)).loss.item() == pytest.approx(want)


def test_one_mask_decides_loss_and_counts():
    """A segment cut from training keeps its tokens in the row, but has no loss, ratio or clip of its own."""
    made = tokens([0.1, 0.1, 3.0, 3.0], [1.0, 1.0, -9.0, -9.0], [1, 1, 0, 0], [0, 0, 1, 1])
    alone = tokens([0.1, 0.1], [1.0, 1.0])
    for kind in ALGORITHMS.values():
        totals = Totals(tokens=2, weight=1)
        loss, gradient = loss_and_gradient(kind(), replace(made, logprobs_T=fresh(made)), totals)
        want, want_gradient = loss_and_gradient(kind(), replace(alone, logprobs_T=fresh(alone)), totals)
        assert loss == pytest.approx(want)
        assert gradient == pytest.approx([*want_gradient, 0, 0])
        assert objective(kind(), made, totals).clipped_T[2:].tolist() == [False, False]


def variants():
    """Each algorithm with KL, entropy and, where it takes one, each correction."""
    corrections = [Correction(level="token"), Correction(level="sequence"), Correction(level="geometric", mode="mask")]
    for name, kind in ALGORITHMS.items():
        for correction in [kind().correction, *corrections]:
            made = kind(kl_coef=0.3, entropy_coef=0.2, correction=correction)
            yield pytest.param(made, id=f"{name}-{correction.level}")


def row(seed=0):
    """Three segments of 3, 1 and 4 tokens with all that an objective can see, some of them masked."""
    torch.manual_seed(seed)
    segment_T = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2])
    return Tokens(
        logprobs_T=(torch.randn(8) - 2).requires_grad_(),
        sampled_T=torch.randn(8) * 0.5 - 2,
        mask_T=torch.tensor([1, 0, 1, 1, 1, 1, 0, 1], dtype=torch.bool),
        segment_T=segment_T,
        advantage_T=torch.randn(8),
        weight_S=torch.tensor([0.5, 0.5, 1.0]),
        entropy_T=torch.randn(8).abs().requires_grad_(),
        reference_T=torch.randn(8) - 2,
    )


def rows_of(made, index, segments=None):
    """The tokens at `index`, in that order; `segments` keeps and renumbers those segments."""

    def pick(name):
        value = getattr(made, name)
        if value.requires_grad:
            return value.detach()[index].clone().requires_grad_()
        return value[index]

    picked = {f.name: pick(f.name) for f in fields(Tokens) if f.name.endswith("_T")}
    segments = [0, 1, 2] if segments is None else segments
    renumbered = torch.tensor([segments.index(int(s)) for s in picked["segment_T"]])
    return Tokens(**picked | {"segment_T": renumbered}, weight_S=made.weight_S[segments])


TOTALS = Totals(tokens=6, weight=2)


def outcome(algorithm, *parts):
    """Loss, and gradients of log-probabilities and entropies, of the parts one after the other."""
    loss, gradients = 0.0, []
    for part in parts:
        result = objective(algorithm, part, TOTALS)
        result.loss.backward()
        loss += result.loss.item()
        gradients.append(torch.stack([part.logprobs_T.grad, part.entropy_T.grad]))
    return loss, torch.cat(gradients, 1)


@pytest.mark.parametrize("algorithm", variants())
def test_a_loss_does_not_depend_on_order_packing_or_split(algorithm):
    whole, gradient = outcome(algorithm, row())
    assert gradient[:, row().mask_T].abs().sum() > 0
    for order in ([3, 4, 5, 6, 7, 0, 1, 2], [7, 0, 3, 5, 1, 4, 2, 6]):
        loss, moved = outcome(algorithm, rows_of(row(), order, [2, 0, 1]))
        assert loss == pytest.approx(whole, abs=1e-6)
        assert torch.allclose(moved, gradient[:, order], atol=1e-6)
    first, second = rows_of(row(), [3, 0, 1, 2], [1, 0]), rows_of(row(), [4, 5, 6, 7], [2])
    loss, split = outcome(algorithm, first, second)
    assert loss == pytest.approx(whole, abs=1e-6)
    assert torch.allclose(split, gradient[:, [3, 0, 1, 2, 4, 5, 6, 7]], atol=1e-6)


@pytest.mark.parametrize("algorithm", variants())
def test_a_masked_token_changes_neither_loss_nor_gradient(algorithm):
    want, want_gradient = outcome(algorithm, row())
    for junk in (5.0, -91.0, 1e30, math.inf, math.nan):
        made = row()
        dirty = {
            name: torch.where(made.mask_T, getattr(made, name).detach(), junk)
            for name in ("logprobs_T", "sampled_T", "advantage_T", "entropy_T", "reference_T")
        }
        dirty["logprobs_T"].requires_grad_()
        dirty["entropy_T"].requires_grad_()
        loss, gradient = outcome(algorithm, replace(made, **dirty))
        assert loss == want
        assert torch.equal(gradient, want_gradient)


@pytest.mark.parametrize("algorithm", variants())
def test_a_huge_log_ratio_gives_finite_loss_and_gradient(algorithm):
    for mask, advantage, (trainer, rollout), reference in product(
        (1, 0), (1.0, -1.0), ((-2.0, -91.0), (-91.0, -2.0)), (-2.0, -102.0)
    ):
        made = replace(
            tokens([trainer - rollout], [advantage], [mask], sampled=rollout),
            reference_T=torch.tensor([reference]),
            entropy_T=torch.ones(1),
        )
        loss, gradient = loss_and_gradient(algorithm, made, Totals(tokens=1, weight=1))
        assert math.isfinite(loss)
        assert all(map(math.isfinite, gradient))
        assert mask or (loss, gradient) == (0.0, [0.0])


def test_a_part_without_trainable_tokens_adds_nothing():
    for kind in ALGORITHMS.values():
        made = tokens([0.1], [1.0], [0], weight=[0.0])
        assert loss_and_gradient(kind(), made, Totals(tokens=7, weight=2)) == (0.0, [0.0])


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_a_kl_estimate_and_its_gradient_are_biased_only_as_documented(kind):
    """Means over a policy of four tokens, all enumerated, against the exact divergences."""
    logits = torch.tensor([0.5, -0.2, 0.1, -0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([-0.3, 0.4, 0.2, 0.0], dtype=torch.float64), -1)
    policy = torch.log_softmax(logits, -1)
    estimates = kl_penalty(policy - reference, kind)
    probability = policy.detach().exp()

    def gradient(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    reverse = (policy.exp() * (policy - reference)).sum()
    forward = (reference.exp() * (reference - policy)).sum()
    unbiased = {"k1": True, "k2": False, "k3": True}[kind]
    assert torch.isclose((probability * estimates).sum(), reverse) == unbiased
    target = forward if kind == "k3" else reverse
    assert torch.allclose(gradient((probability * estimates).sum()), gradient(target))
    assert not torch.allclose(gradient(forward), gradient(reverse))


def test_kl_estimates_have_their_values():
    """For d = log(policy / reference) = ln 2: ln 2, (ln 2)^2 / 2 and 1/2 - 1 + ln 2."""
    d = torch.tensor([math.log(2)])
    expected = {"k1": 0.693147, "k2": 0.240227, "k3": 0.193147}
    for kind, value in expected.items():
        assert kl_penalty(d, kind).item() == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_a_kl_estimate_of_a_huge_difference_is_capped_with_a_finite_gradient(kind):
    d = torch.tensor([100.0, -100.0], requires_grad=True)
    value = kl_penalty(d, kind)
    value.sum().backward()
    assert torch.equal(value, kl_penalty(torch.tensor([20.0, -20.0]), kind))
    assert torch.isfinite(d.grad).all()


def test_kl_and_entropy_enter_the_mean_with_their_coefficients():
    """Two tokens, d = ln 2 against the reference: -(1 + 1) / 2 + 0.1 x 0.193147 - 0.01 x (2 + 4) / 2."""
    made = replace(
        tokens([0.0, 0.0], [1.0, 1.0]),
        reference_T=torch.full((2,), -1 - math.log(2)),
        entropy_T=torch.tensor([2.0, 4.0], requires_grad=True),
    )
    config = DAPO(kl_coef=0.1, entropy_coef=0.01)
    result = objective(config, made, Totals(tokens=2, weight=1))
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-1 + 0.0193147 - 0.03, abs=1e-6)
    assert result.kl_T.tolist() == pytest.approx([0.193147] * 2, abs=1e-6)
    assert made.entropy_T.grad.tolist() == pytest.approx([-0.005, -0.005])
    assert made.logprobs_T.grad.tolist() == pytest.approx([(-1 + 0.1 * (1 - 0.5)) / 2] * 2)


def test_what_is_not_measured_is_not_reported_and_what_is_needed_is_asked_for():
    made, totals = tokens([0.0], [1.0]), Totals(tokens=1, weight=1)
    assert objective(GRPO(), made, totals).kl_T is None
    for config, word in ((GRPO(kl_coef=0.1), "reference"), (GRPO(entropy_coef=0.1), "entropies")):
        with pytest.raises(AssertionError, match=word):
            objective(config, made, totals)


def test_a_correction_weighs_the_trainer_s_own_policy_gradient():
    """Ratios 4 and 0.5 against the rollout, truncated at 2: weights 2 and 0.5, ratio 1, so nothing is clipped."""
    made = tokens([math.log(4.0), math.log(0.5)], [1.0, -1.0])
    config = DAPO(correction=Correction(level="token"))
    result = objective(config, made, Totals(tokens=2, weight=1))
    result.loss.backward()
    assert result.weight_T.tolist() == pytest.approx([2.0, 0.5])
    assert result.ratio_T.tolist() == [1.0, 1.0]
    assert not result.clipped_T.any()
    assert result.loss.item() == pytest.approx(-(2 - 0.5) / 2)
    assert made.logprobs_T.grad.tolist() == pytest.approx([-1.0, 0.25])


def test_a_rejected_segment_has_no_loss_and_still_counts_in_the_mean():
    made = tokens([math.log(2.0), math.log(2.0), 0.0], [1.0, 1.0, 1.0], segment=[0, 0, 1])
    config = DAPO(correction=Correction(level="sequence", mode="mask", high=3.0))
    loss, gradient = loss_and_gradient(config, made, Totals(tokens=3, weight=2))
    assert loss == pytest.approx(-1 / 3)
    assert gradient == pytest.approx([0, 0, -1 / 3])
