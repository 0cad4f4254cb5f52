"""The algorithms a recipe can choose, as plain values; `losses.py`, `advantages.py` and `gae.py` have their functions.

Defaults are those of the papers, with one exception: `kl_coef` is 0 everywhere, so that no reference model is held
unless a recipe asks for one (GRPO's paper has 0.04). A KL penalty is always a term of the loss, never of the reward.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lego.learn.advantages import Baseline, Scale, soft_overlong

Aggregate = Literal["token", "sequence", "constant"]
Kl = Literal["k1", "k2", "k3"]
Level = Literal["none", "token", "sequence", "geometric"]
Mode = Literal["truncate", "mask"]

LEAST_ESS = 0.5
"""Sequence weights that keep less of the samples than this are warned of."""


def _within(name: str, value: float, low: float, high: float = math.inf) -> None:
    if not (low <= value <= high and math.isfinite(value)):
        raise ValueError(f"{name}={value}: want a finite number, {low} <= {name} <= {high}")


def _is_a(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{name}={value!r}: want a {kind.__name__}(...)")


def _one_of(name: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name}={value!r}: want one of {', '.join(get_args(choices))}")


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Importance weights trainer / rollout on the loss, for engines that differ and for stale samples.

    With a correction the ratio of the loss is against the trainer's own log-probabilities of this step; without
    one it is against the rollout's. Token and truncate at 2 is TIS (Yao et al. 2025), token and mask IcePop,
    geometric and mask a rejection of whole segments that does not depend on their length.
    """

    level: Level = "none"
    """A weight is a token's own, or its segment's: the product ("sequence") or geometric mean of its tokens'."""
    mode: Mode = "truncate"
    """Weights outside the bounds are moved to them ("truncate"), or the token or segment is left out ("mask")."""
    low: float = 0.0
    """Least weight."""
    high: float = 2.0
    """Greatest weight."""

    def __post_init__(self) -> None:
        _one_of("correction.level", self.level, Level)
        _one_of("correction.mode", self.mode, Mode)
        _within("correction.low", self.low, 0, 1)
        _within("correction.high", self.high, 1)


@dataclass(frozen=True, kw_only=True)
class Critic:
    """The value model of an actor-critic algorithm."""

    lr: float = 5e-6
    """Learning rate of the critic."""
    updates_per_step: int = 1
    """Optimizer steps of the critic for one of the policy."""
    warmup_steps: int = 0
    """First steps in which only the critic learns."""
    frozen_attention: bool = False
    """Leave the critic's attention layers as they were loaded."""
    clip: float | None = 0.2
    """Values that moved further than this from those before the step gain nothing; None for no bound."""
    gamma: float = 1.0
    """Discount a sampled token, of advantages and returns."""
    gae_lambda: float = 1.0
    """GAE's lambda in the returns that the critic learns from; 1 is the reward itself."""

    def __post_init__(self) -> None:
        _within("critic.lr", self.lr, 0)
        _within("critic.updates_per_step", self.updates_per_step, 1)
        _within("critic.warmup_steps", self.warmup_steps, 0)
        _within("critic.clip", 0 if self.clip is None else self.clip, 0)
        _within("critic.gamma", self.gamma, 0, 1)
        _within("critic.gae_lambda", self.gae_lambda, 0, 1)


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """What all algorithms share: from rewards to advantages, and from token losses to a step's loss."""

    baseline: Baseline = "group"
    """Taken off each reward: the mean of its group, of its group without itself, of the whole batch, or nothing."""
    scale: Scale = "none"
    """Advantages are divided by the standard deviation of rewards in the group, or of advantages in the batch."""
    aggregate: Aggregate = "token"
    """A step's loss: mean over tokens, mean over trials of token means, or token sum / (trials x constant_length)."""
    constant_length: int = 3000
    """Tokens that a trial's loss is divided by with aggregate "constant"."""
    drop_flat_groups: bool = True
    """Leave out groups of equal rewards; False keeps them in the averages, with KL and entropy as their only force."""
    kl_coef: float = 0.0
    """Weight of the KL penalty against the reference model, which is held only if this is above 0."""
    kl: Kl = "k3"
    """Estimator of that KL; k3 has low variance, k1 and k2 have the unbiased gradient."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    correction: Correction = Correction()

    def __post_init__(self) -> None:
        _is_a("correction", self.correction, Correction)
        _one_of("baseline", self.baseline, Baseline)
        _one_of("scale", self.scale, Scale)
        _one_of("aggregate", self.aggregate, Aggregate)
        _one_of("kl", self.kl, Kl)
        _within("constant_length", self.constant_length, 1)
        _within("kl_coef", self.kl_coef, 0)
        _within("entropy_coef", self.entropy_coef, 0)

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen copy of the first policy must be held."""
        return self.kl_coef > 0

    @property
    def least_group(self) -> int:
        """Trials of one task without which there is no advantage."""
        return 2 if self.baseline in ("group", "leave_one_out") or self.scale == "group" else 1

    def shaped(self, reward: float, length: int) -> float:
        """The reward that advantages are made of, of a trial that sampled `length` tokens."""
        return reward


@dataclass(frozen=True, kw_only=True)
class Clipped(Algorithm):
    """Algorithms that bound the ratio policy / old policy on both sides."""

    clip_low: float = 0.2
    """The ratio is clipped below 1 - clip_low; 1 for no lower bound."""
    clip_high: float = 0.2
    """The ratio is clipped above 1 + clip_high."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _within("clip_low", self.clip_low, 0, 1)
        _within("clip_high", self.clip_high, 0)


@dataclass(frozen=True, kw_only=True)
class GRPO(Clipped):
    """Group baseline and spread, token ratios, mean of each trial's token means (arXiv 2402.03300)."""

    scale: Scale = "group"
    aggregate: Aggregate = "sequence"


@dataclass(frozen=True, kw_only=True)
class DrGRPO(Clipped):
    """GRPO without its two biases: no scaling by the spread, no division by a trial's own length (arXiv 2503.20783)."""

    aggregate: Aggregate = "constant"


@dataclass(frozen=True, kw_only=True)
class DAPO(Clipped):
    """GRPO with a higher upper clip, token mean, no flat groups, a penalty on overlong trials (arXiv 2503.14476)."""

    scale: Scale = "group"
    clip_high: float = 0.28
    max_length: int = 20480
    """Sampled tokens of a trial from which on the whole penalty is taken off its reward."""
    overlong_buffer: int = 4096
    """The penalty grows over this many tokens before max_length."""
    overlong_penalty: float = 1.0
    """The whole penalty; 0 for none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _within("max_length", self.max_length, 1)
        _within("overlong_buffer", self.overlong_buffer, 1, self.max_length)
        _within("overlong_penalty", self.overlong_penalty, 0)

    def shaped(self, reward: float, length: int) -> float:
        return reward + self.overlong_penalty * soft_overlong(length, self.max_length, self.overlong_buffer)


@dataclass(frozen=True, kw_only=True)
class RLOO(Algorithm):
    """REINFORCE with the mean of a trial's siblings as baseline (arXiv 2402.14740).

    The paper sums over a trial's tokens; the token mean has that sum's direction.
    """

    baseline: Baseline = "leave_one_out"


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus(Clipped):
    """Group baseline, spread of the whole batch (arXiv 2501.03262, with baseline; without: baseline="batch")."""

    scale: Scale = "batch"
    drop_flat_groups: bool = False
    kl: Kl = "k2"


@dataclass(frozen=True, kw_only=True)
class GSPO(Clipped):
    """One ratio a segment: exp of the mean log-ratio over its sampled tokens (arXiv 2507.18071)."""

    scale: Scale = "group"
    aggregate: Aggregate = "sequence"
    clip_low: float = 3e-4
    clip_high: float = 4e-4


@dataclass(frozen=True, kw_only=True)
class CISPO(Clipped):
    """REINFORCE weighted by the clipped ratio, so that no token loses its gradient (arXiv 2506.13585).

    The paper bounds the ratio from above only and leaves the bound open; 5 is ScaleRL's (arXiv 2510.13786).
    """

    scale: Scale = "group"
    clip_low: float = 1.0
    clip_high: float = 4.0


@dataclass(frozen=True, kw_only=True)
class ActorCritic(Algorithm, ABC):
    """Algorithms whose advantages come from a critic, token by token."""

    baseline: Baseline = "none"
    drop_flat_groups: bool = False
    critic: Critic = Critic()

    def __post_init__(self) -> None:
        super().__post_init__()
        _is_a("critic", self.critic, Critic)
        for name in ("baseline", "scale"):
            if getattr(self, name) != "none":
                raise ValueError(f"{name}={getattr(self, name)!r}: want 'none', advantages come from the critic")

    @abstractmethod
    def policy_lambda(self, length: int) -> float:
        """GAE's lambda in the policy's advantages, of a segment with `length` sampled tokens."""


@dataclass(frozen=True, kw_only=True)
class PPO(ActorCritic, Clipped):
    """Token ratios, clipped, with advantages from a critic by GAE (arXiv 1707.06347, 1506.02438)."""

    gae_lambda: float = 0.95
    """GAE's lambda in the policy's advantages."""
    critic: Critic = Critic(gae_lambda=0.95)

    def __post_init__(self) -> None:
        super().__post_init__()
        _within("gae_lambda", self.gae_lambda, 0, 1)

    def policy_lambda(self, length: int) -> float:
        return self.gae_lambda


@dataclass(frozen=True, kw_only=True)
class SAO(ActorCritic):
    """REINFORCE for one trial a task, with a critic; tokens whose ratio to the rollout leaves a band are left out.

    The band is the correction, and there is no other bound (arXiv 2607.07508).
    """

    correction: Correction = Correction(level="token", mode="mask", low=0.2, high=4.0)
    length_alpha: float = 0.05
    """The policy's lambda in a segment of n sampled tokens is 1 - 1 / (length_alpha n) (VAPO, arXiv 2504.05118)."""
    critic: Critic = Critic(updates_per_step=2, warmup_steps=10, frozen_attention=True, clip=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.length_alpha < math.inf:
            raise ValueError(f"length_alpha={self.length_alpha}: want more than 0 and finite")

    def policy_lambda(self, length: int) -> float:
        return max(0.0, 1 - 1 / (self.length_alpha * max(1, length)))


ALGORITHMS: dict[str, type[Algorithm]] = {
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "dapo": DAPO,
    "rloo": RLOO,
    "reinforce++": ReinforcePlusPlus,
    "gspo": GSPO,
    "cispo": CISPO,
    "ppo": PPO,
    "sao": SAO,
}


def name_of(algorithm: Algorithm) -> str:
    """The name in `ALGORITHMS`."""
    return next(name for name, kind in ALGORITHMS.items() if kind is type(algorithm))


def from_fields(name: str, fields: Mapping[str, Any]) -> Algorithm:
    """The algorithm that `asdict` turned into these fields."""
    records = {"correction": Correction, "critic": Critic}
    return ALGORITHMS[name](**{k: records[k](**v) if k in records else v for k, v in fields.items()})


def expected_ess(length: float, k3: float) -> float:
    """The share of samples that weights over whole segments of `length` tokens keep, for log-normal ratios.

    A token's log-ratio has variance 2 k3, a segment's 2 k3 x length, and the effective share is exp of minus that:
    0.06 at 2800 tokens and k3 5e-4.
    """
    return math.exp(-2 * k3 * length)


def warnings(algorithm: Algorithm, *, mean_length: float, k3: float) -> list[str]:
    """What will likely go wrong with segments of `mean_length` sampled tokens at this k3, in sentences."""
    ess = expected_ess(mean_length, k3)
    if algorithm.correction.level != "sequence" or ess >= LEAST_ESS:
        return []
    return [
        f"correction.level='sequence' over {mean_length:.0f} tokens at k3 {k3:.1g} keeps an effective sample share of "
        f"about {ess:.2g}: a few trials carry the step; 'token' or 'geometric' do not depend on the length"
    ]
