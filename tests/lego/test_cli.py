"""From flags to a recipe."""

from harnesses.codex import Codex
from harnesses.opencode import OpenCode
from harnesses.pi import Pi
from lego.cli import resolve
from lego.learn.algorithms import GRPO, GSPO

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
