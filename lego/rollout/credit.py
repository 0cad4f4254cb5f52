"""From rewards to weighted samples: one reward a trial, however many segments it has. Pure."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lego.records import Sample, Trajectory

Advantages = Callable[[list[list[float]]], list[list[float]]]
"""Rewards of a step's groups to advantages."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What an algorithm wants of groups and rewards."""

    advantages: Advantages
    shaped: Callable[[float, int], float] = lambda reward, length: reward
    """The reward that counts, of a trial's own and the tokens it sampled."""
    least_group: int = 2
    drop_flat_groups: bool = True


@dataclass(frozen=True, kw_only=True)
class Credited:
    """The samples of a step, and what was left out: `flat` groups hold equal rewards, `small` ones too few."""

    samples: tuple[Sample, ...]
    groups: int
    flat: int
    small: int


def groups_of(trajectories: Sequence[Trajectory]) -> dict[str, list[Trajectory]]:
    """Scored trajectories by task; those without a reward leave baseline and mean."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        members = groups.setdefault(trajectory.task, [])
        if trajectory.reward is not None:
            members.append(trajectory)
    return groups


def credit(trajectories: Sequence[Trajectory], rules: Rules) -> Credited:
    """Each trial's advantage on its segments, weighted so that the weights of one trial sum to 1."""
    groups = list(groups_of(trajectories).values())
    enough = [members for members in groups if len(members) >= rules.least_group]
    kept = [members for members in enough if not (rules.drop_flat_groups and _flat(members))]
    rewards = [[_reward(t, rules) for t in members] for members in kept]
    samples = [
        sample
        for members, own, advantages in zip(kept, rewards, rules.advantages(rewards), strict=True)
        for trajectory, reward, advantage in zip(members, own, advantages, strict=True)
        for sample in _samples(trajectory, reward, advantage)
    ]
    flat = sum(_flat(members) for members in enough)
    return Credited(samples=tuple(samples), groups=len(groups), flat=flat, small=len(groups) - len(enough))


def _flat(members: Sequence[Trajectory]) -> bool:
    """Whether the verdicts tell the group's trials apart in nothing; one trial alone is not flat."""
    rewards = [t.reward for t in members if t.reward is not None]
    return len(members) > 1 and math.isclose(min(rewards), max(rewards))


def _reward(trajectory: Trajectory, rules: Rules) -> float:
    assert trajectory.reward is not None
    return rules.shaped(trajectory.reward, sum(int(s.mask_T.sum()) for s in trajectory.segments))


def _samples(trajectory: Trajectory, reward: float, advantage: float) -> list[Sample]:
    trainable = [segment for segment in trajectory.segments if segment.mask_T.any()]
    trial = f"{trajectory.task}/{trajectory.attempt}"
    return [
        Sample(segment=s, advantage=advantage, weight=1 / len(trainable), reward=reward, trial=trial) for s in trainable
    ]
