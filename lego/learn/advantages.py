"""Rewards of a group to advantages: plain numbers, no tensors."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Literal


def group_advantages(
    rewards_G: Sequence[float], *, scale: Literal["none", "std"] = "none", negative: float = 1.0
) -> list[float]:
    """Each reward less the mean of its group, divided by the sample standard deviation if `scale` is "std".

    A group whose rewards are all equal, and a group of one, gives zeros, whatever the scale.
    Advantages below zero are multiplied by `negative`. Raises ValueError on a non-finite reward.
    """
    if not all(math.isfinite(r) for r in rewards_G):
        raise ValueError(f"rewards {list(rewards_G)}: want finite numbers")
    if scale not in ("none", "std"):
        raise ValueError(f"scale={scale!r}: want 'none' or 'std'")
    if negative < 0:
        raise ValueError(f"negative={negative}: want >= 0")
    if len(set(rewards_G)) < 2:
        return [0.0] * len(rewards_G)
    mean = fmean(rewards_G)
    centred = [r - mean for r in rewards_G]
    spread = math.sqrt(sum(c * c for c in centred) / (len(centred) - 1)) if scale == "std" else 1.0
    return [c / spread * (negative if c < 0 else 1.0) for c in centred]
