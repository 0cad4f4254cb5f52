"""The learning rate over the steps of a run, as a share of the one given; imports no torch."""

import math
from dataclasses import dataclass
from typing import Literal

Decay = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Linear warm-up, then constant or a decay to `min_share` at the last of `steps`."""

    warmup_steps: int = 0
    decay: Decay = "constant"
    min_share: float = 0.0
    steps: int | None = None
    """Steps of the whole run, warm-up included; a decay needs them."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ValueError(f"lr_warmup_steps: {self.warmup_steps}, wanted 0 or more")
        if not 0 <= self.min_share <= 1:
            raise ValueError(f"lr_min_share: {self.min_share}, wanted 0 to 1")
        if self.decay != "constant" and (self.steps is None or self.steps <= self.warmup_steps):
            raise ValueError(f"steps: {self.steps}, wanted more than lr_warmup_steps {self.warmup_steps}")

    def share(self, position: int) -> float:
        """Share of the learning rate for the step that follows `position` steps.

        Warm-up of n steps takes shares 1/n to 1; the last step of a decay takes `min_share`, and so do later ones.
        """
        if position < self.warmup_steps:
            return (position + 1) / self.warmup_steps
        if self.decay == "constant" or self.steps is None:
            return 1.0
        # The warm-up's last step is already at 1, so that the decay begins one later.
        way = min(1.0, (position + 1 - self.warmup_steps) / (self.steps - self.warmup_steps))
        left = 1 - way if self.decay == "linear" else (1 + math.cos(math.pi * way)) / 2
        return self.min_share + (1 - self.min_share) * left
