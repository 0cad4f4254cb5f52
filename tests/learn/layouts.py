"""What ranks in some layout make of one global batch, written as safetensors for comparison with one process.

`run` starts a number of ranks once and goes through its cases; each leaves `NAME.safetensors`.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from lego.learn import titan
from lego.learn.layout import Layout
from lego.learn.optimizer import AdamW

LR, CLIP = 1e-3, 0.05

DOCUMENTS = (37, 5, 21, 2, 13, 30, 8, 11)
"""Lengths of the documents of the global batch."""
SPLITS: Mapping[str, tuple[tuple[tuple[int, ...], ...], ...]] = {
    # Documents of each micro-batch of each of four data ranks; ranks beyond the layout's give theirs to the first.
    "one": (((0, 1),), ((2, 3),), ((4, 5),), ((6, 7),)),
    "several": (((0,), (1,)), ((2,), (3,)), ((4,), (5,)), ((6,), (7,))),
    # Of two ranks, three and one that hold something; of four, three, one, one and none.
    "uneven": (((0, 2), (5, 4), (6,)), ((3, 1), (), ()), ((7,), (), ()), ((), (), ())),
    "empty": (((0, 1, 2, 3), (4,), (5, 6, 7)), ((), (), ()), ((), (), ()), ((), (), ())),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model in one layout: every split of the batch, and an optimizer step after the last."""

    name: str
    folder: Path
    layout: Layout
    critic: bool = False


def documents(vocabulary: int, layers: int, experts: int, top_k: int) -> list[dict[str, torch.Tensor]]:
    """Token ids, weights of their log-probabilities and very uneven routes, from a seed."""
    rng = np.random.default_rng(7)
    favour = -2.0 * np.arange(max(experts, 1))
    made = []
    for length in DOCUMENTS:
        noise = favour + rng.gumbel(size=(length, layers, max(experts, 1))) * 2
        routes = np.argsort(-noise, -1)[..., :top_k]
        made.append(
            {
                "ids": torch.from_numpy(rng.integers(0, vocabulary, length)),
                "advantages": torch.from_numpy(rng.standard_normal(length - 1).astype(np.float32)),
                "routes": torch.from_numpy(routes),
            }
        )
    return made


def micro_batches(split: str, ranks: int, rank: int) -> list[tuple[int, ...]]:
    """The documents of each micro-batch of this rank: as many micro-batches on all ranks."""
    parts = SPLITS[split]
    mine = list(parts[rank])
    for other in range(ranks + rank, 4, ranks):
        mine = [(*a, *b) for a, b in zip(mine, parts[other], strict=True)]
    if ranks == 1 and split != "one":
        mine = [batch for row in parts for batch in row]
    return mine


def packed(docs: Sequence[dict[str, torch.Tensor]], policy: titan.Network) -> dict[str, torch.Tensor]:
    """One packed row, padded for sequence parallelism; without documents one of padding, whose loss is zero."""
    tp, replay = policy.layout.tensor_parallel, policy.replay
    length = sum(len(d["ids"]) for d in docs)
    pad = -length % tp if docs else tp
    padding = torch.full((pad, replay.layers, replay.top_k), -2)
    starts = np.cumsum([0, *(len(d["ids"]) for d in docs)])
    rows = [torch.arange(len(d["ids"]) - 1) + start for d, start in zip(docs, starts, strict=False)]
    zero = torch.zeros(1, dtype=torch.int64)
    return {
        "ids": torch.cat([*(d["ids"] for d in docs), torch.zeros(pad, dtype=torch.int64)]),
        "positions": torch.cat([*(torch.arange(len(d["ids"])) for d in docs), torch.arange(pad)]),
        "routes": torch.cat([*(d["routes"] for d in docs), padding]),
        "rows": torch.cat(rows) if docs else zero,
        "labels": torch.cat([d["ids"][1:] for d in docs]) if docs else zero,
        "advantages": torch.cat([d["advantages"] for d in docs]) if docs else zero.float(),
    }


def forward_backward(policy: titan.Policy | titan.Critic, docs: Sequence[dict[str, torch.Tensor]], total: int) -> tuple:
    """Adds the gradients of one micro-batch of a loss summed over tokens and divided by the global count."""
    row = packed(docs, policy)
    policy.replay.open(row["positions"], row["routes"])
    at = row["ids"], row["positions"], row["rows"]
    if isinstance(policy, titan.Policy):
        temperature = torch.full((len(row["rows"]),), 0.9)
        found, _ = policy.forward(*at, labels_R=row["labels"], temperature_R=temperature)
    else:
        found = policy.forward(*at)
    loss = -(row["advantages"] * found).sum() / total
    loss.backward()
    return found.detach(), loss.detach(), policy.replay.close(row["positions"])


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of all ranks' parts, on each of them."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone().contiguous()


def step(policy: titan.Policy | titan.Critic, split: str) -> dict[str, torch.Tensor]:
    """Log-probabilities (or values) by document, loss, rows, gradient norms and gradients of the global batch."""
    sizes, layout = policy.arch.config.vocab_size, policy.layout
    docs = documents(sizes, policy.replay.layers, policy.replay.experts, policy.replay.top_k)
    total = sum(len(d["advantages"]) for d in docs)
    rank = layout.data_rank(dist.get_rank())
    found, loss, replayed = {}, torch.zeros(()), 0
    for batch in micro_batches(split, layout.data_ranks, rank):
        logprobs, part, rows = forward_backward(policy, [docs[i] for i in batch], total)
        loss, replayed = loss + part, replayed + rows.replayed
        assert rows.live == 0 and rows.needed == rows.replayed
        lengths = [len(docs[i]["advantages"]) for i in batch]
        found |= dict(zip(batch, logprobs.split(lengths) if batch else (), strict=True))
    return gathered(policy, found, loss, replayed)


def gathered(policy: titan.Network, found: dict, loss: torch.Tensor, replayed: int) -> dict[str, torch.Tensor]:
    """What all ranks found, each data rank's part once."""
    sums = torch.stack([loss.double(), torch.tensor(replayed)])
    dist.all_reduce(sums, group=policy.data_group)
    everyone: list[dict[int, torch.Tensor]] = [{} for _ in range(dist.get_world_size(policy.data_group))]
    dist.all_gather_object(everyone, found, group=policy.data_group)
    merged = {i: value for part in everyone for i, value in part.items()}
    assert len(merged) == sum(len(part) for part in everyone) == len(DOCUMENTS)
    return {
        "logprobs": torch.cat([merged[i] for i in range(len(DOCUMENTS))]),
        "loss": sums[0].float(),
        "replayed": sums[1].long(),
        "grad_norm_experts": torch.tensor(policy.expert_gradient_norm()),
        "grad_norm": torch.tensor(policy.clip_gradients(float("inf"))),
        **{f"grad.{n}": whole(p.grad) for n, p in policy.parameters().items() if p.grad is not None},
    }


def update(policy: titan.Network) -> dict[str, torch.Tensor]:
    """Weights after a clipped step of AdamW."""
    policy.clip_gradients(CLIP)
    AdamW(policy, lr=LR, betas=(0.9, 0.95), weight_decay=0.0).step()
    return {f"weight.{n}": whole(p) for n, p in policy.parameters().items()}


def overflow(policy: titan.Network) -> dict[str, torch.Tensor]:
    """The gradient norm on each rank when one number of the last rank's part of one gradient is inf."""
    for parameter in policy.parameters().values():
        parameter.grad = torch.zeros_like(parameter)
    names = sorted(policy.parameters(), key=lambda name: ("routed_experts" not in name, name))
    grad = policy.parameters()[names[0]].grad
    if dist.get_rank() == dist.get_world_size() - 1:
        (grad.to_local() if isinstance(grad, DTensor) else grad).view(-1)[0] = float("inf")
    norms: list = [None] * dist.get_world_size()
    dist.all_gather_object(norms, policy.clip_gradients(1.0))
    return {"overflow": torch.tensor(norms)}


def results(case: Case) -> dict[str, torch.Tensor]:
    """Everything one case finds, by split."""
    kind = titan.Critic if case.critic else titan.Policy
    policy = kind(case.folder, case.layout, torch.device("cpu"))
    made = {}
    for split in SPLITS:
        for parameter in policy.parameters().values():
            parameter.grad = None
        made |= {f"{split}/{name}": value for name, value in step(policy, split).items()}
    return made | update(policy) | overflow(policy)


def _rank(rank: int, ranks: int, cases: Sequence[Case], out: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{out / f'store{ranks}'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    titan.init_distributed(Layout(world_size=ranks))
    for case in cases:
        made = results(case)
        if rank == 0:
            save_file(made, out / f"{case.name}.safetensors")
    dist.destroy_process_group()


def run(ranks: int, cases: Sequence[Case], out: Path) -> None:
    """Starts so many ranks and waits for them. Raises the traceback of the first rank to fail."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.multiprocessing.spawn(_rank, (ranks, cases, out), nprocs=ranks)
