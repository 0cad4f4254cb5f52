"""What is not trained on, and why: trials left out of their group, groups dropped, and when to stop the run. Pure."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from lego.errors import GateError
from lego.records import SCORED, Trajectory
from lego.rollout.credit import Rules


class LeftOut(StrEnum):
    """Why a trial is left out of its group: of baseline, samples and token counts alike."""

    UNSCORED = "unscored"
    """No reward: the environment's fault, or a limit."""
    OUTCOME = "outcome"
    LONG = "long"
    TRUNCATED = "truncated"
    STALE = "stale"


class Drop(StrEnum):
    """Why a group is not trained on at all."""

    SHORT = "short"
    """Too few trials are left."""
    ALL_ZERO = "all_zero"
    ALL_ONE = "all_one"
    FLAT = "flat"
    """Equal rewards between 0 and 1."""


@dataclass(frozen=True, kw_only=True)
class Filters:
    """Which trials are trained on. Those without a reward never are; flat groups are the algorithm's to keep."""

    max_tokens: int | None = None
    """Sampled tokens beyond which a trial is left out; None for no limit."""
    truncated: Literal["keep", "drop"] = "keep"
    """What becomes of trials whose last answer was cut by a limit on its length."""
    outcomes: tuple[Literal["solved", "failed"], ...] = ()
    """Outcomes whose trials are left out."""
    least: int = 1
    """Trials that must be left of a group, or it is dropped; an algorithm that wants more gets more."""
    useless_steps: int = 8
    """Steps' worth of groups in a row, all dropped, that stop the run with the cause; 0 for never."""

    def problems(self, group_size: int, drop_flat: bool) -> Iterator[str]:
        """Each thing that cannot be, as `rollout.filters.field: value, wanted …`."""
        if self.max_tokens is not None and self.max_tokens < 1:
            yield f"rollout.filters.max_tokens: {self.max_tokens}, wanted 1 or more, or None"
        if not 1 <= self.least <= group_size:
            yield f"rollout.filters.least: {self.least}, wanted 1 to rollout.group_size {group_size}"
        if self.useless_steps < 0:
            yield f"rollout.filters.useless_steps: {self.useless_steps}, wanted 0 or more"
        for outcome in self.outcomes:
            if outcome not in SCORED:
                yield f"rollout.filters.outcomes: {outcome}, wanted solved or failed: others have no reward to train on"
        if set(self.outcomes) >= SCORED:
            yield "rollout.filters.outcomes: solved and failed, wanted one of them: nothing else is trained on"
        elif "failed" in self.outcomes and drop_flat:
            yield "rollout.filters.outcomes: failed, wanted an algorithm that keeps flat groups: all that is left is 1"


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What is trained on of a finished group; nothing if it is dropped."""

    kept: tuple[Trajectory, ...]
    left_out: Mapping[LeftOut, int] = field(default_factory=dict)
    drop: Drop | None = None
    cause: str = ""
    """Why it is dropped, for people."""


def judge(trajectories: Sequence[Trajectory], filters: Filters, rules: Rules, *, oldest: int = 0) -> Judged:
    """One group's trials, sorted: which are left, which are not and why, and whether the group is dropped.

    `oldest` is the oldest version of weights that may have sampled. What is kept is all that anyone may count: the mask
    of a trial that is left out counts nowhere.
    """
    kept, left_out = list[Trajectory](), Counter[LeftOut]()
    for trajectory in trajectories:
        reason = _reason(trajectory, filters, oldest)
        if reason is None:
            kept.append(trajectory)
        else:
            left_out[reason] += 1
    drop = _drop(kept, max(filters.least, rules.least_group), rules.drop_flat_groups)
    if drop is None:
        return Judged(kept=tuple(kept), left_out=left_out)
    return Judged(kept=(), left_out=left_out, drop=drop, cause=_cause(trajectories, kept, left_out, drop))


def counts(groups: Iterable[Judged]) -> dict[str, int]:
    """Trials left out and groups dropped, by reason, as metrics; reasons that never came are 0."""
    judged = list(groups)
    trials = sum((Counter(group.left_out) for group in judged), Counter[LeftOut]())
    drops = Counter(group.drop for group in judged)
    return {f"filters/trials_{reason}": trials[reason] for reason in LeftOut} | {
        f"filters/groups_{reason}": drops[reason] for reason in Drop
    }


def _oldest(trajectory: Trajectory) -> int:
    """The oldest weights that sampled: a replica may lag behind the version that the trial started with."""
    tokens = [int(s.versions_T[s.mask_T].min()) for s in trajectory.segments if s.mask_T.any()]
    return min([trajectory.version, *tokens])


def _reason(trajectory: Trajectory, filters: Filters, oldest: int) -> LeftOut | None:
    if trajectory.reward is None:
        return LeftOut.UNSCORED
    if trajectory.outcome in filters.outcomes:
        return LeftOut.OUTCOME
    if filters.max_tokens is not None and trajectory.fidelity.sampled > filters.max_tokens:
        return LeftOut.LONG
    if filters.truncated == "drop" and trajectory.fidelity.truncated:
        return LeftOut.TRUNCATED
    return LeftOut.STALE if _oldest(trajectory) < oldest else None


def _drop(kept: Sequence[Trajectory], least: int, drop_flat: bool) -> Drop | None:
    if len(kept) < least:
        return Drop.SHORT
    if not (drop_flat and _flat(kept)):
        return None
    return {0.0: Drop.ALL_ZERO, 1.0: Drop.ALL_ONE}.get(kept[0].reward or 0.0, Drop.FLAT)


def _flat(kept: Sequence[Trajectory]) -> bool:
    """Whether the verdicts tell the trials apart in nothing; one alone is not flat."""
    rewards = [t.reward for t in kept if t.reward is not None]
    return len(rewards) > 1 and math.isclose(min(rewards), max(rewards))


def _cause(
    trajectories: Sequence[Trajectory], kept: Sequence[Trajectory], left_out: Mapping[LeftOut, int], drop: Drop
) -> str:
    """A sentence about a dropped group, with the first trial that had no verdict if that made it too small."""
    if not trajectories:
        return "a group without trials"
    task = trajectories[0].task
    if drop is not Drop.SHORT:
        return f"{task}: {len(kept)} trials, every reward {kept[0].reward:g}"
    why = ", ".join(f"{n} {reason}" for reason, n in left_out.items())
    told = next((f"; {t.outcome}: {t.detail}" for t in trajectories if t.reward is None), "")
    return f"{task}: {len(kept)} of {len(trajectories)} trials left ({why}){told}"


@dataclass(frozen=True, kw_only=True)
class Streak:
    """Groups in a row that were dropped; a group that is trained on ends it."""

    drops: Mapping[Drop, int] = field(default_factory=dict)
    first: str = ""
    """The cause of the first of them."""

    def after(self, judged: Judged) -> "Streak":
        """The streak with one more group behind it."""
        if judged.drop is None:
            return Streak()
        return Streak(drops=Counter(self.drops) + Counter([judged.drop]), first=self.first or judged.cause)


def refuse_useless(streak: Streak, *, per_step: int, steps: int) -> None:
    """GateError, with the shares of each reason and the first cause, after `steps` steps' worth of dropped groups.

    `per_step` is the groups of a step; `steps` 0 allows any number.
    """
    groups = sum(streak.drops.values())
    if not steps or groups < steps * per_step:
        return
    shares = ", ".join(f"{streak.drops.get(drop, 0) / groups:.0%} {drop}" for drop in Drop)
    raise GateError(
        f"the last {groups} groups taught nothing (rollout.filters.useless_steps {steps} of {per_step} groups): "
        f"{shares}; first: {streak.first}"
    )


def refuse_unscored(trajectories: Sequence[Trajectory], most: float) -> None:
    """GateError with counts and the first cause when more than a share `most` has no reward."""
    bad = [t for t in trajectories if t.reward is None]
    if len(bad) > most * len(trajectories):
        counts = Counter(t.outcome.value for t in bad)
        raise GateError(
            f"{len(bad)} of {len(trajectories)} trials had no verdict (rollout.max_unscored {most}): "
            f"{dict(counts)}; first: {bad[0].task}: {bad[0].outcome.value}: {bad[0].detail}"
        )


def refuse_faulty(trajectories: Sequence[Trajectory], most: float) -> None:
    """GateError with counts and the first cause when more than a share `most` of all turns failed a cross-check."""
    turns = sum(t.fidelity.turns for t in trajectories)
    counts = sum((Counter(t.fidelity.faults) for t in trajectories), Counter())
    if counts.total() > most * turns:
        first = next(t for t in trajectories if t.fidelity.faults)
        raise GateError(
            f"{counts.total()} of {turns} turns failed a cross-check (fidelity.max_faults {most}): {dict(counts)}; "
            f"first: {first.task}#{first.attempt}: {next(iter(first.fidelity.faults))}"
        )
