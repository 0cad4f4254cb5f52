"""One optimizer step of a rank: values, forward, loss and backward of its micro-batches, gates, and then the update."""

import math
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist

from lego.errors import TrainerError
from lego.learn.algorithms import ActorCritic, Algorithm
from lego.learn.gae import gae, value_loss
from lego.learn.heads import CHUNK
from lego.learn.losses import Tokens, Totals, objective
from lego.learn.measure import Step, Sums, measure
from lego.learn.optimizer import AdamW
from lego.learn.packing import PADDING, UNRECORDED, MicroBatch, RankBatch
from lego.learn.titan import Critic, Network, Policy


@dataclass(kw_only=True)
class Clock:
    """Seconds by phase."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time inside to `name`."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True, kw_only=True)
class Actors:
    """A rank's networks and what updates them."""

    policy: Policy
    optimizer: AdamW
    reference: Policy | None = None
    """The policy that KL is measured against; it never learns."""
    critic: Critic | None = None
    critic_optimizer: AdamW | None = None

    def warming(self, algorithm: Algorithm) -> bool:
        """Whether the critic learns alone as yet."""
        if self.critic_optimizer is None or not isinstance(algorithm, ActorCritic):
            return False
        critic = algorithm.critic
        return self.critic_optimizer.position < critic.warmup_steps * critic.updates_per_step


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How to step. In a critic's warm-up the policy does not learn."""

    algorithm: Algorithm
    grad_clip: float
    gates: Mapping[str, float] = field(default_factory=dict)
    warming: bool = False


@dataclass(frozen=True, kw_only=True)
class Row:
    """A micro-batch on the device, axes as in `MicroBatch`. An empty one has one masked row to call the head with."""

    ids_T: torch.Tensor
    positions_T: torch.Tensor
    routing_TLK: torch.Tensor
    rows_R: torch.Tensor
    labels_R: torch.Tensor
    sampled_R: torch.Tensor
    temperature_R: torch.Tensor
    token_R: torch.Tensor
    segment_R: torch.Tensor
    sample_S: torch.Tensor
    length_S: torch.Tensor
    advantage_S: torch.Tensor
    weight_S: torch.Tensor
    reward_S: torch.Tensor
    mask_R: torch.Tensor

    @classmethod
    def of(cls, part: MicroBatch, device: torch.device) -> "Row":
        """A micro-batch moved to the device; whole numbers as int64."""
        arrays = {f.name: torch.from_numpy(getattr(part, f.name)) for f in fields(part)}
        if part.empty:
            arrays |= {name: torch.zeros(1, dtype=a.dtype) for name, a in arrays.items() if name.endswith(("_R", "_S"))}
            arrays |= {"temperature_R": torch.ones(1)}
        moved = {n: a.to(device, torch.float32 if a.is_floating_point() else torch.int64) for n, a in arrays.items()}
        return cls(**moved, mask_R=torch.full_like(moved["labels_R"], not part.empty, dtype=torch.bool))

    def routing(self, network: Network, recorded: bool = True) -> torch.Tensor:
        """The rows that a network replays: what was recorded, or the live router's choice for every token."""
        if recorded and self.routing_TLK.shape[-1]:
            return self.routing_TLK
        replay = network.replay
        live = torch.full((len(self.ids_T), replay.layers, replay.top_k), UNRECORDED, device=self.ids_T.device)
        live[int(self.length_S.sum()) :] = PADDING
        return live


@dataclass(frozen=True, kw_only=True)
class Norms:
    """Gradient norms before clipping."""

    total: float = 0.0
    experts: float = 0.0
    """Of the routed experts alone."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a critic says of a row's tokens: its values, advantages for the policy, returns to learn from."""

    values_R: torch.Tensor
    advantage_R: torch.Tensor
    returns_R: torch.Tensor


def policy_logprobs(policy: Policy, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probabilities, entropies) [R] of what was sampled, at its temperature."""
    return policy.forward(
        row.ids_T,
        row.positions_T,
        row.rows_R,
        labels_R=row.labels_R,
        temperature_R=row.temperature_R,
        chunk=CHUNK,
    )


@torch.no_grad()
def reference_logprobs(reference: Policy, row: Row) -> torch.Tensor:
    """The reference's log-probabilities, with the recorded experts."""
    reference.replay.open(row.positions_T, row.routing(reference))
    logprobs_R, _ = policy_logprobs(reference, row)
    reference.replay.close(row.positions_T)
    return logprobs_R


def critic_values(critic: Critic, row: Row) -> torch.Tensor:
    """The critic's values; it is another network than the one that sampled, so its own router decides."""
    critic.replay.open(row.positions_T, row.routing(critic, recorded=False))
    return critic.forward(row.ids_T, row.positions_T, row.rows_R)


@torch.no_grad()
def estimate(critic: Critic, row: Row, algorithm: ActorCritic) -> Estimate:
    """Advantages and returns of a row's tokens."""
    values_R = critic_values(critic, row)
    critic.replay.close(row.positions_T)
    rewards = row.reward_S.tolist()
    counts = torch.bincount(row.segment_R, minlength=len(rewards)).tolist()

    def advantages(lambdas: Sequence[float]) -> torch.Tensor:
        gamma = algorithm.critic.gamma
        return gae(values_R, row.mask_R, row.segment_R, reward_S=rewards, lambda_S=lambdas, gamma=gamma)

    return Estimate(
        values_R=values_R,
        advantage_R=advantages([algorithm.policy_lambda(n) for n in counts]),
        returns_R=values_R + advantages([algorithm.critic.gae_lambda] * len(rewards)),
    )


def train_row(
    actors: Actors, row: Row, totals: Totals, plan: Plan, given: Estimate | None, sums: Sums, clock: Clock
) -> None:
    """Adds one micro-batch's gradients to the policy (not in a warm-up) and its numbers to `sums`."""
    policy, algorithm = actors.policy, plan.algorithm
    reference_R = None if actors.reference is None else reference_logprobs(actors.reference, row)
    policy.replay.open(row.positions_T, row.routing(policy))
    with torch.set_grad_enabled(not plan.warming):
        with clock.phase("forward"):
            logprobs_R, entropy_R = policy_logprobs(policy, row)
            tokens = Tokens(
                logprobs_T=logprobs_R,
                sampled_T=row.sampled_R,
                mask_T=row.mask_R,
                segment_T=row.segment_R,
                advantage_T=row.advantage_S[row.segment_R] if given is None else given.advantage_R,
                weight_S=row.weight_S,
                entropy_T=entropy_R if algorithm.entropy_coef else entropy_R.detach(),
                reference_T=reference_R,
            )
            result = objective(algorithm)(tokens, totals)
        if not plan.warming:
            with clock.phase("backward"):
                result.loss.backward()
    count = policy.replay.close(row.positions_T)
    measure(sums, tokens, result, count, row.sample_S[row.segment_R], row.token_R)
    if given is not None:
        sums.returns(given.returns_R[row.mask_R], given.values_R[row.mask_R])


def train_critic(
    critic: Critic, rows: Sequence[Row], given: Sequence[Estimate], algorithm: ActorCritic, totals: Totals
) -> float:
    """Adds the critic's gradients of all rows; returns the loss, of all ranks."""
    total = torch.zeros((), device=critic.device)
    for row, known in zip(rows, given, strict=True):
        loss = value_loss(
            critic_values(critic, row),
            known.returns_R,
            row.mask_R,
            tokens=totals.tokens,
            old_T=known.values_R,
            clip=algorithm.critic.clip,
        )
        loss.backward()
        critic.replay.close(row.positions_T)
        total += loss.detach()
    dist.all_reduce(total, group=critic.data_group)
    return float(total)


def check(step: Step, trained: int) -> None:
    """Raises TrainerError if tokens or routing rows went missing on the way."""
    total = step.total
    if total["tokens"] != trained:
        raise TrainerError(f"{total['tokens']:.0f} tokens trained of {trained} in the batch")
    consumed, needed = total["rows_replayed"] + total["rows_live"], total["rows_needed"]
    if consumed != needed:
        raise TrainerError(f"{consumed:.0f} routing rows consumed, but MoE layers x tokens = {needed:.0f}")


def breach(step: Step, gates: Mapping[str, float]) -> str | None:
    """The first gate that these numbers do not hold, in words; None if all hold."""
    k3 = step.total["k3"] / max(1.0, step.total["tokens"])
    if "min_pearson" in gates and not step.pearson >= gates["min_pearson"]:
        return f"Pearson of sampled and trainer probabilities {step.pearson:.6f}, wanted {gates['min_pearson']}"
    if "max_k3" in gates and not k3 <= gates["max_k3"]:
        return f"k3 of sampled and trainer log-probabilities {k3:.3g}, wanted at most {gates['max_k3']}"
    if "min_routing_coverage" in gates and not step.coverage >= gates["min_routing_coverage"]:
        return f"routing coverage {step.coverage:.6f}, wanted {gates['min_routing_coverage']}"
    return None


def _updated(network: Network, optimizer: AdamW, max_norm: float) -> Norms:
    """One step of the optimizer; no rank steps, and TrainerError, if a gradient is not finite."""
    experts = network.expert_gradient_norm()
    norm = network.clip_gradients(max_norm)
    if not math.isfinite(norm):
        optimizer.clear()
        raise TrainerError(f"gradient norm is {norm}: no rank stepped")
    optimizer.step()
    return Norms(total=norm, experts=experts)


def train_step(
    actors: Actors, batch: RankBatch, plan: Plan, *, progress: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """One optimizer step, or none: a breached gate is answered without stepping.

    Raises TrainerError, on all ranks alike, for lost tokens or rows and for a gradient that is not finite.
    """
    policy, critic, algorithm = actors.policy, actors.critic, plan.algorithm
    totals = Totals(tokens=batch.trained, weight=batch.weight)
    rows = [Row.of(part, policy.device) for part in batch.parts]
    sums, clock, spent = Sums(policy.device), Clock(), []
    estimates: list[Estimate] = []
    if critic is not None and isinstance(algorithm, ActorCritic):
        with clock.phase("values"):
            estimates = [estimate(critic, row, algorithm) for row in rows]
        progress()
    for row, given in zip(rows, estimates or [None] * len(rows), strict=True):
        start = time.perf_counter()
        train_row(actors, row, totals, plan, given, sums, clock)
        spent.append(time.perf_counter() - start)
        progress()
    with clock.phase("reduce"):
        sums.add(rss_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
        step = sums.reduce(policy.data_group)
    check(step, batch.trained)
    answer = step.numbers() | {"breach": breach(step, plan.gates), "lr": actors.optimizer.lr, "part_seconds": spent}
    answer |= {"worst": None if step.worst is None else vars(step.worst)}
    if answer["breach"] is not None:
        actors.optimizer.clear()
        return answer | _norms(Norms(), Norms(), 0.0) | {"seconds": clock.seconds}
    norms, critic_norms, loss = Norms(), Norms(), 0.0
    if not plan.warming:
        with clock.phase("optimizer"):
            norms = _updated(policy, actors.optimizer, plan.grad_clip)
    if estimates and critic is not None and isinstance(algorithm, ActorCritic):
        assert actors.critic_optimizer is not None
        with clock.phase("critic"):
            for _ in range(algorithm.critic.updates_per_step):
                loss = train_critic(critic, rows, estimates, algorithm, totals)
                critic_norms = _updated(critic, actors.critic_optimizer, plan.grad_clip)
                progress()
    return answer | _norms(norms, critic_norms, loss) | {"seconds": clock.seconds}


def _norms(policy: Norms, critic: Norms, value_loss: float) -> dict[str, float]:
    return {
        "grad_norm": policy.total,
        "grad_norm_experts": policy.experts,
        "critic_grad_norm": critic.total,
        "value_loss": value_loss,
    }
