"""How much work a trial is: a log-normal body with a Pareto tail, the same for a trial in every setting.

Work is in units of the median trial. A task has its own typical work, which its trials share; each trial departs from
it. A few trials go astray and do many times their work. Numbers depend on seed, task and attempt alone, not on the
order of events: two settings that are compared run the same trials.
"""

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

_NORMAL = NormalDist()


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The distribution of a trial's work; the defaults are the long tail that docs/async.md states."""

    task_sigma: float = 0.5
    """Spread of a task's typical work: standard deviation of its logarithm."""
    trial_sigma: float = 0.7
    """Spread of trials of one task: standard deviation of the logarithm."""
    stray: float = 0.03
    """Share of trials that go astray."""
    alpha: float = 1.5
    """Pareto exponent of the factor, 1 or more, by which these do more work."""
    most: float = 20.0
    """Work at which a trial's own limit ends it."""
    solve_low: float = 0.05
    """Solve rate of the hardest task; rates are uniform up to `solve_high`."""
    solve_high: float = 0.95
    seed: int = 0

    def work(self, task: str, attempt: int) -> float:
        """Median trials' worth of work of one trial, above 0 and up to `most`."""
        (own,) = _uniforms(f"{self.seed}/{task}", 1)
        body, astray, tail = _uniforms(f"{self.seed}/{task}/{attempt}", 3)
        work = math.exp(self.task_sigma * _NORMAL.inv_cdf(own) + self.trial_sigma * _NORMAL.inv_cdf(body))
        if astray < self.stray:
            work *= tail ** (-1 / self.alpha)
        return min(work, self.most)

    def solved(self, task: str, attempt: int) -> bool:
        """Whether the trial solves its task."""
        (rate,) = _uniforms(f"{self.seed}/{task}/rate", 1)
        (luck,) = _uniforms(f"{self.seed}/{task}/{attempt}/luck", 1)
        return luck < self.solve_low + rate * (self.solve_high - self.solve_low)


def _uniforms(name: str, count: int) -> Sequence[float]:
    """Numbers in (0, 1) that depend on the name alone."""
    digest = hashlib.blake2b(name.encode(), digest_size=8 * count).digest()
    return [((number >> 12) + 0.5) / 2**52 for number in struct.unpack(f"{count}Q", digest)]
