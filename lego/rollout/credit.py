"""From rewards to weighted samples: one reward a trial, however many segments it has. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lego.records import Sample, Trajectory

Advantages = Callable[[list[float]], list[float]]


@dataclass(frozen=True, kw_only=True)
class Credited:
    """The samples of a step, and what was left out: `flat` groups hold equal rewards, `small` ones one reward."""

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


def credit(trajectories: Sequence[Trajectory], advantages: Advantages) -> Credited:
    """Each trial's advantage on its segments, weighted so that the weights of one trial sum to 1."""
    samples: list[Sample] = []
    flat = small = 0
    groups = groups_of(trajectories)
    for members in groups.values():
        rewards = [t.reward for t in members if t.reward is not None]
        if len(rewards) < 2:
            small += 1
        elif min(rewards) == max(rewards):
            flat += 1
        else:
            for trajectory, advantage in zip(members, advantages(rewards), strict=True):
                samples += _samples(trajectory, advantage)
    return Credited(samples=tuple(samples), groups=len(groups), flat=flat, small=small)


def _samples(trajectory: Trajectory, advantage: float) -> list[Sample]:
    trainable = [segment for segment in trajectory.segments if segment.mask_T.any()]
    return [Sample(segment=s, advantage=advantage, weight=1 / len(trainable)) for s in trainable]
