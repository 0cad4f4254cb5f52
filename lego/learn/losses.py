"""Objectives as pure functions on [T] tensors; sums are divided by counts of the whole step.

The step's counts come from outside, so a loss is the same however its tokens are split over micro-batches
and ranks: add the parts up.
"""

from dataclasses import dataclass, replace

import torch

from lego.learn.algorithms import CISPO, GSPO, RLOO, SAO, Algorithm, Clipped, Kl
from lego.learn.correction import LOG_RATIO_LIMIT, correction_weights, log_ratio, mean_of_segment, per_segment


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Tokens of whole segments, in any order. What stands where the mask is off changes nothing.

    `logprobs_T` and `entropy_T` carry gradients, the rest does not. `sampled_T` is the rollout's log-probability,
    `reference_T` the frozen model's. `segment_T` counts from 0; `weight_S` belongs to segments (axis S), and the
    weights of one trial's segments sum to 1.
    """

    logprobs_T: torch.Tensor
    sampled_T: torch.Tensor
    mask_T: torch.Tensor
    segment_T: torch.Tensor
    advantage_T: torch.Tensor
    weight_S: torch.Tensor
    entropy_T: torch.Tensor | None = None
    reference_T: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Mask tokens, and weights of segments, over all ranks and micro-batches of one optimizer step."""

    tokens: float
    weight: float


@dataclass(frozen=True, kw_only=True)
class Objective:
    """This part's share of the step's loss; the rest has no gradient and means nothing where the mask is off."""

    loss: torch.Tensor
    ratio_T: torch.Tensor
    """Policy / old policy: the rollout, or with a correction the policy itself."""
    clipped_T: torch.Tensor
    """Whether a bound on the ratio or the correction took the token's gradient (CISPO: made it smaller)."""
    weight_T: torch.Tensor
    """The correction's weight. The ESS of a step is that of ratio x weight."""
    kl_T: torch.Tensor | None
    """The KL estimate; None without a reference."""


Surrogate = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""What the policy gains a token (with gradient), its ratio, and whether a bound acted on that."""


def _clip(ratio_T: torch.Tensor, advantage_T: torch.Tensor, config: Clipped) -> Surrogate:
    low, high = 1 - config.clip_low, 1 + config.clip_high
    gain_T = torch.minimum(ratio_T * advantage_T, ratio_T.clamp(low, high) * advantage_T)
    stopped_T = ((advantage_T > 0) & (ratio_T > high)) | ((advantage_T < 0) & (ratio_T < low))
    return gain_T, ratio_T, stopped_T


def token_clip(tokens: Tokens, log_ratio_T: torch.Tensor, config: Clipped) -> Surrogate:
    """min(r A, clip(r) A) with each token's ratio r (PPO, arXiv 1707.06347)."""
    return _clip(log_ratio_T.exp(), tokens.advantage_T, config)


def sequence_clip(tokens: Tokens, log_ratio_T: torch.Tensor, config: Clipped) -> Surrogate:
    """The same with the segment's ratio exp(mean log-ratio over its mask tokens) (GSPO-token, arXiv 2507.18071).

    Each token's gradient is the ratio times that of its own log-probability; with one advantage a segment, value
    and gradient are GSPO's.
    """
    mean_S = mean_of_segment(log_ratio_T.detach(), tokens.mask_T, tokens.segment_T, len(tokens.weight_S))
    ratio_T = torch.exp(mean_S[tokens.segment_T] + log_ratio_T - log_ratio_T.detach())
    return _clip(ratio_T, tokens.advantage_T, config)


def weighted_reinforce(tokens: Tokens, log_ratio_T: torch.Tensor, config: Clipped) -> Surrogate:
    """clip(r) A log-probability, with no gradient through r (CISPO, arXiv 2506.13585)."""
    ratio_T = log_ratio_T.detach().exp()
    weight_T = ratio_T.clamp(1 - config.clip_low, 1 + config.clip_high)
    return weight_T * tokens.advantage_T * tokens.logprobs_T, ratio_T, weight_T != ratio_T


def reinforce(tokens: Tokens, log_ratio_T: torch.Tensor) -> Surrogate:
    """A log-probability; the ratio is for the metrics only (RLOO, arXiv 2402.14740, SAO, 2607.07508)."""
    return tokens.advantage_T * tokens.logprobs_T, log_ratio_T.exp(), torch.zeros_like(tokens.mask_T)


def surrogate(algorithm: Algorithm, tokens: Tokens, log_ratio_T: torch.Tensor) -> Surrogate:
    """The algorithm's own."""
    match algorithm:
        case GSPO():
            return sequence_clip(tokens, log_ratio_T, algorithm)
        case CISPO():
            return weighted_reinforce(tokens, log_ratio_T, algorithm)
        case Clipped():
            return token_clip(tokens, log_ratio_T, algorithm)
        case RLOO() | SAO():
            return reinforce(tokens, log_ratio_T)
    raise AssertionError(f"no objective for {algorithm}")


def k3(log_ratio_T: torch.Tensor) -> torch.Tensor:
    """exp(d) - 1 - d, bounded, for d = log(p / q) at tokens of q: an estimate of KL(q || p) a token."""
    d = log_ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(d) - d


def kl_penalty(log_ratio_T: torch.Tensor, kind: Kl) -> torch.Tensor:
    """An estimate of KL(policy || reference) a token, for d = log(policy / reference) at tokens of the policy.

    - k1: value d, unbiased; gradient d x that of the log-probability, unbiased (d's own would be 0 on average)
    - k2: value d^2 / 2, biased; gradient as k1's
    - k3: value exp(-d) - 1 + d, unbiased and never below 0; gradient that of KL(reference || policy)

    d is bounded. Source: Schulman, Approximating KL Divergence, 2020.
    """
    d = log_ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    match kind:
        case "k1":
            return d.detach() + d.detach() * (d - d.detach())
        case "k2":
            return d.square() / 2
        case "k3":
            return k3(-d)


def shares(algorithm: Algorithm, tokens: Tokens, totals: Totals) -> torch.Tensor:
    """What each token's loss counts in the step's; 0 off the mask."""
    mask_T = tokens.mask_T.to(tokens.logprobs_T.dtype)
    match algorithm.aggregate:
        case "token":
            return mask_T / totals.tokens
        case "constant":
            return mask_T / (totals.weight * algorithm.constant_length)
        case "sequence":
            count_S = per_segment(mask_T, tokens.segment_T, len(tokens.weight_S)).clamp(min=1)
            return mask_T * (tokens.weight_S / count_S)[tokens.segment_T] / totals.weight


def _masked(tokens: Tokens) -> Tokens:
    """0 wherever the mask is off: 0 x inf is not a number, in values and in gradients."""
    names = ("logprobs_T", "sampled_T", "advantage_T", "entropy_T", "reference_T")
    held = {name: value for name in names if (value := getattr(tokens, name)) is not None}
    return replace(tokens, **{name: torch.where(tokens.mask_T, value, 0.0) for name, value in held.items()})


def objective(algorithm: Algorithm, tokens: Tokens, totals: Totals) -> Objective:
    """The algorithm's loss: mean of correction x (KL and entropy terms less what the policy gains).

    Tokens that clipping or the correction leaves out still count in the mean. A KL term needs `reference_T`, an
    entropy bonus `entropy_T`.
    """
    assert tokens.reference_T is not None or not algorithm.kl_coef, "a KL term without a reference"
    assert tokens.entropy_T is not None or not algorithm.entropy_coef, "an entropy bonus without entropies"
    tokens = _masked(tokens)
    logprobs_T, mask_T, corrected = tokens.logprobs_T, tokens.mask_T, algorithm.correction.level != "none"
    rollout_T = log_ratio(logprobs_T, tokens.sampled_T, mask_T)
    weight_T = correction_weights(algorithm.correction, rollout_T, mask_T, tokens.segment_T, len(tokens.weight_S))
    own_T = log_ratio(logprobs_T, logprobs_T.detach(), mask_T)
    gain_T, ratio_T, clipped_T = surrogate(algorithm, tokens, own_T if corrected else rollout_T)
    loss_T, kl_T = -gain_T, None
    if tokens.reference_T is not None:
        kl_T = kl_penalty(log_ratio(logprobs_T, tokens.reference_T, mask_T), algorithm.kl)
        loss_T = loss_T + algorithm.kl_coef * kl_T
    if tokens.entropy_T is not None:
        loss_T = loss_T - algorithm.entropy_coef * tokens.entropy_T
    return Objective(
        loss=(shares(algorithm, tokens, totals) * weight_T * loss_T).sum(),
        ratio_T=ratio_T.detach(),
        clipped_T=clipped_T | (weight_T == 0),
        weight_T=weight_T,
        kl_T=None if kl_T is None else kl_T.detach(),
    )


def effective_sample_share(weight_sum: float, weight_square_sum: float, count: float) -> float | None:
    """(sum w)^2 / (n sum w^2): 1 if all weights are equal, 1/n if one carries everything; None of nothing."""
    if count == 0 or weight_square_sum == 0:
        return None
    return weight_sum**2 / (count * weight_square_sum)
