"""The running account of a run: rates, phase times and token counts, and the summary they end in."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from lego.learn.report import StepReport
from lego.observe.interval import Rate
from lego.observe.memory import PeakMemory
from lego.records import Trajectory
from lego.tasks.task import SPLITS


class Account:
    """Adds up what the loop reports; numbers that nobody measured stay None."""

    def __init__(self, memory: PeakMemory) -> None:
        self.memory = memory
        self.rates: dict[str, dict[str, Rate]] = {"start": {}, "end": {}}
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.tokens: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.reused = 0
        self.trials = 0
        self.reports: list[StepReport] = []
        self.stopped: str | None = None
        """What ended the run before its end."""

    def trial(self, trajectory: Trajectory) -> None:
        """One finished trial."""
        self.trials += 1
        self.outcomes[trajectory.outcome.value] += 1
        self.reused += trajectory.verdict_reused
        self.tokens["sampled"] += trajectory.fidelity.sampled
        self.tokens["trainable"] += trajectory.fidelity.trained
        self.tokens["excluded"] += sum(trajectory.fidelity.excluded.values())

    def measured(self, moment: str, split: str, rate: Rate) -> None:
        """A solve rate of `split` at the start or the end."""
        self.rates[moment][split] = rate

    def spent(self, phase: str, seconds: float) -> None:
        """Wall seconds of a phase."""
        self.seconds[phase] += seconds

    def fidelity(self) -> dict[str, float | None]:
        """The worst of all steps, but k3 of the first."""
        reports, sampled = self.reports, self.tokens["sampled"]
        return {
            "pearson": min((r.pearson for r in reports), default=None),
            "k3": reports[0].k3 if reports else None,
            "k3_max": max((r.k3 for r in reports), default=None),
            "routing_coverage": min((r.routing_coverage for r in reports), default=None),
            "trainable_share": self.tokens["trainable"] / sampled if sampled else None,
        }

    def summary(self) -> dict[str, object]:
        """What summary.json holds."""
        return {
            "stopped": self.stopped,
            "solve_start": {split: self._triple("start", split) for split in SPLITS},
            "solve_end": {split: self._triple("end", split) for split in SPLITS},
            **self.fidelity(),
            "tokens": dict(self.tokens),
            "trials": self.trials,
            "outcomes": dict(self.outcomes),
            "verdicts_reused": self.reused,
            "seconds": dict(self.seconds),
            "peak_rss_gib": self.memory.peak_gib,
        }

    def _triple(self, moment: str, split: str) -> list[float] | None:
        rate = self.rates[moment].get(split)
        return None if rate is None or not rate.asked else rate.triple()


def outcome_counts(trajectories: Sequence[Trajectory]) -> Mapping[str, int]:
    """How many trials ended in each way."""
    return Counter(t.outcome.value for t in trajectories)
