"""What is not trained on is left out in one place, with a reason; a run that learns nothing stops with the cause."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from lego.errors import GateError
from lego.learn.advantages import advantages
from lego.records import Fidelity, Outcome, Trajectory
from lego.rollout.credit import Rules, credit, length
from lego.rollout.filters import (
    Drop,
    Filters,
    Judged,
    LeftOut,
    Streak,
    counts,
    judge,
    refuse_faulty,
    refuse_unscored,
    refuse_useless,
)
from tests.factories import segment, trajectory

RULES = Rules(advantages=advantages)
DEFAULTS = Filters()
KEEPS_FLAT = Rules(advantages=advantages, drop_flat_groups=False)


def judged(
    trajectories: Sequence[Trajectory],
    filters: Filters = DEFAULTS,
    rules: Rules = RULES,
    cut: Sequence[int] = (),
    oldest: int = 0,
) -> Judged:
    """The judgement where the trials at the places `cut` were truncated."""
    trials = [
        replace(t, fidelity=replace(t.fidelity, truncated=True)) if i in cut else t for i, t in enumerate(trajectories)
    ]
    return judge(trials, filters, rules, oldest=oldest)


def rewarded(*rewards: float | None, task: str = "t") -> list[Trajectory]:
    return [trajectory(task, r, outcome=Outcome.SANDBOX_ERROR if r is None else None) for r in rewards]


def sampled_by(version: int, *token_versions: int) -> Trajectory:
    own = segment(2 * len(token_versions))
    versions = own.versions_T.copy()
    versions[own.mask_T] = token_versions
    return replace(trajectory("t", 1.0, own=(replace(own, versions_T=versions),)), version=version)


def test_without_filters_only_trials_without_a_reward_are_left_out():
    trials = rewarded(1.0, None, 0.0)
    got = judged(trials)
    assert (got.kept, got.left_out, got.drop) == ((trials[0], trials[2]), {LeftOut.UNSCORED: 1}, None)


def test_each_filter_leaves_out_its_own_and_says_so():
    good, long, cut, old, spoiled = (replace(t, segments=(), version=2) for t in rewarded(1.0, 0.0, 0.0, 1.0, None))
    long, old = replace(long, fidelity=Fidelity(sampled=101, trained=101)), replace(old, version=1)
    filters = Filters(max_tokens=100, truncated="drop")
    got = judged([good, long, cut, old, spoiled, good], filters, KEEPS_FLAT, cut=[2], oldest=2)
    assert got.left_out == {LeftOut.LONG: 1, LeftOut.TRUNCATED: 1, LeftOut.STALE: 1, LeftOut.UNSCORED: 1}
    assert got.kept == (good, good)


def test_max_tokens_is_the_most_that_is_kept():
    trials = rewarded(1.0, 0.0, 1.0)
    most = trials[0].fidelity.sampled
    assert len(judged(trials, Filters(max_tokens=most)).kept) == 3
    assert judged(trials, Filters(max_tokens=most - 1)).left_out == {LeftOut.LONG: 3}


def test_an_outcome_can_be_left_out():
    got = judged(rewarded(1.0, 0.0, 1.0), Filters(outcomes=("failed",)), KEEPS_FLAT)
    assert ([t.reward for t in got.kept], got.left_out) == ([1.0, 1.0], {LeftOut.OUTCOME: 1})


def test_truncated_trials_are_kept_unless_they_are_to_be_dropped():
    trials = rewarded(1.0, 0.0, 0.0)
    assert len(judged(trials, cut=[1]).kept) == 3
    assert len(judged(trials, Filters(truncated="drop"), cut=[1]).kept) == 2


def test_a_truncated_trial_has_no_token_in_loss_counts_or_lengths():
    trials = [trajectory("t", 1.0), trajectory("t", 0.0, segments=5), trajectory("t", 0.0)]
    lengths: list[int] = []
    rules = replace(RULES, shaped=lambda reward, tokens: (lengths.append(tokens), reward)[1])
    got = judged(trials, Filters(truncated="drop"), cut=[1])
    credited = credit([got.kept], rules)
    own = length(trials[0]) + length(trials[2])
    assert credited.tokens == sum(int(s.segment.mask_T.sum()) for s in credited.samples) == sum(lengths) == own
    assert credited.unused_tokens == 0
    assert [s.advantage for s in credited.samples] == [0.5, -0.5], "nor is its reward in the baseline"


@pytest.mark.parametrize(
    ("rewards", "drop"),
    [
        ((0.0, 0.0, 0.0), Drop.ALL_ZERO),
        ((1.0, 1.0), Drop.ALL_ONE),
        ((0.1, 0.1, 0.1), Drop.FLAT),
        ((0.1 + 0.2, 0.3, 0.3), Drop.FLAT),
        ((1.0, None, 1.0), Drop.ALL_ONE),
        ((1.0, None), Drop.SHORT),
        ((None, None), Drop.SHORT),
        ((), Drop.SHORT),
        ((1.0, 0.0), None),
        ((1.0, 0.0, None), None),
    ],
)
def test_a_group_is_dropped_with_a_reason_and_then_nothing_of_it_is_kept(rewards, drop):
    got = judged(rewarded(*rewards))
    assert got.drop == drop
    assert bool(got.kept) == (drop is None) == (not got.cause)


def test_a_group_that_a_filter_made_flat_is_flat():
    got = judged(rewarded(1.0, 1.0, 0.0), Filters(truncated="drop"), cut=[2])
    assert (got.drop, got.left_out) == (Drop.ALL_ONE, {LeftOut.TRUNCATED: 1})


def test_flat_groups_and_lone_trials_are_the_algorithms_to_keep():
    assert judged(rewarded(0.0, 0.0), rules=KEEPS_FLAT).drop is None
    assert judged(rewarded(0.0), rules=replace(RULES, least_group=1)).drop is None, "one alone is not flat"


def test_the_recipe_may_want_more_survivors_than_the_algorithm_but_not_fewer():
    assert judged(rewarded(1.0, 0.0, None), Filters(least=3)).drop is Drop.SHORT
    assert judged(rewarded(1.0, None, None), Filters(least=1)).drop is Drop.SHORT


def test_flat_is_what_the_verdicts_say_whatever_counts_in_the_end():
    shaped = replace(RULES, shaped=lambda reward, tokens: reward - tokens)
    assert judged([trajectory("t", 1.0, segments=3), trajectory("t", 1.0)], rules=shaped).drop is Drop.ALL_ONE


def test_a_trial_is_as_old_as_its_oldest_token():
    def stale(trial: Trajectory, oldest: int) -> bool:
        return judged([trial], oldest=oldest).left_out == {LeftOut.STALE: 1}

    assert not stale(sampled_by(3, 3, 4), oldest=3)
    assert stale(sampled_by(3, 3, 4), oldest=4)
    assert stale(sampled_by(4, 2, 4), oldest=3), "a replica that lagged behind"
    assert stale(replace(trajectory("t", 0.0, own=()), version=0), oldest=1), "a trial without tokens"


def test_counts_name_every_reason_and_tell_trials_from_groups():
    got = counts([judged(rewarded(1.0, 0.0, None)), judged(rewarded(0.0, 0.0)), judged(rewarded(None, 0.0))])
    assert {name: n for name, n in got.items() if n} == {
        "filters/trials_unscored": 2,
        "filters/groups_all_zero": 1,
        "filters/groups_short": 1,
    }
    assert len(got) == len(LeftOut) + len(Drop)


def streak_of(*groups: Sequence[Trajectory]) -> Streak:
    streak = Streak()
    for group in groups:
        streak = streak.after(judged(group))
    return streak


def test_a_run_whose_every_group_is_dropped_stops_with_shares_and_the_first_cause():
    useless = [rewarded(0.0, 0.0, 0.0, task="first"), rewarded(1.0, 1.0), rewarded(0.0, 0.0), rewarded(1.0, None)]
    refuse_useless(streak_of(*useless[:3]), per_step=2, steps=2)
    with pytest.raises(GateError) as stop:
        refuse_useless(streak_of(*useless), per_step=2, steps=2)
    assert str(stop.value) == (
        "the last 4 groups taught nothing (rollout.filters.useless_steps 2 of 2 groups): "
        "25% short, 50% all_zero, 25% all_one, 0% flat; first: first: 3 trials, every reward 0"
    )


def test_groups_that_the_environment_spoiled_stop_the_run_with_its_first_error():
    spoiled = [replace(t, detail="no user namespaces") for t in rewarded(None, None)]
    with pytest.raises(
        GateError, match=r"100% short.*first: t: 0 of 2 trials left \(2 unscored\); sandbox_error: no u"
    ):
        refuse_useless(streak_of(spoiled), per_step=1, steps=1)


def test_a_group_that_teaches_ends_the_streak_and_0_steps_never_stop():
    streak = streak_of(rewarded(0.0, 0.0), rewarded(1.0, 0.0), rewarded(1.0, 1.0))
    assert (streak.drops, streak.first) == ({Drop.ALL_ONE: 1}, "t: 2 trials, every reward 1")
    refuse_useless(streak, per_step=1, steps=2)
    refuse_useless(streak, per_step=1, steps=0)


@pytest.mark.parametrize(
    ("filters", "told"),
    [
        (Filters(), ""),
        (Filters(max_tokens=0), "max_tokens: 0, wanted 1 or more"),
        (Filters(least=0), "least: 0, wanted 1 to rollout.group_size 8"),
        (Filters(least=9), "least: 9, wanted 1 to rollout.group_size 8"),
        (Filters(useless_steps=-1), "useless_steps: -1, wanted 0 or more"),
        (Filters(outcomes=("timeout",)), "outcomes: timeout, wanted solved or failed"),  # type: ignore
        (Filters(outcomes=("solved", "failed")), "outcomes: solved and failed, wanted one"),
        (Filters(outcomes=("failed",)), "outcomes: failed, wanted an algorithm that keeps flat groups"),
    ],
)
def test_filters_that_cannot_be_are_told_by_field(filters: Filters, told: str):
    problems = list(filters.problems(group_size=8, drop_flat=True))
    assert len(problems) == bool(told)
    assert not told or problems[0].startswith(f"rollout.filters.{told}")


def test_too_many_trials_without_a_verdict_stop_the_run_with_the_first_cause():
    refuse_unscored(rewarded(None, 0.0), most=0.5)
    with pytest.raises(GateError, match=r"2 of 3.*max_unscored 0\.5.*sandbox_error"):
        refuse_unscored(rewarded(None, None, 0.0), most=0.5)


def test_too_many_turns_that_failed_a_cross_check_stop_the_run_with_the_first_cause():
    good = replace(trajectory("good", 0.0), fidelity=Fidelity(turns=98))
    bad = replace(trajectory("bad", 0.0), fidelity=Fidelity(turns=2, faults={"logprobs": 1, "versions": 1}))
    refuse_faulty([good, bad], most=0.02)
    refuse_faulty([], most=0.0)
    with pytest.raises(GateError, match=r"2 of 100 turns.*max_faults 0.01.*first: bad#0: logprobs"):
        refuse_faulty([good, bad], most=0.01)
