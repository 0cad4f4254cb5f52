"""Advantages and returns token by token from a critic's values, and the loss that the critic learns by."""

from collections.abc import Sequence

import torch


def gae(
    values_T: torch.Tensor,
    mask_T: torch.Tensor,
    segment_T: torch.Tensor,
    *,
    reward_S: Sequence[float],
    lambda_S: Sequence[float],
    gamma: float,
) -> torch.Tensor:
    """Generalised advantage estimates of the sampled tokens of several segments; 0 where the mask is off.

    `values_T` is the critic's value of the context before each token. Tokens of a segment come in their order.
    What lies between two sampled tokens is skipped: the second's value follows the first. The reward falls on the
    last sampled token, and nothing comes after it. No gradient. Sources: arXiv 1506.02438, 2607.07508.
    """
    values, mask, segment = (x.detach().cpu().tolist() for x in (values_T, mask_T, segment_T))
    advantages = [0.0] * len(values)
    later: list[tuple[float, float] | None] = [None] * len(reward_S)
    for t in reversed(range(len(values))):
        if not mask[t]:
            continue
        s, value = segment[t], values[t]
        if (after := later[s]) is None:
            advantage = reward_S[s] - value
        else:
            advantage = gamma * after[0] - value + gamma * lambda_S[s] * after[1]
        advantages[t] = advantage
        later[s] = (value, advantage)
    return torch.tensor(advantages, dtype=values_T.dtype, device=values_T.device)


def value_loss(
    values_T: torch.Tensor,
    returns_T: torch.Tensor,
    mask_T: torch.Tensor,
    *,
    tokens: float,
    old_T: torch.Tensor | None = None,
    clip: float | None = None,
) -> torch.Tensor:
    """This part's share of the mean of (value - return)^2 / 2 over the step's `tokens` mask tokens.

    With `clip` the greater of that and the same with the value kept within `clip` of `old_T` (values before the
    step), so that nothing is gained by moving further.
    """
    error_T = torch.where(mask_T, values_T - returns_T, 0.0).square()
    if clip is not None and old_T is not None:
        near_T = old_T + (values_T - old_T).clamp(-clip, clip)
        error_T = torch.maximum(error_T, torch.where(mask_T, near_T - returns_T, 0.0).square())
    return error_T.sum() / 2 / tokens
