"""Recipes and `--help` are for people who wait: no torch, no vLLM, an answer in a second."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.py"))
HEAVY = (
    *("torch", "torchtitan", "vllm", "litellm", "transformers", "renderers", "aiohttp", "tensorboard"),
    *("podman", "requests", "aiodocker"),
)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=60)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_loading_a_recipe_imports_nothing_heavy(recipe: Path):
    code = (
        "import sys; from pathlib import Path; from lego.cli import load_recipe; "
        f"load_recipe(Path({str(recipe)!r})); print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_help_answers_in_a_second(recipe: Path):
    seconds = []
    for _ in range(3):
        start = time.monotonic()
        done = python("-m", "lego.train", str(recipe), "--help")
        seconds.append(time.monotonic() - start)
        assert done.returncode == 0, done.stderr
        assert "--steps" in done.stdout and "--rollout.group-size" in done.stdout
    assert min(seconds) < 1.0
