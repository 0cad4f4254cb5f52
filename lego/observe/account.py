"""The running account of a run: rates, phase times and token counts, and the summary they end in.

It is made of the lines of the run folder, so that a run that goes on after a crash has the account of one that did not.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lego.lines import rows
from lego.observe.interval import Rate
from lego.observe.memory import PeakMemory
from lego.records import Trajectory
from lego.tasks.task import SPLITS


class Account:
    """Adds up what the run folder's lines tell; numbers that nobody measured stay None."""

    def __init__(self, memory: PeakMemory) -> None:
        self.memory = memory
        self.rates: dict[str, dict[str, Rate]] = {"start": {}, "end": {}}
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.tokens: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.reused = 0
        self.trials = 0
        self.steps: list[Mapping[str, Any]] = []
        """Numbers of the steps that trained anything."""
        self.stopped: str | None = None
        """What ended the run before its end."""

    def trial(self, row: Mapping[str, Any]) -> None:
        """A line of trials.jsonl."""
        self.trials += 1
        self.outcomes[row["outcome"]] += 1
        self.reused += row["verdict_reused"]
        self.tokens["sampled"] += row["sampled"]
        self.tokens["trainable"] += row["trainable"]
        self.tokens["excluded"] += sum(row["excluded"].values())

    def step(self, row: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl."""
        for phase in ("trials", "train", "push"):
            self.seconds[phase] += float(row[f"seconds/{phase}"])
        if "train/k3" in row:
            self.steps.append(row)

    def measured(self, moment: str, split: str, rate: Rate, seconds: float = 0.0) -> None:
        """A solve rate of `split`, and the wall seconds that it took; the summary has those of start and end."""
        self.rates.setdefault(moment, {})[split] = rate
        self.seconds["measure"] += seconds

    def restore(self, folder: Path, measured: Mapping[tuple[str, str], Rate]) -> None:
        """Takes over what an earlier life of the run wrote into its folder."""
        for row in rows(folder / "trials.jsonl"):
            self.trial(row)
        for row in rows(folder / "metrics.jsonl"):
            self.step(row)
        spent = {(e["moment"], e["split"]): e["seconds"] for e in rows(folder / "events.jsonl") if _is_measured(e)}
        for (moment, split), rate in measured.items():
            self.measured(moment, split, rate, spent.get((moment, split), 0.0))

    def fidelity(self) -> dict[str, float | None]:
        """The worst of all steps, but k3 of the first. Pearson and k3 are of steps on tokens of the newest weights:
        of older ones trainer and sampler differ as they should."""
        sampled = self.tokens["sampled"]
        newest = [row for row in self.steps if row["rollout/on_policy"]]
        pearson, k3 = (_numbers(newest, f"train/{name}") for name in ("pearson", "k3"))
        coverage = _numbers(self.steps, "train/routing_coverage")
        return {
            "pearson": min(pearson, default=None),
            "k3": k3[0] if k3 else None,
            "k3_max": max(k3, default=None),
            "routing_coverage": min(coverage, default=None),
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


def _numbers(steps: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [float(step[name]) for step in steps]


def _is_measured(event: Mapping[str, Any]) -> bool:
    return event.get("kind") == "measured"


def outcome_counts(trajectories: Sequence[Trajectory]) -> Mapping[str, int]:
    """How many trials ended in each way."""
    return Counter(t.outcome.value for t in trajectories)
