"""`lego.check` tells what a recipe resolves to and all that is wrong with it, without anything heavy."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lego.check import check
from lego.cli import load_recipe
from lego.learn.algorithms import GRPO, PPO, SAO, Algorithm

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
        (MOE, "--trainer.lr inf", "trainer.lr: inf, wanted more than 0 and finite"),
        (MOE, "--trainer.grad-clip nan", "trainer.grad_clip: nan, wanted more than 0"),
        (MOE, "--trainer.grad-clip -1", "trainer.grad_clip: -1.0, wanted more than 0"),
        (MOE, "--trainer.weight-decay -1", "trainer.weight_decay: -1.0, wanted 0 or more"),
        (MOE, "--trainer.betas 0.9 1", "trainer.betas: (0.9, 1.0), wanted two numbers"),
        (MOE, "--trainer.stall-s 0", "trainer.stall_s: 0.0, wanted 1 or more"),
        (MOE, "--trainer.start-timeout-s nan", "trainer.start_timeout_s: nan, wanted more than 0"),
        (
            MOE,
            "--trainer.world-size 2 --trainer.tensor-parallel 2 --trainer.token-budget 8191",
            "trainer.token_budget: 8191, wanted a multiple of tensor_parallel 2",
        ),
        (MOE, "--trainer.lr-decay linear --trainer.lr-warmup-steps 9", "trainer.steps: 5, wanted more than lr_warmup"),
        (DENSE, "--engine.routing True", "engine.routing: True, but the policy has no experts"),
        (DENSE, "--trainer.world-size 2 --trainer.expert-parallel 2", "trainer.expert_parallel: 2, wanted 1"),
        (MOE, "--algorithm grpo --rollout.group-size 1", "rollout.group_size: 1, wanted 2 or more for grpo"),
        (MOE, "--engine.max-model-len 9000", "trainer.token_budget: 8192, wanted at least engine.max_model_len 9000"),
        ({"model_type": "t5"}, "--steps 1", "policy: model_type 't5', wanted one of qwen3, "),
        (MOE, "--algorithm ppo --trainer.over-budget split", "trainer.over_budget: split, wanted error or drop"),
        (MOE, "--resume /nowhere", "resume: /nowhere: no checkpoint here"),
    ],
)
def test_a_trainer_that_cannot_be_is_told_by_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict, flags: str, told: str
):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert check([DEMO, "--policy", str(tmp_path), *flags.split()]) == 2
    _, lines = read(capsys.readouterr().out)
    assert lines[0].startswith(told) and lines[1:] == ["1 problem"]


@pytest.mark.parametrize(
    "words",
    [
        ("--hf-overrides.head_dtype", "bfloat16"),
        ("--hf_overrides.head_dtype=bfloat16",),
        ("--hf-overrides", '{"head_dtype": "bfloat16"}'),
        ("--logprobs-mode", "raw_logprobs"),
        ("--logprobs_mode=raw_logprobs",),
        ("--generation-config", "auto"),
    ],
)
def test_l08_l01_an_engine_argument_that_would_part_its_logprobs_from_the_trainers_is_refused(model: str, words: tuple):
    recipe = load_recipe(Path(DEMO))
    problems = list(replace(recipe, policy=Path(model), engine=replace(recipe.engine, extra=words)).problems())
    assert len(problems) == 1 and problems[0].startswith(f"engine.extra: {words[0]}, which lego sets itself")


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (4, None),
        (5, "steps: 5, wanted more than the 5 that "),
        ("?", "resume: {0}/step-000005: its meta.json cannot be"),
    ],
)
def test_a_checkpoint_that_leaves_nothing_to_do_or_is_damaged_is_told_at_once(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], step: object, told: str | None
):
    folder = tmp_path / "step-000005"
    folder.mkdir()
    meta = {"format": 1, "step": step, "model_type": "qwen3_moe", "layout": {}, "metrics": {}, "critic": False}
    (folder / "meta.json").write_text("{" if step == "?" else json.dumps(meta))
    assert check([DEMO, "--policy", model, "--resume", str(tmp_path)]) == (2 if told else 0)
    _, lines = read(capsys.readouterr().out)
    assert lines[0].startswith(told.format(tmp_path) if told else "ok")


def test_checkpoints_deeper_than_a_run_looks_for_them_are_not_promised(model: str, tmp_path: Path):
    folder = tmp_path / "run" / "checkpoints" / "step-000001"
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text("{}")
    (problem,) = replace(load_recipe(Path(DEMO)), policy=Path(model), resume=tmp_path).problems()
    assert problem.startswith(f"resume: {tmp_path}: no checkpoint here")


class Own(GRPO):
    """An algorithm that no name leads to."""


@pytest.mark.parametrize("algorithm", [Own(), Algorithm(), "grpo"])
def test_an_algorithm_without_a_name_is_told(model: str, algorithm: Any):
    (problem,) = replace(load_recipe(Path(DEMO)), policy=Path(model), algorithm=algorithm).problems()
    assert problem.startswith("algorithm: ") and "wanted one of grpo, dr_grpo, " in problem


@pytest.mark.parametrize("field", ["lr_decay", "over_budget", "dtype", "export_dtype", "activation_checkpointing"])
def test_a_word_that_a_field_does_not_know_is_told(model: str, field: str):
    recipe = load_recipe(Path(DEMO))
    odd = replace(recipe.trainer, **{field: "odd"})
    (problem,) = replace(recipe, policy=Path(model), trainer=odd).problems()
    assert problem.startswith(f"trainer.{field}: 'odd', wanted one of ")


def test_a_run_that_could_not_learn_or_start_is_told(model: str, tmp_path: Path):
    recipe = replace(load_recipe(Path(DEMO)), policy=Path(model), run_dir=Path(model))
    problems = list(replace(recipe, algorithm=SAO(), steps=10).problems())
    assert [p.partition(":")[0] for p in problems] == ["run_dir", "algorithm.critic.warmup_steps"]


def test_a_checkpoint_without_a_critic_is_told_before_the_run(model: str, tmp_path: Path):
    meta = {"format": 1, "step": 1, "model_type": "qwen3_moe", "layout": {}, "metrics": {}, "critic": False}
    (tmp_path / "step-000001").mkdir()
    (tmp_path / "step-000001/meta.json").write_text(json.dumps(meta))
    recipe = replace(load_recipe(Path(DEMO)), policy=Path(model), resume=tmp_path)
    assert list(recipe.problems()) == []
    problems = list(replace(recipe, algorithm=PPO()).problems())
    assert problems == [f"resume: {tmp_path} holds no critic, and this algorithm trains one"]


def test_an_optimised_interpreter_refuses_the_same(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    argv = [sys.executable, "-O", "-m", "lego.check", DEMO, "--policy", str(tmp_path), "--rollout.group-size", "1"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and read(done.stdout)[1][0].startswith("rollout.group_size: 1, wanted 2 or more")


@pytest.mark.parametrize("odd", [{"num_attention_heads": "4"}, {"num_experts": None}, {"text_config": 3}])
def test_odd_fields_of_a_config_are_no_traceback(tmp_path: Path, odd: dict):
    (tmp_path / "config.json").write_text(json.dumps(MOE | odd))
    assert check([DEMO, "--policy", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    "flags",
    [
        "--algorithm sao --rollout.group-size 1 --steps 20",
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
    assert lines == [
        f"policy: {tmp_path / 'none' / 'config.json'} cannot be read; wanted a model folder in HF layout",
        "1 problem",
    ]
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
