"""Each algorithm learns a bandit with the real trainer, and with its rewards' sign flipped it does not.

One task is a prompt of one token; the policy samples two more, and earns the share of them that are the prompt's own
answer. Nothing is stood in for but the world: the same network, step, losses and optimizers as in a run.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lego.learn import packing
from lego.learn.advantages import advantages
from lego.learn.algorithms import ALGORITHMS, GRPO, PPO, SAO, ActorCritic, Algorithm, Correction, name_of
from lego.learn.optimizer import AdamW
from lego.learn.step import Actors, Plan, train_step
from lego.records import Outcome, Segment
from lego.rollout.credit import Rules, credit
from lego.rollout.filters import Filters, judge
from tests.factories import trajectory
from tests.learn.policies import critic, policy
from tests.tiny import write_model

ARMS, TASKS, LENGTH, TRIALS = 8, 4, 2, 64
STEPS = {"sao": 70, "ppo": 50}
"""30 for the others; SAO's first ten teach the critic alone."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(
        tmp_path_factory.mktemp("bandit"),
        vocab_size=ARMS,
        hidden_size=32,
        num_hidden_layers=1,
        head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=4,
        moe_intermediate_size=16,
        eos_token_id=ARMS - 1,
    )


def sampled(made, generator):
    """(ids [N, 1 + LENGTH], logprobs [N, LENGTH]) of TRIALS trials of the tasks in turn."""
    ids = torch.arange(TRIALS)[:, None] % TASKS
    logprobs = []
    for _ in range(LENGTH):
        n, length = ids.shape
        positions = torch.arange(length).repeat(n)
        made.replay.open(positions, torch.full((n * length, made.replay.layers, made.replay.top_k), -1))
        last = (torch.arange(n) * length + length - 1).repeat_interleave(ARMS)
        labels = torch.arange(ARMS).repeat(n)
        ones = torch.ones(len(labels))
        with torch.no_grad():
            found, _ = made.forward(ids.flatten(), positions, last, labels_R=labels, temperature_R=ones)
        made.replay.close(positions)
        choice = torch.multinomial(found.view(n, ARMS).exp(), 1, generator=generator)
        logprobs.append(found.view(n, ARMS).gather(1, choice))
        ids = torch.cat([ids, choice], 1)
    return ids, torch.cat(logprobs, 1)


def rewards(ids):
    """Share of a trial's tokens that are its task's answer."""
    return (ids[:, 1:] == (ids[:, :1] * 3 + 1) % ARMS).float().mean(1)


def trials(ids, logprobs, earned):
    """What a run's trials would have brought: one segment each."""
    made = []
    for task, row, lps, reward in zip(ids[:, 0].tolist(), ids.numpy(), logprobs.numpy(), earned.tolist(), strict=True):
        mask = np.arange(len(row)) > 0
        segment = Segment(
            ids_T=row.astype(np.int32),
            mask_T=mask,
            logprobs_T=np.append(0, lps).astype(np.float32),
            versions_T=np.where(mask, 0, -1).astype(np.int32),
            routing_TLK=None,
            routed_T=np.zeros(len(row), bool),
        )
        made.append(trajectory(str(task), reward, own=(segment,), outcome=Outcome.FAILED))
    return made


def rules(algorithm):
    """As lego/loop.py makes them."""
    return Rules(
        advantages=lambda groups: advantages(groups, baseline=algorithm.baseline, scale=algorithm.scale),
        shaped=algorithm.shaped,
        least_group=algorithm.least_group,
        drop_flat_groups=algorithm.drop_flat_groups,
    )


def kept(made, wanted):
    """What is trained on of each task's trials, as lego/loop.py judges it."""
    groups = {}
    for trial in made:
        groups.setdefault(trial.task, []).append(trial)
    return [judge(group, Filters(), wanted).kept for group in groups.values()]


def batch(samples):
    packed = packing.pack(samples, ranks=1, token_budget=128)
    return packing.RankBatch(parts=packed.ranks[0], trained=packed.trained, weight=packed.weight)


def learned(folder, algorithm: Algorithm, *, seed: int, sign: float = 1.0) -> float:
    """Mean reward of the policy after the algorithm's steps, on fresh samples; 1 is the optimum, chance 1/8."""
    made = policy(folder)
    optimizer = AdamW(made, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    actors = Actors(policy=made, optimizer=optimizer)
    if isinstance(algorithm, ActorCritic):
        values = critic(folder)
        own = AdamW(values, lr=algorithm.critic.lr, betas=(0.9, 0.95), weight_decay=0.0)
        actors = replace(actors, critic=values, critic_optimizer=own)
    if algorithm.needs_reference:
        actors = replace(actors, reference=policy(folder))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS.get(name_of(algorithm), 30)):
        ids, logprobs = sampled(made, generator)
        credited = credit(kept(trials(ids, logprobs, sign * rewards(ids)), rules(algorithm)), rules(algorithm))
        if credited.samples:
            plan = Plan(algorithm=algorithm, grad_clip=1.0, warming=actors.warming(algorithm))
            train_step(actors, batch(credited.samples), plan)
    return float(rewards(sampled(made, generator)[0]).mean())


def of_this_size(kind: type[Algorithm]) -> Algorithm:
    """The algorithm with its own defaults, but for what depends on the size of the problem."""
    if kind in (PPO, SAO):
        return kind(critic=replace(kind().critic, lr=1e-2))
    return kind(constant_length=LENGTH)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_algorithm_learns_the_bandit_and_with_flipped_rewards_it_does_not(folder, name):
    algorithm = of_this_size(ALGORITHMS[name])
    reached = [learned(folder, algorithm, seed=seed) for seed in range(3)]
    assert min(reached) >= 0.9, reached
    flipped = [learned(folder, algorithm, seed=seed, sign=-1.0) for seed in range(3)]
    assert max(flipped) <= 0.2, flipped


@pytest.mark.parametrize(
    "change",
    [
        {"correction": Correction(level="token")},
        {"correction": Correction(level="geometric", mode="mask", low=0.5, high=2.0)},
        {"kl_coef": 0.01, "kl": "k3"},
        {"kl_coef": 0.01, "kl": "k1"},
        {"entropy_coef": 1e-3},
    ],
)
def test_corrections_a_reference_and_an_entropy_bonus_do_not_keep_it_from_learning(folder, change):
    assert learned(folder, GRPO(**change), seed=0) >= 0.9
