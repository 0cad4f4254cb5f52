"""From rewards to weighted samples: one reward a trial, however many segments it has. Pure (docs/credit.md)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from lego.records import CallKind, Sample, Segment, Trajectory

Advantages = Callable[[list[list[float]]], list[list[float]]]
"""Rewards of a step's groups to advantages."""
Spread = Literal["segments", "tokens"]
"""How a trial's weight of 1 spreads over its segments: evenly, or by their trainable tokens."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What an algorithm wants of groups and rewards, and how a trial's weight spreads over its segments."""

    advantages: Advantages
    shaped: Callable[[float, int], float] = lambda reward, length: reward
    """The reward that counts, of a trial's own and the tokens it sampled."""
    least_group: int = 2
    drop_flat_groups: bool = True
    spread: Spread = "segments"
    subagent_share: float | None = None
    """The weight of all sub-agents of a trial together; None for segments like any others, 0 to leave them out."""

    def __post_init__(self) -> None:
        share = self.subagent_share
        if share is not None and not 0 <= share < 1:
            raise ValueError(f"subagent_share: {share}, wanted at least 0 and less than 1, or None")


@dataclass(frozen=True, kw_only=True)
class Credited:
    """The samples of a step, and what its groups have beside them."""

    samples: tuple[Sample, ...]
    empty: int
    """Trials whose every segment has weight 0; their rewards are in the baseline."""
    tokens: int
    """Trainable tokens of the samples: what the trainer's own count must be."""
    unused_tokens: int
    """Trainable tokens in segments of weight 0."""


def credit(groups: Sequence[Sequence[Trajectory]], rules: Rules) -> Credited:
    """Each trial's advantage on its segments, weighted so that the weights of one trial sum to 1.

    `groups` are what `filters.judge` kept of each: trials with a reward; none of a dropped group.
    """
    kept = [members for members in groups if members]
    rewards = [[_reward(t, rules) for t in members] for members in kept]
    trials = [
        _samples(trajectory, reward, advantage, rules)
        for members, own, advantages in zip(kept, rewards, rules.advantages(rewards), strict=True)
        for trajectory, reward, advantage in zip(members, own, advantages, strict=True)
    ]
    samples = tuple(sample for trial in trials for sample in trial)
    tokens = sum(trainable(sample.segment) for sample in samples)
    return Credited(
        samples=samples,
        empty=sum(not trial for trial in trials),
        tokens=tokens,
        unused_tokens=sum(length(t) for members in kept for t in members) - tokens,
    )


def weights(segments: Sequence[Segment], rules: Rules) -> list[float]:
    """A trial's weight of 1, spread over its segments; all 0 if none of them may train.

    With a `subagent_share` the sub-agents get that share together and the main agent, its summaries included, the
    rest; where one side has no trainable token the other takes all, but nothing goes to sub-agents at a share of 0.
    """
    sizes = [float(trainable(s) if rules.spread == "tokens" else bool(trainable(s))) for s in segments]
    share = rules.subagent_share
    if share is None:
        return _scaled(sizes, 1.0)
    theirs = [size if s.kind is CallKind.SUBAGENT else 0.0 for s, size in zip(segments, sizes, strict=True)]
    own = [size - other for size, other in zip(sizes, theirs, strict=True)]
    if share == 0 or not any(theirs):
        return _scaled(own, 1.0)
    if not any(own):
        return _scaled(theirs, 1.0)
    return [a + b for a, b in zip(_scaled(own, 1 - share), _scaled(theirs, share), strict=True)]


def trainable(segment: Segment) -> int:
    """Tokens of a segment that are trained on if it is."""
    return int(segment.mask_T.sum())


def length(trajectory: Trajectory) -> int:
    """Trainable tokens of all segments of a trial."""
    return sum(trainable(segment) for segment in trajectory.segments)


def _scaled(sizes: Sequence[float], total: float) -> list[float]:
    whole = sum(sizes)
    return [total * size / whole if whole else 0.0 for size in sizes]


def _reward(trajectory: Trajectory, rules: Rules) -> float:
    assert trajectory.reward is not None
    return rules.shaped(trajectory.reward, length(trajectory))


def _samples(trajectory: Trajectory, reward: float, advantage: float, rules: Rules) -> list[Sample]:
    """Segments of weight 0 give none: their tokens would still count in a mean over tokens."""
    trial = f"{trajectory.task}/{trajectory.attempt}"
    return [
        Sample(segment=segment, advantage=advantage, weight=weight, reward=reward, trial=trial)
        for segment, weight in zip(trajectory.segments, weights(trajectory.segments, rules), strict=True)
        if weight > 0
    ]
