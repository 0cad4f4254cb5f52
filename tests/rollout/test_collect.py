"""Trials run some at a time, come back in order, and too many without a verdict stop the run."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lego.errors import GateError
from lego.records import Fidelity, Outcome
from lego.rollout.collect import (
    Patience,
    attempts,
    collect,
    refuse_faulty,
    refuse_unscored,
    solved_and_asked,
    tasks_of_step,
)
from tests.factories import trajectory

TASKS = [SimpleNamespace(id=str(i)) for i in range(5)]


async def test_no_more_trials_run_at_once_than_asked_and_results_keep_their_order():
    alive, most, heard = 0, 0, []

    async def run(attempt, cut):
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        await asyncio.sleep(0.001 * (5 - int(attempt.task.id)))
        alive -= 1
        return trajectory(f"{attempt.task.id}#{attempt.number}", 1.0)

    got = await collect(attempts(TASKS, 2), run, concurrency=3, done=lambda t: heard.append(t.task))
    assert most == 3
    assert [t.task for t in got] == [f"{i}#{k}" for i in range(5) for k in range(2)]
    assert sorted(heard) == sorted(t.task for t in got)


async def test_a_bug_in_one_trial_ends_the_others():
    ended = []

    async def run(attempt, cut):
        if attempt.number == 1:
            raise ZeroDivisionError
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(attempt.number)

    with pytest.raises(ExceptionGroup):
        await collect(attempts(TASKS[:1], 3), run, concurrency=3, done=lambda t: None)
    assert sorted(ended) == [0, 2]


def trials_of(lengths):
    """A `run` whose trials take the given seconds by task and number, or end at their cut."""

    async def run(attempt, cut):
        loop, wanted = asyncio.get_running_loop(), lengths.get((attempt.task.id, attempt.number), 0.0)
        await asyncio.sleep(min(wanted, max(cut.at - loop.time(), 0.0)))
        if loop.time() < cut.at:
            return trajectory(attempt.task.id, 1.0)
        return replace(trajectory(attempt.task.id, None, outcome=Outcome.CANCELLED), detail=cut.cause)

    return run


async def gathered(lengths, tasks, each, **options):
    got = await collect(attempts(TASKS[:tasks], each), trials_of(lengths), done=lambda t: None, **options)
    return [(t.outcome.value, t.detail) for t in got]


async def test_a_group_that_takes_too_long_goes_on_with_what_it_has():
    got = await gathered({("0", 1): 60.0}, 2, 2, concurrency=4, patience=Patience(group_s=0.1, step_s=30.0))
    over = "the trials of its group took longer than budget.group_s 0.1"
    assert got == [("solved", ""), ("cancelled", over), ("solved", ""), ("solved", "")]


async def test_the_clock_of_a_group_starts_with_its_first_trial():
    lengths = {("0", 0): 0.15, ("1", 0): 0.15}
    got = await gathered(lengths, 2, 1, concurrency=1, patience=Patience(group_s=0.25, step_s=30.0))
    assert got == [("solved", ""), ("solved", "")], "the second waited for its turn longer than it may take"


async def test_a_step_that_takes_too_long_goes_on_with_what_it_has_and_starts_nothing_more():
    lengths = {("1", 0): 60.0, ("2", 0): 60.0}
    got = await gathered(lengths, 3, 1, concurrency=1, patience=Patience(group_s=30.0, step_s=0.1))
    over = "the trials of its step took longer than budget.step_s 0.1"
    assert got == [("solved", ""), ("cancelled", over), ("cancelled", over)]


async def test_a_step_that_lost_too_many_trials_stops_the_run_with_the_cause():
    lengths = {("0", 1): 60.0, ("0", 2): 60.0}
    patience = Patience(group_s=0.05, step_s=30.0)
    got = await collect(
        attempts(TASKS[:1], 3), trials_of(lengths), concurrency=3, done=lambda t: None, patience=patience
    )
    with pytest.raises(GateError, match=r"2 of 3 trials had no verdict.*cancelled.*longer than budget\.group_s 0\.05"):
        refuse_unscored(got, most=0.5)
    assert solved_and_asked(got) == (1, 1), "what was cut says nothing about the policy"


def test_each_pass_visits_every_task_once_in_an_order_of_its_own():
    steps = [tasks_of_step(TASKS, 2, step, seed=3) for step in range(5)]
    visits = [task.id for step in steps for task in step]
    assert sorted(visits[:5]) == sorted(visits[5:]) == ["0", "1", "2", "3", "4"]
    assert visits[:5] != visits[5:]
    assert steps == [tasks_of_step(TASKS, 2, step, seed=3) for step in range(5)]
    assert steps != [tasks_of_step(TASKS, 2, step, seed=4) for step in range(5)]


def test_too_many_trials_without_a_verdict_stop_the_run_with_the_first_cause():
    bad = trajectory("t", None, outcome=Outcome.SANDBOX_ERROR)
    refuse_unscored([bad, trajectory("t", 0.0)], most=0.5)
    with pytest.raises(GateError, match=r"2 of 3.*sandbox_error"):
        refuse_unscored([bad, bad, trajectory("t", 0.0)], most=0.5)


def test_too_many_turns_that_failed_a_cross_check_stop_the_run_with_the_first_cause():
    good = replace(trajectory("good", 0.0), fidelity=Fidelity(turns=98))
    bad = replace(trajectory("bad", 0.0), fidelity=Fidelity(turns=2, faults={"logprobs": 1, "versions": 1}))
    refuse_faulty([good, bad], most=0.02)
    refuse_faulty([], most=0.0)
    with pytest.raises(GateError, match=r"2 of 100 turns.*max_faults 0.01.*first: bad#0: logprobs"):
        refuse_faulty([good, bad], most=0.01)


def test_a_solve_rate_leaves_out_what_the_environment_spoiled_and_counts_what_the_agent_spoiled():
    ends = [
        trajectory("t", 1.0),
        trajectory("t", 0.0),
        trajectory("t", None, outcome=Outcome.TURN_LIMIT),
        trajectory("t", None, outcome=Outcome.ENGINE_ERROR),
    ]
    assert solved_and_asked(ends) == (1, 3)
