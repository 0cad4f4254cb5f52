"""What packed documents cost in time, learned from the rounds of micro-batches that were run."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ROUNDS = 64
"""Rounds of micro-batches that a cost is fitted to."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of a document of n tokens: linear * n + quadratic * n^2, the square for its attention."""

    linear: float = 1.0
    quadratic: float = 0.0

    def seconds(self, documents: Sequence[int]) -> float:
        """Of all documents of a micro-batch."""
        n = np.asarray(documents, np.float64)
        return float(self.linear * n.sum() + self.quadratic * n @ n)

    @classmethod
    def fit(cls, observations: Sequence[tuple[Sequence[int], float]]) -> "Cost":
        """Least squares, neither part negative, over (documents of a micro-batch, its seconds).

        Raises ValueError without a token or without a second.
        """
        sums = np.array([[np.sum(n), np.square(n, dtype=np.float64).sum()] for n, _ in observations], np.float64)
        seconds = np.array([s for _, s in observations], np.float64)
        if not sums.any() or not seconds.sum() > 0:
            raise ValueError(f"{len(observations)} observations without a token or a second: no cost to fit")
        scale = sums.max(0)
        both = np.linalg.lstsq(sums / scale, seconds, rcond=None)[0]
        alone = np.diag((sums / scale * seconds[:, None]).sum(0) / np.square(sums / scale).sum(0))
        found = [x for x in (both, *alone) if (x >= 0).all()]
        linear, quadratic = min(found, key=lambda x: np.square(sums / scale @ x - seconds).sum()) / scale
        return cls(linear=float(linear), quadratic=float(quadratic))


class Costs:
    """The cost of a document as the last rounds have it; `cost` is None before the second step."""

    def __init__(self) -> None:
        self.cost: Cost | None = None
        self._seen: list[tuple[Sequence[int], float]] = []
        self._first = True

    def learn(self, rounds: Sequence[Sequence[Sequence[int]]], seconds: Sequence[float]) -> None:
        """Takes in a step: by round, the documents of each rank's micro-batch, and how long it lasted.

        The ranks wait for each other, so a round lasts as long as its dearest micro-batch.
        """
        cost = self.cost or Cost()
        seen = [(max(parts, key=cost.seconds), took) for parts, took in zip(rounds, seconds, strict=True)]
        # The first step is slower for reasons that have nothing to do with its documents.
        if not self._first:
            self._seen = [*self._seen, *seen][-ROUNDS:]
            self.cost = Cost.fit(self._seen)
        self._first = False
