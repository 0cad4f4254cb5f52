"""The numbers of a step: sums over its trained tokens, the same however they are split over ranks and micro-batches."""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist

from lego.learn.losses import Objective, Tokens, effective_sample_share, k3, log_ratio
from lego.learn.replay import RowCount
from lego.learn.report import LOG_RATIO_EDGES, Measured, Worst

SUMS = (
    "tokens", "loss", "kl", "ratio", "clipped", "entropy", "weight", "weight_square",
    "compared", "k1", "k3", "difference", "p", "q", "pp", "qq", "pq",
    "rows_needed", "rows_replayed", "rows_live", "choices", "agreed", "rss_gib",
    "returns", "returns_square", "residual", "residual_square",
    *(f"bin_{i}" for i in range(len(LOG_RATIO_EDGES) + 1)),
)  # fmt: skip


class Sums:
    """float64 sums over tokens and the worst token, first of this rank and after `reduce` of all ranks."""

    def __init__(self, device: torch.device) -> None:
        self._sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in SUMS}
        self._worst: list[Worst] = []
        self._furthest = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, **values: torch.Tensor | float) -> None:
        """Adds to the named sums."""
        for name, value in values.items():
            self._sums[name] += value.detach() if isinstance(value, torch.Tensor) else value

    def returns(self, returns_R: torch.Tensor, values_R: torch.Tensor) -> None:
        """Adds what a critic said of some tokens and what it was to say."""
        wanted, residual = returns_R.double(), (returns_R - values_R).double()
        self.add(returns=wanted.sum(), returns_square=wanted.square().sum())
        self.add(residual=residual.sum(), residual_square=residual.square().sum())

    def see(self, worst: Worst, probability_difference: torch.Tensor) -> None:
        """Keeps the worst token and the largest difference of probabilities."""
        self._worst = [max([*self._worst, worst], key=_distance)]
        self._furthest = torch.maximum(self._furthest, probability_difference.double())

    def reduce(self, group: dist.ProcessGroup | None) -> Measured:
        """The numbers over the ranks of a group that each hold other tokens; the same on each."""
        sums = torch.stack(list(self._sums.values()))
        dist.all_reduce(sums, group=group)
        dist.all_reduce(self._furthest, op=dist.ReduceOp.MAX, group=group)
        found: list[list[Worst]] = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(found, self._worst, group=group)
        worst = max((token for rank in found for token in rank), key=_distance, default=None)
        return _measured(dict(zip(self._sums, sums.tolist(), strict=True)), worst, float(self._furthest))


def _distance(token: Worst) -> float:
    """What is no number is furthest."""
    return math.inf if math.isnan(token.difference) else token.difference


@torch.no_grad()
def measure(sums: Sums, tokens: Tokens, result: Objective, rows: RowCount) -> None:
    """Adds a micro-batch's numbers, but those of `fidelity`."""
    sums.add(rows_needed=rows.needed, rows_replayed=rows.replayed, rows_live=rows.live, loss=result.loss)
    sums.add(choices=rows.choices, agreed=rows.agreed)
    mask = tokens.mask_T
    ratios = log_ratio(tokens.logprobs_T, tokens.sampled_T, mask)[mask].double()
    weights = (result.ratio_T * result.weight_T)[mask].double()
    sums.add(tokens=mask.sum(), ratio=result.ratio_T[mask].double().sum(), clipped=result.clipped_T[mask].sum())
    sums.add(weight=weights.sum(), weight_square=weights.square().sum())
    edges = torch.tensor(LOG_RATIO_EDGES, dtype=torch.float64, device=ratios.device)
    counts = torch.bincount(torch.bucketize(ratios, edges), minlength=len(edges) + 1)
    sums.add(**{f"bin_{i}": count for i, count in enumerate(counts)})
    for name, values_T in (("entropy", tokens.entropy_T), ("kl", result.kl_T)):
        if values_T is not None:
            sums.add(**{name: values_T[mask].double().sum()})


@torch.no_grad()
def fidelity(
    sums: Sums, tokens: Tokens, whole_T: torch.Tensor, *, sample_T: torch.Tensor, token_T: torch.Tensor
) -> None:
    """Adds how far trainer and sampler are apart, on tokens that both saw in their whole context.

    `sample_T` and `token_T` say which token of which sample each is.
    """
    mask = tokens.mask_T & whole_T
    trainer, sampled = tokens.logprobs_T[mask].double(), tokens.sampled_T[mask].double()
    if len(trainer) == 0:
        return
    p, q = sampled.exp(), trainer.exp()
    sums.add(compared=len(p), p=p.sum(), q=q.sum(), pp=p.square().sum(), qq=q.square().sum(), pq=(p * q).sum())
    ratios = log_ratio(trainer, sampled, torch.ones_like(p, dtype=torch.bool))
    sums.add(k1=-ratios.sum(), k3=k3(ratios).sum(), difference=(trainer - sampled).abs().sum())
    worst = int((trainer - sampled).abs().argmax())
    found = Worst(
        sample=int(sample_T[mask][worst]),
        token=int(token_T[mask][worst]),
        sampled=float(sampled[worst]),
        trainer=float(trainer[worst]),
    )
    sums.see(found, (p - q).abs().max())


def _measured(total: Mapping[str, float], worst: Worst | None, probability_difference: float) -> Measured:
    n, compared = max(1.0, total["tokens"]), max(1.0, total["compared"])
    return Measured(
        loss=total["loss"],
        tokens=round(total["tokens"]),
        pearson=_pearson(total, probability_difference),
        max_logprob_difference=worst.difference if worst else 0.0,
        mean_logprob_difference=total["difference"] / compared,
        max_probability_difference=probability_difference,
        k1=total["k1"] / compared,
        k3=total["k3"] / compared,
        kl=total["kl"] / n,
        ratio_mean=total["ratio"] / n,
        log_ratio_counts=tuple(round(total[f"bin_{i}"]) for i in range(len(LOG_RATIO_EDGES) + 1)),
        clip_fraction=total["clipped"] / n,
        entropy=total["entropy"] / n,
        ess=effective_sample_share(total["weight"], total["weight_square"], n) or 0.0,
        value_explained=_explained(total),
        rows_needed=round(total["rows_needed"]),
        rows_replayed=round(total["rows_replayed"]),
        rows_live=round(total["rows_live"]),
        routing_agreement=total["agreed"] / total["choices"] if total["choices"] else 1.0,
        peak_rss_gib=total["rss_gib"],
        worst=worst,
    )


def _pearson(total: Mapping[str, float], probability_difference: float) -> float:
    """Correlation of sampled and trainer probabilities; of constants, 1 if they agree and 0 if not."""
    n = max(1.0, total["compared"])
    var_p = total["pp"] - total["p"] ** 2 / n
    var_q = total["qq"] - total["q"] ** 2 / n
    if var_p <= 1e-12 * n or var_q <= 1e-12 * n:
        return 1.0 if probability_difference < 1e-4 else 0.0
    return (total["pq"] - total["p"] * total["q"] / n) / math.sqrt(var_p * var_q)


def _explained(total: Mapping[str, float]) -> float:
    """Share of the returns' variance that the critic explains; 0 without returns that vary."""
    n = max(1.0, total["tokens"])
    variance = total["returns_square"] / n - (total["returns"] / n) ** 2
    if variance <= 1e-12:
        return 0.0
    return 1 - (total["residual_square"] / n - (total["residual"] / n) ** 2) / variance
