"""Behaviour cloning of the explorer: batches of dialogue trees, Muon for matrices and AdamW for the rest."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.demo_policy.explorer import Dialogue
from tools.demo_policy.net import Net


@dataclass(frozen=True)
class Batch:
    """B dialogues padded to T; targets are flat: (row, position) of each, its next id and its probability."""

    ids: Tensor
    positions: Tensor
    mask: Tensor
    places: Tensor
    rows: Tensor
    tokens: Tensor
    chances: Tensor
    entropy: float


def collate(dialogues: Sequence[Dialogue], pad_id: int) -> Batch:
    """Pads and masks; alternatives see what came before the branch and themselves, at the branch's position."""
    width = max(len(d.ids) for d in dialogues)
    ids = torch.full((len(dialogues), width), pad_id)
    positions = torch.arange(width).repeat(len(dialogues), 1)
    mask = torch.ones(width, width, dtype=torch.bool).tril().repeat(len(dialogues), 1, 1)
    spots: dict[tuple[int, int], int] = {}
    rows, tokens, chances = [], [], []
    for i, d in enumerate(dialogues):
        ids[i, : len(d.ids)] = torch.tensor(d.ids)
        main = len(d.ids) - d.alternatives
        positions[i, main : len(d.ids)] = d.branch
        for j in range(main, len(d.ids)):
            mask[i, j, d.branch : j] = False
        for position, token, chance in d.targets:
            rows.append(spots.setdefault((i, position), len(spots)))
            tokens.append(token)
            chances.append(chance)
    p = torch.tensor(chances)
    entropy = float(-(p * p.log()).sum()) / len(spots)
    places, row, token = torch.tensor(list(spots)), torch.tensor(rows), torch.tensor(tokens)
    return Batch(ids, positions, mask[:, None], places, row, token, p, entropy)


def loss(net: Net, batch: Batch) -> tuple[Tensor, Tensor]:
    """Mean KL divergence from the explorer's own distribution over its positions, and the balance loss."""
    hidden, balance = net(batch.ids, batch.positions, batch.mask)
    logp = net.logits(hidden[batch.places[:, 0], batch.places[:, 1]]).log_softmax(-1)
    cross = -(batch.chances * logp[batch.rows, batch.tokens]).sum() / len(batch.places)
    return cross - batch.entropy, balance


class Optimizer:
    """Muon on every matrix of the blocks, AdamW on embeddings, norms and routers."""

    def __init__(self, net: Net, lr: float, embed_lr: float, muon_lr: float) -> None:
        apart = ("embed", "gate")
        self.matrices = [p for name, p in net.named_parameters() if p.ndim >= 2 and not name.endswith(apart)]
        chosen = {id(p) for p in self.matrices}
        others = [p for p in net.parameters() if id(p) not in chosen and p is not net.embed]
        groups = [{"params": [net.embed], "full": embed_lr}, {"params": others, "full": lr}]
        self.adam = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.momenta = [torch.zeros_like(p) for p in self.matrices]
        self.muon_lr = muon_lr

    def step(self, share: float) -> None:
        """One update at `share` of the full learning rates; clears the gradients."""
        for group in self.adam.param_groups:
            group["lr"] = group["full"] * share
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        with torch.no_grad():
            for p, m in zip(self.matrices, self.momenta, strict=True):
                assert p.grad is not None
                m.mul_(0.95).add_(p.grad)
                update = _orthogonal(p.grad + 0.95 * m)
                p.add_(update, alpha=-self.muon_lr * share * max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5)
                p.grad = None


def _orthogonal(g: Tensor) -> Tensor:
    """Newton-Schulz: about the nearest orthogonal matrix, for a matrix or a stack of them."""
    x = g / (g.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    flip = x.shape[-2] > x.shape[-1]
    x = x.mT if flip else x
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if flip else x


def share(step: int, steps: int, warmup: int = 20) -> float:
    """Linear warm-up, flat, then linear to a twentieth over the last 40 %."""
    return min((step + 1) / warmup, 1.0, max(0.05, (steps - step) / (0.4 * steps)))
