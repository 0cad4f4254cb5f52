"""Rewards to advantages: plain numbers, no tensors. One reward a trial, however many segments it has."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Literal

Baseline = Literal["group", "leave_one_out", "batch", "none"]
Scale = Literal["none", "group", "batch"]

ROUNDING = 1e-9


def advantages(
    rewards_GN: Sequence[Sequence[float]],
    *,
    baseline: Baseline = "group",
    scale: Scale = "none",
    negative: float = 1.0,
) -> list[list[float]]:
    """Each trial's advantage, from the rewards of a step's groups: reward less baseline, divided by a spread.

    The spread is the sample standard deviation of the group's rewards, or of all (reward - baseline) of the batch.
    Where it would be taken of equal numbers or of one, and for a trial that has no siblings to be compared with,
    the advantage is 0. Advantages below 0 are multiplied by `negative`. Raises ValueError on a non-finite reward.

    Sources: GRPO ("group", "group"), Dr.GRPO ("group", "none"), RLOO ("leave_one_out", "none"), REINFORCE++
    ("batch", "batch") and, with baseline, ("group", "batch").
    """
    if not all(math.isfinite(r) for rewards_N in rewards_GN for r in rewards_N):
        raise ValueError(f"rewards {[list(rewards_N) for rewards_N in rewards_GN]}: want finite numbers")
    if not 0 <= negative < math.inf:
        raise ValueError(f"negative={negative}: want 0 or more and finite")
    batch = [r for rewards_N in rewards_GN for r in rewards_N]
    centred_GN = [_centred(rewards_N, batch, baseline) for rewards_N in rewards_GN]
    if scale == "group":
        centred_GN = [_divided(c, _spread(r)) for c, r in zip(centred_GN, rewards_GN, strict=True)]
    elif scale == "batch":
        spread = _spread([c for centred_N in centred_GN for c in centred_N])
        centred_GN = [_divided(centred_N, spread) for centred_N in centred_GN]
    return [[c * negative if c < 0 else c for c in centred_N] for centred_N in centred_GN]


def flat(values: Sequence[float]) -> bool:
    """Whether values are equal but for rounding, which a spread would blow up; true of fewer than two."""
    return len(values) < 2 or max(values) - min(values) <= ROUNDING * max(map(abs, values))


def _centred(rewards_N: Sequence[float], batch: Sequence[float], baseline: Baseline) -> list[float]:
    if baseline == "none":
        return list(rewards_N)
    peers = batch if baseline == "batch" else rewards_N
    if flat(peers):
        return [0.0] * len(rewards_N)
    factor = len(peers) / (len(peers) - 1) if baseline == "leave_one_out" else 1.0
    mean = fmean(peers)
    return [factor * (r - mean) for r in rewards_N]


def _spread(values: Sequence[float]) -> float:
    """Sample standard deviation; 0 of flat values."""
    if flat(values):
        return 0.0
    mean = fmean(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))


def _divided(values: Sequence[float], spread: float) -> list[float]:
    return [v / spread if spread else 0.0 for v in values]


def soft_overlong(length: int, max_length: int, buffer: int) -> float:
    """0 up to `max_length - buffer` tokens, from there down to -1 at `max_length` and beyond (DAPO, equation 13)."""
    return -min(1.0, max(0.0, (length - (max_length - buffer)) / buffer))
