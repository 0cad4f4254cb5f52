"""From flags to a recipe."""

from dataclasses import replace

import pytest

from harnesses.codex import Codex
from harnesses.opencode import OpenCode
from harnesses.pi import Pi
from lego.cli import resolve
from lego.learn.algorithms import GRPO, GSPO
from lego.records import CallKind
from lego.rollout.mix import Weighted

DEMO = "recipes/demo.py"


def recipe(*flags: str):
    return resolve([DEMO, *flags], "test")[1]


def test_a_harness_named_by_flag_has_the_fields_that_the_recipe_gives_it():
    assert recipe().harness == recipe("--harness", "codex").harness == Codex(instructions="You fix bugs.")
    assert recipe("--harness", "pi").harness == Pi(instructions="You fix bugs.", tools=("bash",))
    assert recipe("--harness", "opencode").harness == OpenCode()


def test_an_algorithm_is_named_by_flag():
    assert recipe().algorithm == GSPO(scale="none")
    assert recipe("--algorithm", "gspo").algorithm == GSPO(scale="none"), "the recipe's own, with its fields"
    assert recipe("--algorithm", "grpo").algorithm == GRPO()


def test_every_nested_field_is_a_flag():
    got = recipe("--rollout.group-size", "3", "--trainer.world-size", "2", "--sampling.temperature", "0.5")
    assert (got.rollout.group_size, got.trainer.world_size, got.sampling.temperature) == (3, 2, 0.5)


def test_a_mix_is_named_by_flag_with_the_fields_that_the_recipe_gives_its_harnesses():
    codex, pi = recipe().harness, recipe("--harness", "pi").harness
    got = recipe("--mix", "codex=2", "pi")
    assert got.mix == (Weighted(harness=codex, weight=2.0), Weighted(harness=pi, weight=1.0))
    assert got.harnesses == (codex, pi) and got.measured_harness == codex


@pytest.mark.parametrize("wrong", ["telepathy=1", "codex=much"])
def test_a_mix_that_cannot_be_read_ends_with_the_flag_and_the_word(wrong: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        recipe("--mix", wrong)
    told = capsys.readouterr().err
    assert end.value.code == 2 and "--mix" in told and wrong in told


def test_a_harness_of_the_mix_is_the_one_that_flag_and_validation_name():
    mixed = replace(recipe(), mix=(Weighted(harness=OpenCode(tools=("bash",))),), other_harnesses=())
    assert mixed.known_harnesses["opencode"] == OpenCode(tools=("bash",))
    assert mixed.known_harnesses["pi"] == Pi() and mixed.known_harnesses["codex"] == mixed.harness
    named = replace(mixed, validation=replace(mixed.validation, harness="opencode"))
    assert named.measured_harness == OpenCode(tools=("bash",)) and named.harnesses == (OpenCode(tools=("bash",)),)
    assert mixed.harnesses == (OpenCode(tools=("bash",)), mixed.harness), "measurements run the recipe's own"


def test_the_kinds_of_calls_that_train_are_named_by_flag():
    assert recipe().rollout.train_calls == (CallKind.MAIN, CallKind.SUBAGENT, CallKind.SUMMARY)
    assert recipe("--rollout.train-calls", "main", "side").rollout.train_calls == (CallKind.MAIN, CallKind.SIDE)


def test_a_mix_a_validation_or_a_policy_of_calls_that_cannot_be_is_told():
    pi, rollout, validation = Weighted(harness=Pi(), weight=0.0), recipe().rollout, recipe().validation
    wrong = replace(
        recipe(),
        mix=(pi,),
        rollout=replace(rollout, train_calls=()),
        validation=replace(validation, harness="telepathy"),
    )
    assert [p.partition(",")[0] for p in wrong.problems()] == [
        "mix: pi=0",
        "validation.harness: 'telepathy'",
        "rollout.train_calls: none",
    ]
    twice = replace(recipe(), rollout=replace(rollout, train_calls=(CallKind.MAIN, CallKind.MAIN)))
    (problem,) = twice.problems()
    assert problem.startswith("rollout.train_calls: main main, wanted some of main, subagent, summary, side")
