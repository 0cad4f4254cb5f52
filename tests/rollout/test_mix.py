"""Which harness a trial runs: pure draws, the same in every life of a run."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from harnesses.base import Harness, HarnessNotFetched
from harnesses.codex import Codex
from harnesses.pi import Pi
from lego.errors import UsageError
from lego.rollout.mix import Mix, Mounted, Weighted, mix_problems, mounted, named_by
from lego.rollout.plan import Attempt
from lego.tasks.task import Script, Task

TASK = Task(
    id="one",
    package="toy",
    split="train",
    digest="1",
    base=Path("base"),
    instruction="fix it",
    verifier=Script(folder=Path("tests")),
)
READY = {h.name: Mounted(harness=h, mounts=()) for h in (Codex(), Pi())}
MIX = Mix(weights={"codex": 3.0, "pi": 1.0}, measured="pi", seed=7, ready=READY)


def drawn(mix: Mix, group: int | None, number: int = 0, task: Task = TASK) -> str:
    return mix.of(Attempt(task=task, number=number, group=group)).harness.name


def test_all_trials_of_a_group_run_the_same_harness():
    for group in range(50):
        assert len({drawn(MIX, group, number, replace(TASK, id=f"t{number}")) for number in range(8)}) == 1


def test_harnesses_are_drawn_by_weight():
    counts = Counter(drawn(MIX, group) for group in range(4000))
    assert counts["codex"] / 4000 == pytest.approx(0.75, abs=0.03)


def test_a_draw_follows_from_seed_and_group_alone():
    again = [drawn(replace(MIX), group) for group in reversed(range(100))][::-1]
    assert again == [drawn(MIX, group) for group in range(100)]
    assert again != [drawn(replace(MIX, seed=8), group) for group in range(100)]


def test_measurements_all_run_one_harness_whatever_the_task_says():
    assert {drawn(MIX, None, number) for number in range(50)} == {"pi"}
    assert drawn(MIX, None, 0, replace(TASK, harness="codex")) == "pi"


def test_a_task_that_names_its_harness_runs_it():
    assert {drawn(MIX, group, 0, replace(TASK, harness="pi")) for group in range(50)} == {"pi"}


def test_a_harness_that_only_tasks_name_is_made_ready_beside_the_others():
    mix = replace(MIX, weights={"pi": 1.0}, ready={"pi": READY["pi"]})
    task = replace(TASK, harness="codex")
    with pytest.raises(KeyError):
        drawn(mix, 0, 0, task)
    assert drawn(mix.with_ready({"codex": READY["codex"]}), 0, 0, task) == "codex"


def test_a_harness_that_is_drawn_but_not_ready_is_refused_before_any_trial():
    with pytest.raises(ValueError, match=r"ready: \['pi'\], wanted \['codex'\] too"):
        replace(MIX, ready={"pi": READY["pi"]})


def test_a_task_with_a_harness_that_nobody_knows_is_told_with_the_names():
    known: dict[str, Harness] = {"codex": Codex(), "pi": Pi()}
    assert named_by([TASK, replace(TASK, harness="pi")], known) == {"pi": known["pi"]}
    with pytest.raises(UsageError, match=r"task one: harness: 'telepathy', wanted one of codex, pi"):
        named_by([TASK, replace(TASK, harness="telepathy")], known)


def test_the_first_harness_that_was_not_fetched_is_told(tmp_path: Path):
    with pytest.raises(HarnessNotFetched, match="fetch codex"):
        mounted((Codex(), Pi()), tmp_path)
    assert mounted((), tmp_path) == {}


@pytest.mark.parametrize(
    ("mix", "told"),
    [
        ((Weighted(harness=Codex()), Weighted(harness=Codex(lean=False))), "mix: codex 2 times"),
        ((Weighted(harness=Pi(), weight=0.0),), "mix: pi=0, wanted a weight"),
        ((Weighted(harness=Pi(), weight=-1.0),), "mix: pi=-1, wanted a weight"),
        ((Weighted(harness=Pi(), weight=float("inf")),), "mix: pi=inf, wanted a weight"),
        ((Weighted(harness=Pi(), weight=float("nan")),), "mix: pi=nan, wanted a weight"),
    ],
)
def test_a_mix_that_cannot_be_drawn_from_is_told(mix: tuple[Weighted, ...], told: str):
    (problem,) = mix_problems(mix)
    assert problem.startswith(told)


def test_a_mix_that_can_be_has_no_problems():
    assert list(mix_problems((Weighted(harness=Codex()), Weighted(harness=Pi(), weight=0.5)))) == []
    assert list(mix_problems(())) == []


@pytest.mark.parametrize("wrong", ["", 5, ["pi"]])
def test_a_harness_of_a_task_that_is_no_name_is_refused(wrong: object):
    with pytest.raises(ValueError, match="task one: harness: "):
        Task(**{**vars(TASK), "harness": wrong})  # type: ignore[arg-type]
