"""Everything a run tells the world, in one place: run folder, curves, terminal and the running account."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lego.learn.report import StepReport
from lego.lines import rows
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

    def restore(self, folder: Path, measured: Mapping[tuple[str, str], Rate], first: int) -> None:
        """Takes over what an earlier life of the run wrote; its curves begin anew at step `first`."""
        self.account.restore(folder, measured)
        for event in rows(folder / "events.jsonl"):
            if event["kind"] == "measured" and event["version"] >= first:
                rate = measured[event["moment"], event["split"]]
                self._curve(event["split"], rate, coverage=event["coverage"], version=event["version"])

    def trial(self, trajectory: Trajectory, measurement: str = "") -> None:
        """A trial has ended, of training or of a measurement such as end/heldout."""
        self.view.advance(trajectory.outcome.value)
        self.account.trial(self.store.trial(trajectory, measurement))

    def measured(
        self, moment: str, split: str, rate: Rate, seconds: float, *, version: int, coverage: float = 1.0
    ) -> None:
        """A solve rate by the weights of one version, and the share of its trials that came to a result."""
        told = {"rate": rate.triple(), "seconds": seconds, "version": version, "coverage": coverage}
        self.account.measured(moment, split, rate, seconds)
        self.store.event("measured", moment=moment, split=split, **told)
        self._curve(split, rate, coverage=coverage, version=version)
        self.store.sync()

    def _curve(self, split: str, rate: Rate, *, coverage: float, version: int) -> None:
        solved = {f"validation/{split}_solve_rate": rate.value} if rate.asked else {}
        self.store.curve(version, solved | {f"validation/{split}_coverage": coverage})

    def step(
        self,
        step: int,
        trajectories: Sequence[Trajectory],
        credited: Credited,
        report: StepReport | None,
        seconds: Mapping[str, float],
        more: Mapping[str, float],
    ) -> None:
        """A step is done, with `more` numbers of its parts; `report` is None where nothing could be trained on."""
        rate = Rate(*solved_and_asked(trajectories))
        self.view.step(_row(step, trajectories, rate, report, seconds))
        numbers = {**_metrics(trajectories, rate, credited, report, seconds), **more}
        self.account.step(numbers)
        self.store.metrics(step, numbers, report.histograms() if report else {})
        self.store.sync()


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
        "credit/samples": len(credited.samples),
        "credit/empty_trials": credited.empty,
        "credit/tokens": credited.tokens,
        "credit/unused_tokens": credited.unused_tokens,
    }
    values |= {f"outcome/{name}": n for name, n in outcome_counts(trajectories).items()}
    values |= {f"seconds/{name}": s for name, s in seconds.items()}
    for harness in sorted({t.harness for t in trajectories}):
        values |= _of_harness(harness, [t for t in trajectories if t.harness == harness])
    return values | (report.metrics() if report else {})


def _of_harness(name: str, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The numbers of one harness's trials; those of a step have at least one."""
    rate = Rate(*solved_and_asked(trajectories))
    values = {
        **({"solve_rate": rate.value} if rate.asked else {}),
        "trials": len(trajectories),
        "turns": sum(t.fidelity.turns for t in trajectories) / len(trajectories),
        "trainable_share": _share(trajectories),
    }
    values |= {f"outcome/{outcome}": n for outcome, n in outcome_counts(trajectories).items()}
    return {f"harness/{name}/{what}": value for what, value in values.items()}
