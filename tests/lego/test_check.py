"""`lego.check` tells what a recipe resolves to and all that is wrong with it, without anything heavy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lego.check import check

ROOT = Path(__file__).parent.parent.parent
DEMO = str(ROOT / "recipes" / "demo.py")
LARGE = str(ROOT / "recipes" / "gspo_opencode.py")


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder that looks like a model to whoever only looks for its config."""
    (tmp_path / "config.json").write_text("{}")
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
