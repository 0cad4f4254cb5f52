"""Objectives as pure functions on [T] tensors; sums are divided by counts of the whole step.

The step's counts come from outside, so a loss is the same however its tokens are split over micro-batches
and ranks: add the parts up.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lego.learn.algorithms import GRPO, GSPO, Algorithm

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are kept within this bound before exp, so that neither a value nor a gradient overflows."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Tokens of whole segments. `segment_T` counts from 0; advantage and weight belong to segments (axis S)."""

    logprobs_T: torch.Tensor
    sampled_T: torch.Tensor
    mask_T: torch.Tensor
    segment_T: torch.Tensor
    advantage_S: torch.Tensor
    weight_S: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Counts over all ranks and micro-batches of one optimizer step."""

    tokens: float
    weight: float


@dataclass(frozen=True, kw_only=True)
class Objective:
    """This part's share of the loss, and each token's ratio and whether clipping stopped its gradient."""

    loss: torch.Tensor
    ratio_T: torch.Tensor
    clipped_T: torch.Tensor


def log_ratio(logprobs_T: torch.Tensor, sampled_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """log(trainer / sampled) of each token, bounded; 0 where the mask is off, whatever stands there."""
    difference = torch.where(mask_T, logprobs_T, 0.0) - torch.where(mask_T, sampled_T, 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def per_segment(values_T: torch.Tensor, segment_T: torch.Tensor, segments: int) -> torch.Tensor:
    """Sums of `values_T` by segment."""
    return torch.zeros(segments, dtype=values_T.dtype, device=values_T.device).index_add(0, segment_T, values_T)


def _clip(ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    stopped = ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low))
    return surrogate, stopped


def gspo(tokens: Tokens, totals: Totals, config: GSPO) -> Objective:
    """Sequence ratio exp(mean log-ratio over mask tokens), clipped; mean over segments or tokens of the step."""
    segments = len(tokens.advantage_S)
    ratios = log_ratio(tokens.logprobs_T, tokens.sampled_T, tokens.mask_T)
    count_S = per_segment(tokens.mask_T.to(ratios.dtype), tokens.segment_T, segments)
    ratio_S = torch.exp(per_segment(ratios, tokens.segment_T, segments) / count_S.clamp(min=1))
    surrogate_S, stopped_S = _clip(ratio_S, tokens.advantage_S, config.clip_low, config.clip_high)
    share_S = tokens.weight_S * (count_S > 0) / totals.weight
    if config.normalise == "token":
        share_S = count_S / totals.tokens
    return Objective(
        loss=-(share_S * surrogate_S).sum(),
        ratio_T=ratio_S.detach()[tokens.segment_T],
        clipped_T=stopped_S[tokens.segment_T] & tokens.mask_T,
    )


def grpo(tokens: Tokens, totals: Totals, config: GRPO) -> Objective:
    """Token ratio, clipped; mean over the step's tokens, or over segments of their token means."""
    segments = len(tokens.advantage_S)
    ratio_T = torch.exp(log_ratio(tokens.logprobs_T, tokens.sampled_T, tokens.mask_T))
    surrogate_T, stopped_T = _clip(ratio_T, tokens.advantage_S[tokens.segment_T], config.clip_low, config.clip_high)
    mask_T = tokens.mask_T.to(ratio_T.dtype)
    share_T = mask_T / totals.tokens
    if config.normalise == "sequence":
        count_S = per_segment(mask_T, tokens.segment_T, segments).clamp(min=1)
        share_T = mask_T * (tokens.weight_S / count_S)[tokens.segment_T] / totals.weight
    return Objective(loss=-(share_T * surrogate_T).sum(), ratio_T=ratio_T.detach(), clipped_T=stopped_T & tokens.mask_T)


def objective(algorithm: Algorithm) -> Callable[[Tokens, Totals], Objective]:
    """The function of an algorithm's config."""
    match algorithm:
        case GSPO():
            return lambda tokens, totals: gspo(tokens, totals, algorithm)
        case GRPO():
            return lambda tokens, totals: grpo(tokens, totals, algorithm)


def k3(log_ratio_T: torch.Tensor) -> torch.Tensor:
    """exp(d) - 1 - d for d = log(trainer / sampled), bounded: an estimate of KL(sampled || trainer) a token."""
    d = log_ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(d) - d


def effective_sample_share(ratio_sum: float, ratio_square_sum: float, count: float) -> float | None:
    """(sum w)^2 / (n sum w^2): 1 if all ratios are equal, 1/n if one carries everything; None of nothing."""
    if count == 0 or ratio_square_sum == 0:
        return None
    return ratio_sum**2 / (count * ratio_square_sum)
