"""What one optimizer step found, for people, curves and the run's account."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lego.records import Histogram

LOG_RATIO_EDGES = (-1.0, -0.3, -0.1, -1e-2, -1e-3, -1e-4, 1e-4, 1e-3, 1e-2, 0.1, 0.3, 1.0)
"""Bounds of the histogram of log(trainer / sampled); its first and last bin are open."""
NOT_CURVES = ("seconds", "part_seconds", "worst", "breach", "log_ratio_counts")


@dataclass(frozen=True, kw_only=True)
class Worst:
    """The trained token on which trainer and sampler differ most."""

    sample: int
    """Its sample's place in the batch."""
    token: int
    """Its place in its segment."""
    sampled: float
    trainer: float
    trial: str = ""

    @property
    def difference(self) -> float:
        """How far the two log-probabilities are apart."""
        return abs(self.trainer - self.sampled)

    def __str__(self) -> str:
        return (
            f"trial {self.trial or '?'}, token {self.token} of its segment: "
            f"log-probability {self.sampled:.4f} sampled, {self.trainer:.4f} in the trainer"
        )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the ranks found in one optimizer step; sums are over all of them."""

    loss: float
    tokens: int
    """Trained (sampled) tokens."""
    pearson: float
    """Correlation of sampled and trainer probabilities on trained tokens."""
    max_logprob_difference: float
    mean_logprob_difference: float
    max_probability_difference: float
    k1: float
    """Mean of log(sampled / trainer), the plain estimate of KL(sampler || trainer)."""
    k3: float
    ratio_mean: float
    log_ratio_counts: tuple[int, ...]
    """Trained tokens by log(trainer / sampled), between `LOG_RATIO_EDGES`."""
    clip_fraction: float
    entropy: float
    ess: float
    """Effective share of the tokens under their importance weights, 0 to 1."""
    kl: float
    """Mean KL to the reference; 0 without one."""
    value_explained: float
    """Share of the returns' variance that the critic explains; 0 without a critic."""
    rows_needed: int
    """MoE layers x fed tokens."""
    rows_replayed: int
    rows_live: int
    routing_agreement: float
    """Share of the replayed expert choices that the trainer's own router would have made; 1 in a dense model."""
    peak_rss_gib: float
    worst: Worst | None
    breach: str | None = None
    """The gate that did not hold, in words; then nothing was stepped."""
    lr: float = 0.0
    grad_norm: float = 0.0
    """Before clipping; 0 if the policy was not stepped."""
    grad_norm_experts: float = 0.0
    """Of the routed experts alone."""
    value_loss: float = 0.0
    """Of the critic's last update; 0 without a critic."""
    critic_grad_norm: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By phase."""
    part_seconds: tuple[float, ...] = ()
    """Of each micro-batch of rank 0."""

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> "Measured":
        """What `asdict` and JSON made of one."""
        found = cls(**values)
        return replace(
            found,
            worst=Worst(**values["worst"]) if found.worst else None,
            log_ratio_counts=tuple(found.log_ratio_counts),
            part_seconds=tuple(found.part_seconds),
        )

    @property
    def routing_coverage(self) -> float:
        """Share of the needed routing rows that were replayed; 1 where none is needed."""
        return self.rows_replayed / self.rows_needed if self.rows_needed else 1.0


@dataclass(frozen=True, kw_only=True)
class StepReport(Measured):
    """What one optimizer step found, and how its samples were packed."""

    fed: int
    """Tokens that passed the network."""
    segments: int
    micro_batches: int
    """Of each rank."""
    dropped: int
    """Samples left out, longer than the token budget."""
    split_tokens: int
    """Trained tokens whose context was cut to the token budget."""

    def histograms(self) -> dict[str, Histogram]:
        """Its distributions by metric name."""
        return {"train/log_ratio": Histogram(edges=LOG_RATIO_EDGES, counts=self.log_ratio_counts)}

    def metrics(self) -> dict[str, float]:
        """Its numbers by metric name."""
        numbers = {f"train/{k}": float(v) for k, v in asdict(self).items() if k not in NOT_CURVES}
        phases = {f"seconds/train_{k}": v for k, v in self.seconds.items()}
        return numbers | phases | {"train/routing_coverage": self.routing_coverage}
