"""Times of a run: derived so that each holds what is inside it, and refused by field where they do not."""

import asyncio
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lego.budget import MARGIN_S, Budget, Crew, Times, box_s, check_tasks
from lego.check import check
from lego.cli import load_recipe
from lego.engine.scripted import ScriptedEngine
from lego.engine.timely import TimelyEngine
from lego.errors import EngineError, UsageError
from lego.records import Sampling
from lego.tasks.task import PytestSuite, Script, Task

ROOT = Path(__file__).parent.parent.parent
CREW = Crew(group_size=8, tasks_per_step=16, concurrency=6)
TASK = Task(
    id="pkg/task",
    package="pkg",
    split="train",
    digest="1",
    base=Path("/base"),
    instruction="",
    verifier=Script(folder=Path("/tests"), timeout_s=100.0),
)


@pytest.mark.parametrize(
    ("group_size", "tasks_per_step", "concurrency", "harness_s"),
    itertools.product((1, 2, 64), (1, 100), (1, 3, 1000), (0.1, 60.0, 7200.0)),
)
def test_what_follows_from_the_harness_time_holds_together(
    group_size: int, tasks_per_step: int, concurrency: int, harness_s: float
):
    crew = Crew(group_size=group_size, tasks_per_step=tasks_per_step, concurrency=concurrency)
    times = Budget(harness_s=harness_s).times(crew)
    assert times.call_s < times.harness_s < times.trial_s < times.group_s < times.step_s < math.inf
    assert times.trial_s >= box_s(harness_s) + 2 * box_s(times.verdict_s) and box_s(harness_s) >= harness_s + MARGIN_S
    assert times.step_s > math.ceil(group_size * tasks_per_step / concurrency) * times.trial_s


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"harness_s": 0.0}, "budget.harness_s: 0.0, wanted more than 0 and finite"),
        ({"harness_s": math.nan}, "budget.harness_s: nan, wanted more than 0 and finite"),
        ({"verdict_s": math.inf}, "budget.verdict_s: inf, wanted more than 0 and finite"),
        ({"step_s": -1.0}, "budget.step_s: -1.0, wanted more than 0 and finite"),
        ({"call_s": 60.0}, "budget.call_s: 60.0, wanted less than budget.harness_s 60.0"),
        ({"trial_s": 659.0}, "budget.trial_s: 659.0, wanted 660.0 or more: harness_s 60.0 + 3 x verdict_s 120.0 + 60"),
        ({"group_s": 660.0}, "budget.group_s: 660.0, wanted more than budget.trial_s 660.0"),
        ({"step_s": 700.0, "group_s": 700.0}, "budget.step_s: 700.0, wanted more than budget.group_s 700.0"),
    ],
)
def test_a_rule_that_is_broken_is_told_by_field_value_and_range(changed: dict[str, float], told: str):
    budget = replace(Budget(harness_s=60.0, verdict_s=120.0), **changed)
    (problem,) = budget.problems(CREW)
    assert problem.startswith(told)
    with pytest.raises(ValueError, match=r"budget\."):
        budget.times(CREW)


def test_every_broken_rule_is_told():
    times = {"call_s": 9.0, "harness_s": 8.0, "verdict_s": 8.0, "trial_s": 7.0, "group_s": 6.0, "step_s": 5.0}
    problems = list(Budget(**times).problems(CREW))
    assert [problem.partition(":")[0] for problem in problems] == [
        "budget.call_s",
        "budget.trial_s",
        "budget.group_s",
        "budget.step_s",
    ]
    with pytest.raises(ValueError, match=r"budget\.call_s"):
        Times(**times)


def test_a_recipe_is_checked_before_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    flags = ["--budget.call-s", "90", "--rollout.limits.deadline-s", "30"]
    assert check([str(ROOT / "recipes" / "demo.py"), "--policy", str(tmp_path), *flags]) == 2
    text = capsys.readouterr().out
    _, end = json.JSONDecoder().raw_decode(text)
    assert text[end:].strip().splitlines() == [
        "rollout.limits.deadline_s: 30.0, wanted none: it follows from budget.harness_s",
        "budget.call_s: 90.0, wanted less than budget.harness_s 60.0",
        "2 problems",
    ]


SUITE = PytestSuite(
    tests=Path("/t"), test_file="t.py", testenv=Path("/e"), wall_s=61.0, fail_to_pass=("t::a",), pass_to_pass=()
)


@pytest.mark.parametrize(
    ("task", "told"),
    [
        (TASK, "task pkg/task: verifier.timeout_s: 100.0, wanted more than 0 and at most budget.verdict_s 60.0"),
        (replace(TASK, verifier=SUITE), "task pkg/task: verifier.wall_s: 61.0, wanted more than 0 and at most"),
        (
            replace(TASK, verifier=replace(SUITE, wall_s=1.0), harness_s=31.0),
            "task pkg/task: harness_s: 31.0, wanted more than 0 and at most budget.harness_s 30.0",
        ),
    ],
)
def test_a_task_that_asks_for_more_time_than_there_is_is_named(task: Task, told: str):
    fits = replace(task, verifier=replace(SUITE, wall_s=60.0), harness_s=30.0)
    check_tasks([fits], Budget(harness_s=30.0, verdict_s=60.0))
    with pytest.raises(UsageError) as caught:
        check_tasks([fits, task], Budget(harness_s=30.0, verdict_s=60.0))
    assert str(caught.value).startswith(told)


async def test_a_model_call_that_hangs_is_the_engines_error_and_is_aborted():
    slow = ScriptedEngine(lambda prompt: [1, 2], seconds=30.0)
    with pytest.raises(EngineError, match=r"longer than budget\.call_s 0\.05"):
        await TimelyEngine(slow, 0.05).generate(np.zeros(1, np.int32), Sampling(), session="s")
    assert slow.cancelled == slow.calls
    quick = ScriptedEngine(lambda prompt: [1, 2])
    answer = await TimelyEngine(quick, 5.0).generate(np.zeros(1, np.int32), Sampling(), session="s")
    assert answer.output_ids.tolist() == [1, 2]


async def test_an_engines_own_timeout_is_not_taken_for_the_budgets():
    def answer(prompt):
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await TimelyEngine(ScriptedEngine(answer), 5.0).generate(np.zeros(1, np.int32), Sampling(), session="s")


async def test_a_call_that_its_harness_gave_up_is_cancelled_not_an_error():
    slow = ScriptedEngine(lambda prompt: [1], seconds=30.0)
    call = asyncio.create_task(TimelyEngine(slow, 30.0).generate(np.zeros(1, np.int32), Sampling(), session="s"))
    await asyncio.sleep(0.02)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_run_gives_its_parts_the_recipes_times(tmp_path: Path):
    from lego.run import _Run

    demo = load_recipe(ROOT / "recipes" / "demo.py")
    budget = Budget(harness_s=30.0, verdict_s=40.0, call_s=0.05, group_s=500.0, step_s=600.0)
    recipe = replace(demo, budget=budget, steps=1, rollout=replace(demo.rollout, group_size=2))
    ready: Any = SimpleNamespace(mix=SimpleNamespace(of=None), experts=0, renderer=None)
    nothing: Any = None
    run = _Run(recipe, ready, tmp_path, nothing, nothing, tmp_path)
    async with run._trials(ScriptedEngine(lambda prompt: [1], seconds=30.0)) as trials:
        with pytest.raises(EngineError, match=r"budget\.call_s 0\.05"):
            await trials.proxy.engine.generate(np.zeros(1, np.int32), Sampling(), session="s")
        assert trials.times == budget.times(recipe.crew) and trials.times.trial_s == 390.0
