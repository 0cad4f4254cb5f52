"""Importance weights of tokens and segments, from log-ratios trainer / rollout; all exponents are bounded."""

import torch

from lego.learn.algorithms import Correction

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are kept within this bound before exp, so that neither a value nor a gradient overflows."""


def log_ratio(logprobs_T: torch.Tensor, other_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """log(policy / other) of each token, bounded; 0 where the mask is off, whatever stands there."""
    difference = torch.where(mask_T, logprobs_T, 0.0) - torch.where(mask_T, other_T, 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def per_segment(values_T: torch.Tensor, segment_T: torch.Tensor, segments: int) -> torch.Tensor:
    """Sums of `values_T` by segment, in axis S."""
    return torch.zeros(segments, dtype=values_T.dtype, device=values_T.device).index_add(0, segment_T, values_T)


def mean_of_segment(
    values_T: torch.Tensor, mask_T: torch.Tensor, segment_T: torch.Tensor, segments: int
) -> torch.Tensor:
    """Means over the mask tokens of each segment, in axis S; 0 of a segment without any."""
    count_S = per_segment(mask_T.to(values_T.dtype), segment_T, segments)
    return per_segment(torch.where(mask_T, values_T, 0.0), segment_T, segments) / count_S.clamp(min=1)


def correction_weights(
    correction: Correction, log_ratio_T: torch.Tensor, mask_T: torch.Tensor, segment_T: torch.Tensor, segments: int
) -> torch.Tensor:
    """Each token's weight, without gradient, from log(trainer now / rollout); 1 at level "none"."""
    log_ratio_T = log_ratio_T.detach()
    match correction.level:
        case "none":
            return torch.ones_like(log_ratio_T)
        case "token":
            log_weight_T = log_ratio_T
        case "sequence":
            log_weight_T = per_segment(torch.where(mask_T, log_ratio_T, 0.0), segment_T, segments)[segment_T]
        case "geometric":
            log_weight_T = mean_of_segment(log_ratio_T, mask_T, segment_T, segments)[segment_T]
    weight_T = log_weight_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if correction.mode == "truncate":
        return weight_T.clamp(correction.low, correction.high)
    return weight_T * ((weight_T >= correction.low) & (weight_T <= correction.high))
