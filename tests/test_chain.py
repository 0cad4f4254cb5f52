"""The whole chain, small: vLLM, Codex, bubblewrap, the packages' own tests, torchtitan. Nothing is stood in for."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lego.cli import load_recipe
from lego.errors import GateError
from lego.recipe import Recipe, Sabotage, Validation

ROOT = Path(__file__).parent.parent


def small(cache: Path, *, group: int, sabotage: Sabotage = "none") -> Recipe:
    """The demo recipe with two steps and fewer trials."""
    demo = load_recipe(ROOT / "recipes/demo.py")
    return replace(
        demo,
        cache=cache,
        steps=2,
        rollout=replace(demo.rollout, group_size=group),
        validation=Validation(train_attempts=group, heldout_attempts=0),
        sabotage=sabotage,
    )


async def run(recipe: Recipe, folder: Path) -> None:
    from lego.run import run

    await run(recipe, folder, "test")


def rise(summary: dict) -> float:
    """By how much the 95 % interval at the end lies above the one at the start; negative where they overlap."""
    return summary["solve_end"]["train"][1] - summary["solve_start"]["train"][2]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.harness
async def test_two_real_steps_train_on_exactly_what_was_sampled_and_learn(tmp_path: Path, fetched_cache: Path):
    await run(small(fetched_cache, group=4), tmp_path / "run")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert rise(summary) > 0
    assert summary["pearson"] >= 0.999
    assert summary["k3"] < 5e-4
    assert summary["routing_coverage"] == 1.0
    assert summary["trainable_share"] >= 0.99
    tokens = summary["tokens"]
    assert tokens["sampled"] == tokens["trainable"] + tokens["excluded"] > 0
    assert 0 < summary["peak_rss_gib"] < 10
    trials = lines(tmp_path / "run/trials.jsonl")
    per_step = len({t["group"] for t in trials if t["group"] is not None}) // 2
    assert {(t["group"] // per_step, t["version"]) for t in trials if t["group"] is not None} == {(0, 0), (1, 1)}
    assert {t["outcome"] for t in trials} <= {"solved", "failed", "turn_limit"}
    assert any(t["patch"] for t in trials)
    assert [m["step"] for m in lines(tmp_path / "run/metrics.jsonl")] == [0, 1]
    assert list((tmp_path / "run/tensorboard").iterdir())
    assert (tmp_path / "run/checkpoints/step-000002/meta.json").is_file()
    trained, first = tmp_path / "run/policy/model.safetensors", load_recipe(ROOT / "recipes/demo.py").policy
    assert trained.read_bytes() != (first / "model.safetensors").read_bytes()


@pytest.mark.harness
async def test_permuted_replay_rows_stop_the_run_by_its_own_gate(tmp_path: Path, fetched_cache: Path):
    recipe = small(fetched_cache, group=2, sabotage="permute_replay")
    with pytest.raises(ExceptionGroup) as caught:
        await run(recipe, tmp_path / "run")
    assert caught.group_contains(GateError, match="Pearson|k3")
    assert not (tmp_path / "run/policy").exists()


@pytest.mark.harness
async def test_with_shuffled_advantages_the_solve_rate_does_not_rise(tmp_path: Path, fetched_cache: Path):
    await run(small(fetched_cache, group=4, sabotage="shuffle_advantages"), tmp_path / "run")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["solve_start"]["train"][0] > 0, "nothing to shuffle"
    assert rise(summary) < 0
