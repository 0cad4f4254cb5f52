"""One optimizer step of a rank: values, forward, loss and backward of its micro-batches, gates, and then the update."""

import math
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from lego.errors import TrainerError
from lego.learn.algorithms import ActorCritic, Algorithm
from lego.learn.gae import gae, value_loss
from lego.learn.losses import Tokens, Totals, objective
from lego.learn.measure import Sums, fidelity, measure
from lego.learn.optimizer import AdamW
from lego.learn.packing import RankBatch
from lego.learn.report import Measured
from lego.learn.row import Row
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
class Estimate:
    """What a critic says of a row's tokens: its values, advantages for the policy, returns to learn from."""

    values_R: torch.Tensor
    advantage_R: torch.Tensor
    returns_R: torch.Tensor


def policy_logprobs(policy: Policy, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probabilities, entropies) [R] of what was sampled, at its temperature."""
    return policy.forward(
        row.ids_T, row.positions_T, row.rows_R, labels_R=row.labels_R, temperature_R=row.temperature_R
    )


@torch.no_grad()
def reference_logprobs(reference: Policy, row: Row) -> torch.Tensor:
    """The reference's log-probabilities, with the recorded experts."""
    reference.replay.open(row.positions_T, row.routing(reference.replay))
    logprobs_R, _ = policy_logprobs(reference, row)
    reference.replay.close(row.positions_T)
    return logprobs_R


def critic_values(critic: Critic, row: Row) -> torch.Tensor:
    """The critic's values; it is another network than the one that sampled, so its own router decides."""
    critic.replay.open(row.positions_T, row.routing(critic.replay, recorded=False))
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


def check_rounds(rounds: int, group: dist.ProcessGroup) -> None:
    """Raises TrainerError, on all ranks of a group, if they would wait for each other in other micro-batches."""
    counts = [0] * dist.get_world_size(group)
    dist.all_gather_object(counts, rounds, group=group)
    if len(set(counts)) > 1:
        each = ", ".join(f"rank {dist.get_global_rank(group, i)} has {n}" for i, n in enumerate(counts))
        raise TrainerError(f"micro-batches differ: {each}")


def check(found: Measured, trained: int) -> None:
    """Raises TrainerError if tokens or routing rows went missing on the way."""
    if found.tokens != trained:
        raise TrainerError(f"{found.tokens} tokens trained of {trained} in the batch")
    consumed = found.rows_replayed + found.rows_live
    if consumed != found.rows_needed:
        raise TrainerError(f"{consumed} routing rows consumed, but MoE layers x tokens = {found.rows_needed}")


def breach(found: Measured, gates: Mapping[str, float]) -> str | None:
    """The first gate that these numbers do not hold, in words; None if all hold. A loss is to be a number always."""
    if math.isnan(found.loss):
        return "the loss is nan"
    if "min_pearson" in gates and not found.pearson >= gates["min_pearson"]:
        return f"Pearson of sampled and trainer probabilities {found.pearson:.6f}, wanted {gates['min_pearson']}"
    if "max_k3" in gates and not found.k3 <= gates["max_k3"]:
        return f"k3 of sampled and trainer log-probabilities {found.k3:.3g}, wanted at most {gates['max_k3']}"
    if "min_routing_coverage" in gates and not found.routing_coverage >= gates["min_routing_coverage"]:
        return f"routing coverage {found.routing_coverage:.6f}, wanted {gates['min_routing_coverage']}"
    return None


def _update(network: Network, optimizer: AdamW, max_norm: float) -> float:
    """One step of the optimizer, and the gradient's norm; TrainerError, and no rank steps, if that is not finite."""
    norm = network.clip_gradients(max_norm)
    if not math.isfinite(norm):
        optimizer.clear()
        raise TrainerError(f"the {type(network).__name__.lower()}'s gradient norm is {norm}: no rank stepped it")
    optimizer.step()
    return norm


class _Step:
    """One optimizer step under way: its rows, and what was summed and timed so far."""

    def __init__(self, actors: Actors, batch: RankBatch, plan: Plan, progress: Callable[[], None]) -> None:
        self.actors, self.plan, self.progress = actors, plan, progress
        self.rows = [Row.of(part, actors.policy.device) for part in batch.parts]
        self.totals = Totals(tokens=batch.trained, weight=batch.weight)
        self.sums, self.clock = Sums(actors.policy.device), Clock()

    def estimates(self) -> list[Estimate]:
        """What the critic says of each row; empty without one."""
        critic, algorithm = self.actors.critic, self.plan.algorithm
        if critic is None or not isinstance(algorithm, ActorCritic):
            return []
        with self.clock.phase("values"):
            made = [estimate(critic, row, algorithm) for row in self.rows]
        self.progress()
        return made

    def train_rows(self, estimates: Sequence[Estimate]) -> tuple[float, ...]:
        """Gradients and numbers of all rows; seconds of each."""
        spent = []
        for row, given in zip(self.rows, estimates or [None] * len(self.rows), strict=True):
            start = time.perf_counter()
            self.train_row(row, given)
            spent.append(time.perf_counter() - start)
            self.progress()
        return tuple(spent)

    def train_row(self, row: Row, given: Estimate | None) -> None:
        """Adds one row's gradients to the policy (not in a warm-up) and its numbers to the sums."""
        policy, reference, plan = self.actors.policy, self.actors.reference, self.plan
        reference_R = None if reference is None else reference_logprobs(reference, row)
        policy.replay.open(row.positions_T, row.routing(policy.replay))
        with torch.set_grad_enabled(not plan.warming):
            with self.clock.phase("forward"):
                logprobs_R, entropy_R = policy_logprobs(policy, row)
                tokens = Tokens(
                    logprobs_T=logprobs_R,
                    sampled_T=row.sampled_R,
                    mask_T=row.mask_R,
                    segment_T=row.segment_R,
                    advantage_T=row.advantage_S[row.segment_R] if given is None else given.advantage_R,
                    weight_S=row.weight_S,
                    entropy_T=entropy_R if plan.algorithm.entropy_coef else entropy_R.detach(),
                    reference_T=reference_R,
                )
                result = objective(plan.algorithm, tokens, self.totals)
            if not plan.warming:
                with self.clock.phase("backward"):
                    result.loss.backward()
        count = policy.replay.close(row.positions_T)
        measure(self.sums, tokens, result, count)
        fidelity(
            self.sums, tokens, row.cut_S[row.segment_R] == 0, sample_T=row.sample_S[row.segment_R], token_T=row.token_R
        )
        if given is not None:
            self.sums.returns(given.returns_R[row.mask_R], given.values_R[row.mask_R])

    def reduce(self) -> Measured:
        """The numbers of all rows of all ranks."""
        with self.clock.phase("reduce"):
            self.sums.add(rss_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
            return self.sums.reduce(self.actors.policy.data_group)

    def update(self, found: Measured) -> Measured:
        """Steps the policy, but not in a warm-up."""
        policy, plan = self.actors.policy, self.plan
        if plan.warming:
            return found
        with self.clock.phase("optimizer"):
            experts = policy.expert_gradient_norm()
            norm = _update(policy, self.actors.optimizer, plan.grad_clip)
        return replace(found, grad_norm=norm, grad_norm_experts=experts)

    def update_critic(self, found: Measured, estimates: Sequence[Estimate]) -> Measured:
        """All steps of the critic."""
        critic, optimizer, algorithm = self.actors.critic, self.actors.critic_optimizer, self.plan.algorithm
        assert critic is not None and optimizer is not None and isinstance(algorithm, ActorCritic)
        loss = norm = 0.0
        with self.clock.phase("critic"):
            for _ in range(algorithm.critic.updates_per_step):
                loss = self.train_critic(critic, estimates, algorithm.critic.clip)
                norm = _update(critic, optimizer, self.plan.grad_clip)
                self.progress()
        return replace(found, value_loss=loss, critic_grad_norm=norm)

    def train_critic(self, critic: Critic, estimates: Sequence[Estimate], clip: float | None) -> float:
        """Adds the critic's gradients of all rows; returns the loss, of all ranks."""
        total = torch.zeros((), device=critic.device)
        for row, known in zip(self.rows, estimates, strict=True):
            loss = value_loss(
                critic_values(critic, row),
                known.returns_R,
                row.mask_R,
                tokens=self.totals.tokens,
                old_T=known.values_R,
                clip=clip,
            )
            loss.backward()
            critic.replay.close(row.positions_T)
            total += loss.detach()
        dist.all_reduce(total, group=critic.data_group)
        return float(total)


def train_step(
    actors: Actors, batch: RankBatch, plan: Plan, *, progress: Callable[[], None] = lambda: None
) -> Measured:
    """One optimizer step, or none: a breached gate is answered without stepping.

    Raises TrainerError, on all ranks alike, for other numbers of micro-batches, for lost tokens or rows and for a
    gradient that is not finite.
    """
    check_rounds(len(batch.parts), actors.policy.data_group)
    step = _Step(actors, batch, plan, progress)
    estimates = step.estimates()
    spent = step.train_rows(estimates)
    found = step.reduce()
    check(found, batch.trained)
    found = replace(found, lr=actors.optimizer.lr, breach=breach(found, plan.gates), part_seconds=spent)
    if found.breach is not None:
        actors.optimizer.clear()
    else:
        found = step.update(found)
        found = step.update_critic(found, estimates) if estimates else found
    return replace(found, seconds=step.clock.seconds)
