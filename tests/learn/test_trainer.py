import os
import shutil
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from lego.engine.transfer import SharedFolder, read_header
from lego.errors import GateError, TrainerError, UsageError
from lego.learn.algorithms import GRPO, SAO, Critic
from lego.learn.checkpoint_folder import Keep
from lego.learn.trainer import TrainerSpec
from lego.records import Sample
from tests.learn.samples import sample
from tests.tiny import write_model

SPEC = TrainerSpec(lr=1e-3, token_budget=128, threads=1)
TWO = TrainerSpec(lr=1e-3, token_budget=128, threads=2, world_size=2, expert_parallel=2, stall_s=6.0)


OF_A_RANK = ("train/peak_rss_gib", "train/micro_batches")
"""What depends on the layout."""


@dataclass(frozen=True)
class Gates:
    min_pearson: float = 0.999
    max_k3: float = 5e-4
    min_routing_coverage: float = 1.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def samples(n=7):
    rng = np.random.default_rng(0)
    return [sample(rng, int(length)) for length in rng.integers(20, 100, n)]


def rank_pids(root: int) -> dict[int, int]:
    """Process ids of the ranks below the launcher, by rank."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    tree, found = {root}, {}
    while grown := {p for p, parent in parents.items() if parent in tree} - tree:
        tree |= grown
    for pid in tree:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found |= {int(e[5:]): pid for e in environment if e.startswith(b"RANK=")}
    return found


def largest_difference(a: Path, b: Path) -> float:
    left, right = load_file(a), load_file(b)
    assert left.keys() == right.keys()
    return max(float(np.abs(left[name] - right[name]).max()) for name in left)


async def test_two_ranks_with_split_experts_step_as_one_and_hand_over_to_one(folder, tmp_path):
    """Sharded over two ranks (FSDP2, experts split): same loss and weights; their checkpoint continues on one."""
    made = [replace(s, trial=f"a/{i}") for i, s in enumerate(samples())]
    algorithm, off = GRPO(scale="none", aggregate="token"), made[4].segment.logprobs_T.copy()
    token = int(np.flatnonzero(made[4].segment.mask_T)[2])
    off[token] = -40
    strange = [*made[:4], replace(made[4], segment=replace(made[4].segment, logprobs_T=off)), *made[5:]]
    shared = SharedFolder(path=tmp_path)
    async with TWO.open(folder, tmp_path / "two", algorithm, transfer=shared) as two:
        first = await two.step(made)
        shutil.copy(await two.export(1), tmp_path / "two.safetensors")
        assert read_header(tmp_path / "two.safetensors").version == 1
        await two.save(1, {"solve_rate": 0.5})
        second = await two.step(made)
        lost = [*made[1:], Sample(segment=made[0].segment, advantage=float("inf"), weight=1.0)]
        with pytest.raises(TrainerError, match="no rank stepped"):
            await two.step(lost)
    async with SPEC.open(folder, tmp_path / "one", algorithm) as one:
        alone = await one.step(made)
        shutil.copy(await one.export(1), tmp_path / "one.safetensors")
        assert await one.load(tmp_path / "two" / "checkpoints") == 1
        resumed = await one.step(made)
        says = rf"worst: trial a/4, token {token} of its segment: log-probability -40\.0000 sampled, .* did not step"
        with pytest.raises(GateError, match=says):
            await one.step(strange, Gates())
        await one.save_hf(tmp_path / "hf")
    assert not list(tmp_path.glob("lego-weights-*"))
    assert first.loss == pytest.approx(alone.loss, abs=1e-5)
    assert first.grad_norm == pytest.approx(alone.grad_norm, rel=1e-4)
    assert first.rows_replayed == alone.rows_replayed == alone.rows_needed == 3 * alone.fed
    two_found, one_found = ({n: v for n, v in r.metrics().items() if n not in OF_A_RANK} for r in (first, alone))
    assert {n: v for n, v in two_found.items() if not n.startswith("seconds/")} == pytest.approx(
        {n: v for n, v in one_found.items() if not n.startswith("seconds/")}, rel=1e-3, abs=1e-5
    )
    assert first.log_ratio_counts == alone.log_ratio_counts and first.worst.trial == alone.worst.trial
    assert largest_difference(tmp_path / "two.safetensors", tmp_path / "one.safetensors") < 1e-5
    assert largest_difference(tmp_path / "one.safetensors", folder / "model.safetensors") > 1e-4
    assert resumed.loss == pytest.approx(second.loss, abs=1e-5)
    assert resumed.grad_norm == pytest.approx(second.grad_norm, rel=1e-4)
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()
    assert resumed.metrics()["train/routing_coverage"] == 1.0


@pytest.mark.parametrize(
    ("number", "says"), [(signal.SIGKILL, "killed by SIGKILL"), (signal.SIGSTOP, "no progress in time")]
)
async def test_a_dead_or_stuck_rank_is_named(folder, tmp_path, number, says):
    with pytest.raises(TrainerError, match=f"rank 1 failed: {says}"):
        async with TWO.open(folder, tmp_path / "run") as trainer:
            ranks = rank_pids(trainer.pid)
            assert sorted(ranks) == [0, 1]
            os.kill(ranks[1], number)
            began = time.monotonic()
            await trainer.step(samples())
    assert time.monotonic() - began < 30
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())


async def test_a_missing_model_folder_is_one_clear_message(tmp_path):
    with pytest.raises(UsageError, match=r"no-such-model has no config\.json"):
        async with SPEC.open(tmp_path / "no-such-model", tmp_path / "run"):
            pass


@pytest.mark.parametrize(("text", "told"), [("{", "is not JSON"), ("[]", "holds a list, wanted an object")])
async def test_a_config_that_is_no_object_is_one_clear_message(folder, tmp_path, text, told):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(text)
    with pytest.raises(UsageError, match=rf"policy: .*/m/config\.json {told}"):
        async with SPEC.open(tmp_path / "m", tmp_path / "run"):
            pass


async def test_a_model_that_does_not_fit_its_files_is_the_users_error(tmp_path):
    folder = write_model(tmp_path / "m", num_hidden_layers=2)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"num_hidden_layers": 2', '"num_hidden_layers": 1'))
    with pytest.raises(UsageError, match=r"tensors have no place in this model: model.layers.1"):
        async with SPEC.open(folder, tmp_path / "run"):
            pass


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", 0.0),
        ("world_size", 0),
        ("token_budget", 0),
        ("threads", 0),
        ("expert_parallel", 3),
        ("tensor_parallel", 3),
    ],
)
async def test_a_trainer_that_cannot_be_is_refused_by_field_before_it_starts(folder, tmp_path, field, value):
    spec = replace(TrainerSpec(world_size=3), **{field: value})
    with pytest.raises(UsageError, match=rf"trainer\.{field}: {value}, wanted"):
        async with spec.open(folder, tmp_path / "run"):
            pass
    assert not (tmp_path / "run" / "trainer" / "launch.log").exists()


async def test_a_critic_on_two_ranks_warms_up_and_goes_on_from_its_checkpoint(folder, tmp_path):
    algorithm = SAO(critic=Critic(lr=1e-3, updates_per_step=2, warmup_steps=2, frozen_attention=True, clip=None))
    made = [replace(s, reward=float(i % 2)) for i, s in enumerate(samples())]
    async with TWO.open(folder, tmp_path / "run", algorithm, keep=Keep(last=1)) as trainer:
        warming = [await trainer.step(made) for _ in range(2)]
        await trainer.save(2, {})
        then = await trainer.step(made)
        await trainer.saved()
    async with SPEC.open(folder, tmp_path / "again", algorithm) as trainer:
        assert await trainer.load(tmp_path / "run" / "checkpoints") == 2
        again = await trainer.step(made)
    assert all(w.grad_norm == 0 and w.critic_grad_norm > 0 for w in warming)
    assert then.grad_norm > 0 and then.value_loss < warming[0].value_loss
    assert again.value_loss == pytest.approx(then.value_loss, rel=1e-4)
    assert again.grad_norm == pytest.approx(then.grad_norm, rel=1e-3)


async def test_a_sample_over_the_budget_is_left_out_and_counted_and_a_batch_of_them_refused(folder, tmp_path):
    long = [*samples(2), sample(np.random.default_rng(1), 150)]
    async with replace(SPEC, over_budget="drop").open(folder, tmp_path / "run") as trainer:
        with pytest.raises(TrainerError, match="nothing to train on in 1 samples: 1 with more tokens than"):
            await trainer.step(long[2:])
        report = await trainer.step(long)
    assert (report.dropped, report.segments, report.split_tokens) == (1, 2, 0)
