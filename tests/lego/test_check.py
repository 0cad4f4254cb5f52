"""`lego.check` tells what a recipe resolves to and all that is wrong with it, without anything heavy."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lego.check import check
from lego.cli import load_recipe

ROOT = Path(__file__).parent.parent.parent
DEMO = str(ROOT / "recipes" / "demo.py")
LARGE = str(ROOT / "recipes" / "gspo_opencode.py")


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder that looks like a model to whoever only looks for its config."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    return str(tmp_path)


def read(text: str) -> tuple[dict, list[str]]:
    """The resolved recipe, and the lines after it."""
    recipe, end = json.JSONDecoder().raw_decode(text)
    return recipe, text[end:].strip().splitlines()


def test_a_recipe_that_can_run_is_ok(model: str, capsys: pytest.CaptureFixture[str]):
    assert check([DEMO, "--policy", model]) == 0
    recipe, lines = read(capsys.readouterr().out)
    assert lines == ["ok"]
    assert recipe["class"] == "lego.recipe.Recipe" and recipe["harness"]["class"] == "harnesses.codex.Codex"


def test_flags_are_part_of_what_is_told(model: str, capsys: pytest.CaptureFixture[str]):
    assert check([DEMO, "--policy", model, "--harness", "opencode", "--trainer.lr", "0.25"]) == 0
    recipe, _ = read(capsys.readouterr().out)
    assert recipe["policy"] == model and recipe["trainer"]["lr"] == 0.25
    assert recipe["harness"]["class"] == "harnesses.opencode.OpenCode"


def test_all_problems_are_told_and_counted(model: str, capsys: pytest.CaptureFixture[str]):
    assert check([DEMO, "--policy", model, "--steps", "0", "--sampling.top-p", "0.5"]) == 2
    _, lines = read(capsys.readouterr().out)
    assert len(lines) == 3 and lines[0].startswith("steps: 0, ") and lines[1].startswith("sampling: top_p")
    assert lines[2] == "2 problems"


DENSE = {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}
MOE = DENSE | {"model_type": "qwen3_moe", "num_experts": 8}


@pytest.mark.parametrize(
    ("config", "flags", "told"),
    [
        (MOE, "--trainer.world-size 3 --trainer.expert-parallel 3", "trainer.expert_parallel: 3, wanted a divisor"),
        (MOE, "--trainer.world-size 4 --trainer.tensor-parallel 4", "trainer.tensor_parallel: 4, wanted a divisor"),
        (MOE, "--trainer.world-size 3 --trainer.replicate 2", "trainer.world_size: 3, wanted a multiple of replicate"),
        (MOE, "--trainer.context-parallel 2", "trainer.context_parallel: 2, wanted 1"),
        (MOE, "--trainer.world-size 0", "trainer.world_size: 0, wanted at least 1"),
        (MOE, "--trainer.lr 0", "trainer.lr: 0.0, wanted more than 0"),
        (MOE, "--trainer.lr-decay linear --trainer.lr-warmup-steps 9", "trainer.steps: 5, wanted more than lr_warmup"),
        (DENSE, "--engine.routing True", "engine.routing: True, but the policy has no experts"),
        (DENSE, "--trainer.world-size 2 --trainer.expert-parallel 2", "trainer.expert_parallel: 2, wanted 1"),
        (MOE, "--algorithm grpo --rollout.group-size 1", "rollout.group_size: 1, wanted 2 or more for grpo"),
        (MOE, "--engine.max-model-len 9000", "trainer.token_budget: 8192, wanted at least engine.max_model_len 9000"),
        ({"model_type": "t5"}, "--steps 1", "policy: model_type 't5', wanted one of qwen3, "),
        (MOE, "--algorithm ppo --trainer.over-budget split", "trainer.over_budget: split, wanted error or drop"),
        (MOE, "--resume /nowhere", "resume: /nowhere, wanted a checkpoint of the trainer"),
    ],
)
def test_a_trainer_that_cannot_be_is_told_by_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict, flags: str, told: str
):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert check([DEMO, "--policy", str(tmp_path), *flags.split()]) == 2
    _, lines = read(capsys.readouterr().out)
    assert lines[0].startswith(told) and lines[1:] == ["1 problem"]


def test_l08_a_head_of_another_dtype_than_the_trainers_is_refused(model: str):
    recipe = load_recipe(Path(DEMO))
    engine = replace(recipe.engine, extra=("--hf-overrides.head_dtype", "bfloat16"))
    problems = list(replace(recipe, policy=Path(model), engine=engine).problems())
    assert len(problems) == 1 and problems[0].startswith("engine.extra: --hf-overrides")


def test_an_optimised_interpreter_refuses_the_same(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    argv = [sys.executable, "-O", "-m", "lego.check", DEMO, "--policy", str(tmp_path), "--rollout.group-size", "1"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and read(done.stdout)[1][0].startswith("rollout.group_size: 1, wanted 2 or more")


@pytest.mark.parametrize(
    "flags",
    [
        "--algorithm sao --rollout.group-size 1",
        "--algorithm ppo --rollout.group-size 1",
        "--engine.max-model-len 9000 --trainer.over-budget drop",
        "--trainer.world-size 4 --trainer.expert-parallel 2 --trainer.replicate 2",
        "--rollout.tasks-per-step 32 --rollout.group-size 8 --trainer.world-size 4 --trainer.expert-parallel 4",
    ],
)
def test_a_trainer_that_can_be_is_not_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str):
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    assert check([DEMO, "--policy", str(tmp_path), *flags.split()]) == 0, capsys.readouterr().out


def test_the_large_recipe_lacks_its_model_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert check([LARGE, "--policy", str(tmp_path / "none")]) == 2
    recipe, lines = read(capsys.readouterr().out)
    assert lines == [f"policy: {tmp_path / 'none'} has no config.json; wanted a model folder in HF layout", "1 problem"]
    assert recipe["rollout"]["staleness"] == 1 and recipe["engine"]["env"] == {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}


def test_the_command_ends_with_the_status_and_imports_nothing_heavy(tmp_path: Path):
    code = (
        "import sys; from lego.check import check; status = check(sys.argv[1:]); "
        "sys.exit(99 if {'torch', 'vllm'} & set(sys.modules) else status)"
    )
    done = subprocess.run([sys.executable, "-c", code, LARGE, "--policy", str(tmp_path)], cwd=ROOT, capture_output=True)
    assert done.returncode == 2, done.stderr


def test_a_recipe_that_is_not_there_is_one_line():
    command = [sys.executable, "-m", "lego.check", "recipes/dem.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: no recipe file recipes/dem.py; did you mean recipes/demo.py?\n"
