"""What two ranks do alike when one of them has something wrong: a step of both, on loopback."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lego.errors import TrainerError
from lego.learn import packing, titan
from lego.learn.algorithms import GRPO
from lego.learn.layout import Layout
from lego.learn.optimizer import AdamW
from lego.learn.step import Actors, Plan, train_step
from tests.learn.samples import sample

RANKS = 2


def three_and_one() -> list[packing.RankBatch]:
    """The parts of two ranks: one sample in each of three micro-batches, and one and two empty ones."""
    rng = np.random.default_rng(0)
    batch = packing.pack([sample(rng, n) for n in (60, 50, 40, 30)], ranks=1, token_budget=60)
    lone = packing.pack([sample(rng, 30)], ranks=RANKS, token_budget=60)
    empty = lone.ranks[1][0]
    first, second = batch.ranks[0][:3], (batch.ranks[0][3], empty, empty)
    return [packing.RankBatch(parts=p, trained=batch.trained, weight=batch.weight) for p in (first, second)]


def poisoned(policy: titan.Policy) -> None:
    """On the last rank one number of its part of a gradient is inf, once all ranks' gradients are added up."""
    real = policy.expert_gradient_norm

    def poison() -> float:
        if dist.get_rank() == RANKS - 1:
            next(iter(policy.parameters().values())).grad.to_local().view(-1)[0] = float("inf")
        return real()

    policy.expert_gradient_norm = poison


def refused(actors: Actors, part: packing.RankBatch) -> str:
    """The error of a step, in seconds, that must leave this rank's weights and moments as they were."""
    state = {n: t.to_local().clone() for n, t in actors.optimizer.state().items() if hasattr(t, "to_local")}
    began = time.monotonic()
    with pytest.raises(TrainerError) as raised:
        train_step(actors, part, Plan(algorithm=GRPO(), grad_clip=1.0))
    assert time.monotonic() - began < 5
    now = actors.optimizer.state()
    assert state and all(torch.equal(now[n].to_local(), t) for n, t in state.items())
    assert actors.optimizer.position == 1
    return str(raised.value)


def rank(number: int, folder: Path, out: Path) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{out / 'store'}", rank=number, world_size=RANKS)
    layout = Layout(world_size=RANKS, expert_parallel=RANKS)
    titan.init_distributed(layout)
    policy = titan.Policy(folder, layout, torch.device("cpu"))
    actors = Actors(policy=policy, optimizer=AdamW(policy, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0))
    part = three_and_one()[number]
    plan = Plan(algorithm=GRPO(), grad_clip=1.0)
    whole = train_step(actors, part, plan)
    assert whole.tokens == part.trained and whole.grad_norm > 0
    short = packing.RankBatch(parts=part.parts[: 3 - 2 * number], trained=part.trained, weight=part.weight)
    said = [refused(actors, short)]
    poisoned(policy)
    said.append(refused(actors, part))
    (out / f"{number}.txt").write_text("\n".join(said))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def said(tiny_model, tmp_path_factory):
    """By rank, the errors of a step with other micro-batches, and with an inf in one rank's gradient."""
    out = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.start_processes(rank, (tiny_model, out), nprocs=RANKS, start_method="forkserver")
    return [(out / f"{number}.txt").read_text().splitlines() for number in range(RANKS)]


def test_o05_ranks_with_other_numbers_of_micro_batches_are_told_apart_at_once(said):
    assert [lines[0] for lines in said] == ["micro-batches differ: rank 0 has 3, rank 1 has 1"] * RANKS


def test_a08_an_inf_in_one_ranks_gradient_stops_the_step_on_all(said):
    assert [lines[1] for lines in said] == ["the policy's gradient norm is inf: no rank stepped it"] * RANKS
