"""One optimizer step of a rank: forward, loss and backward of its micro-batches, then all ranks' sums."""

import math
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from lego.errors import TrainerError
from lego.learn.algorithms import Algorithm
from lego.learn.losses import Objective, Tokens, Totals, effective_sample_share, k3, log_ratio, objective
from lego.learn.packing import PADDING, UNRECORDED, MicroBatch, RankBatch
from lego.learn.replay import RowCount
from lego.learn.titan import AdamW, Policy

HEAD_CHUNK = 1024

Number = float | int


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


SUMS = (
    "tokens", "loss", "k3", "ratio", "ratio_square", "clipped", "entropy",
    "p", "q", "pp", "qq", "pq", "rows_needed", "rows_replayed", "rows_live", "rss_gib",
)  # fmt: skip
MAXIMA = ("logprob_difference", "probability_difference")


class Sums:
    """float64 sums and maxima over tokens, first of this rank and after `reduce` of all."""

    def __init__(self) -> None:
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64)
        self.maxima = torch.zeros(len(MAXIMA), dtype=torch.float64)

    def add(self, **values: torch.Tensor | Number) -> None:
        """Adds to the named sums, raises the named maxima."""
        for name, value in values.items():
            if name in SUMS:
                self.sums[SUMS.index(name)] += float(value)
            else:
                index = MAXIMA.index(name)
                self.maxima[index] = max(float(self.maxima[index]), float(value))

    def reduce(self, device: torch.device) -> dict[str, float]:
        """Sums and maxima over all ranks, the same on each."""
        sums, maxima = self.sums.to(device), self.maxima.to(device)
        dist.all_reduce(sums, op=dist.ReduceOp.SUM)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        return dict(zip((*SUMS, *MAXIMA), [*sums.tolist(), *maxima.tolist()], strict=True))


def tensors(part: MicroBatch, device: torch.device) -> dict[str, torch.Tensor]:
    """A micro-batch on the device; integers as int64. An empty one gets a row to call the head with."""
    arrays = {name: torch.from_numpy(value) for name, value in vars(part).items()}
    if part.empty:
        zero, one = torch.zeros(1), torch.ones(1)
        arrays |= {"rows_R": zero, "labels_R": zero, "segment_R": zero, "sampled_R": zero, "temperature_R": one}
        arrays |= {"advantage_S": zero, "weight_S": zero}
    whole = ("ids_T", "positions_T", "routing_TLK", "rows_R", "labels_R", "segment_R")
    return {n: a.to(device, torch.int64 if n in whole else torch.float32) for n, a in arrays.items()}


def _routing(data: Mapping[str, torch.Tensor], part: MicroBatch, policy: Policy) -> torch.Tensor:
    if data["routing_TLK"].shape[-1]:
        return data["routing_TLK"]
    shape = (len(part.ids_T), policy.replay.layers, policy.replay.top_k)
    return torch.full(shape, PADDING if part.empty else UNRECORDED, device=policy.device)


def train_micro_batch(
    policy: Policy, part: MicroBatch, totals: Totals, algorithm: Algorithm, sums: Sums, clock: Clock
) -> None:
    """Adds one micro-batch's gradients to the policy and its numbers to `sums`."""
    data = tensors(part, policy.device)
    positions = data["positions_T"]
    policy.replay.open(positions, _routing(data, part, policy))
    with clock.phase("forward"):
        logprobs_R, entropy_R = policy.forward(
            data["ids_T"],
            positions,
            data["rows_R"],
            labels_R=data["labels_R"],
            temperature_R=data["temperature_R"],
            chunk=HEAD_CHUNK,
        )
        tokens = Tokens(
            logprobs_T=logprobs_R,
            sampled_T=data["sampled_R"],
            mask_T=torch.full_like(logprobs_R, not part.empty, dtype=torch.bool),
            segment_T=data["segment_R"],
            advantage_S=data["advantage_S"],
            weight_S=data["weight_S"],
        )
        result = objective(algorithm)(tokens, totals)
    with clock.phase("backward"):
        result.loss.backward()
    rows = policy.replay.close(positions)
    measure(sums, tokens, result, entropy_R, rows)


@torch.no_grad()
def measure(sums: Sums, tokens: Tokens, result: Objective, entropy_T: torch.Tensor, rows: RowCount) -> None:
    """Adds a micro-batch's numbers."""
    sums.add(rows_needed=rows.needed, rows_replayed=rows.replayed, rows_live=rows.live, loss=result.loss)
    mask = tokens.mask_T
    trainer, sampled = tokens.logprobs_T[mask].double(), tokens.sampled_T[mask].double()
    if len(trainer) == 0:
        return
    p, q, ratio = sampled.exp(), trainer.exp(), result.ratio_T[mask].double()
    sums.add(tokens=len(p), p=p.sum(), q=q.sum(), pp=p.square().sum(), qq=q.square().sum(), pq=(p * q).sum())
    sums.add(ratio=ratio.sum(), ratio_square=ratio.square().sum(), clipped=result.clipped_T.sum())
    sums.add(k3=k3(log_ratio(trainer, sampled, torch.ones_like(p, dtype=torch.bool))).sum())
    sums.add(entropy=entropy_T[mask].double().sum())
    sums.add(logprob_difference=(trainer - sampled).abs().max(), probability_difference=(p - q).abs().max())


def pearson(total: Mapping[str, float]) -> float:
    """Correlation of sampled and trainer probabilities; of constants, 1 if they agree and 0 if not."""
    n = total["tokens"]
    var_p = total["pp"] - total["p"] ** 2 / n
    var_q = total["qq"] - total["q"] ** 2 / n
    covariance = total["pq"] - total["p"] * total["q"] / n
    if var_p <= 1e-12 * n or var_q <= 1e-12 * n:
        return 1.0 if total["probability_difference"] < 1e-4 else 0.0
    return covariance / math.sqrt(var_p * var_q)


def report(total: Mapping[str, float]) -> dict[str, Number]:
    """The step's numbers from the reduced sums."""
    n = total["tokens"]
    return {
        "loss": total["loss"],
        "tokens": int(n),
        "pearson": pearson(total),
        "max_logprob_difference": total["logprob_difference"],
        "max_probability_difference": total["probability_difference"],
        "k3": total["k3"] / n,
        "ratio_mean": total["ratio"] / n,
        "clip_fraction": total["clipped"] / n,
        "entropy": total["entropy"] / n,
        "ess": effective_sample_share(total["ratio"], total["ratio_square"], n) or 0.0,
        "rows_needed": int(total["rows_needed"]),
        "rows_replayed": int(total["rows_replayed"]),
        "rows_live": int(total["rows_live"]),
        "peak_rss_gib": total["rss_gib"],
    }


def check(numbers: Mapping[str, Number], trained: int) -> None:
    """Raises TrainerError if tokens or routing rows went missing on the way."""
    if numbers["tokens"] != trained:
        raise TrainerError(f"{numbers['tokens']} tokens trained of {trained} in the batch")
    consumed = numbers["rows_replayed"] + numbers["rows_live"]
    if consumed != numbers["rows_needed"]:
        raise TrainerError(f"{consumed} routing rows consumed, but MoE layers x tokens = {numbers['rows_needed']}")


def breach(numbers: Mapping[str, Number], gates: Mapping[str, float]) -> str | None:
    """The first gate that these numbers do not hold, in words; None if all hold."""
    if "min_pearson" in gates and not numbers["pearson"] >= gates["min_pearson"]:
        return f"Pearson of sampled and trainer probabilities {numbers['pearson']:.6f}, wanted {gates['min_pearson']}"
    if "max_k3" in gates and not numbers["k3"] <= gates["max_k3"]:
        return f"k3 of sampled and trainer log-probabilities {numbers['k3']:.3g}, wanted at most {gates['max_k3']}"
    coverage = numbers["rows_replayed"] / max(1, numbers["rows_needed"])
    if "min_routing_coverage" in gates and not coverage >= gates["min_routing_coverage"]:
        return f"routing coverage {coverage:.6f}, wanted {gates['min_routing_coverage']}"
    return None


def train_step(
    policy: Policy,
    optimizer: AdamW,
    batch: RankBatch,
    *,
    algorithm: Algorithm,
    grad_clip: float,
    gates: Mapping[str, float],
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """One optimizer step, or none: a breached gate is answered without stepping.

    Raises TrainerError, on all ranks alike, for lost tokens or rows and for a gradient that is not finite.
    """
    totals, sums, clock = Totals(tokens=batch.trained, weight=batch.weight), Sums(), Clock()
    for part in batch.parts:
        train_micro_batch(policy, part, totals, algorithm, sums, clock)
        progress()
    with clock.phase("reduce"):
        sums.add(rss_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
        numbers = report(sums.reduce(policy.device))
    check(numbers, batch.trained)
    breached = breach(numbers, gates)
    if breached is not None:
        optimizer.clear()
        return numbers | {"breach": breached, "grad_norm": 0.0, "seconds": clock.seconds}
    with clock.phase("optimizer"):
        norm = policy.clip_gradients(grad_clip)
        if not math.isfinite(norm):
            optimizer.clear()
            raise TrainerError(f"gradient norm is {norm}: no rank stepped")
        optimizer.step()
    return numbers | {"breach": None, "grad_norm": norm, "seconds": clock.seconds}
