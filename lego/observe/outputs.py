"""Everything a run tells the world, in one place: run folder, curves, terminal and the running account."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lego.learn.report import StepReport
from lego.observe.account import Account, outcome_counts
from lego.observe.interval import Rate
from lego.observe.store import RunStore
from lego.observe.terminal import StepRow, View
from lego.records import Trajectory
from lego.rollout.collect import solved_and_asked
from lego.rollout.credit import Credited


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Store, view and account of one run."""

    store: RunStore
    view: View
    account: Account

    def trial(self, step: int, trajectory: Trajectory) -> None:
        """A trial has ended; step -1 is a measurement."""
        self.view.advance(trajectory.outcome.value)
        self.store.trial(step, trajectory)
        self.account.trial(trajectory)

    def measured(self, moment: str, split: str, rate: Rate, seconds: float) -> None:
        """A solve rate at the start or the end of the run."""
        self.account.measured(moment, split, rate)
        self.account.spent("measure", seconds)
        self.store.event("measured", moment=moment, split=split, rate=rate.triple(), seconds=seconds)

    def step(
        self,
        step: int,
        trajectories: Sequence[Trajectory],
        credited: Credited,
        report: StepReport | None,
        seconds: Mapping[str, float],
    ) -> None:
        """A step is done; `report` is None where every group was flat and nothing was trained."""
        rate = Rate(*solved_and_asked(trajectories))
        if step == 0 and "train" not in self.account.rates["start"]:
            self.account.measured("start", "train", rate)
        if report is not None:
            self.account.reports.append(report)
        for phase, spent in seconds.items():
            self.account.spent(phase, spent)
        self.view.step(_row(step, trajectories, rate, report, seconds))
        numbers = _metrics(trajectories, rate, credited, report, seconds)
        self.store.metrics(step, numbers, report.histograms() if report else {})


def _share(trajectories: Sequence[Trajectory]) -> float:
    sampled = sum(t.fidelity.sampled for t in trajectories)
    return sum(t.fidelity.trained for t in trajectories) / sampled if sampled else 0.0


def _row(
    step: int, trajectories: Sequence[Trajectory], rate: Rate, report: StepReport | None, seconds: Mapping[str, float]
) -> StepRow:
    return StepRow(
        step=step,
        solve=rate,
        outcomes=outcome_counts(trajectories),
        pearson=report.pearson if report else None,
        k3=report.k3 if report else None,
        routing_coverage=report.routing_coverage if report else None,
        trainable_share=_share(trajectories),
        seconds=seconds,
        reused=sum(t.verdict_reused for t in trajectories),
    )


def _metrics(
    trajectories: Sequence[Trajectory],
    rate: Rate,
    credited: Credited,
    report: StepReport | None,
    seconds: Mapping[str, float],
) -> dict[str, float]:
    values = {
        "rollout/solve_rate": rate.value,
        "rollout/scored_share": sum(t.reward is not None for t in trajectories) / len(trajectories),
        "rollout/trainable_share": _share(trajectories),
        "rollout/turns": sum(t.fidelity.turns for t in trajectories) / len(trajectories),
        "rollout/verdicts_reused": sum(t.verdict_reused for t in trajectories),
        "credit/flat_groups": credited.flat / credited.groups,
        "credit/samples": len(credited.samples),
    }
    values |= {f"outcome/{name}": n for name, n in outcome_counts(trajectories).items()}
    values |= {f"seconds/{name}": s for name, s in seconds.items()}
    return values | (report.metrics() if report else {})
