"""Weights straight from real trainer ranks to real servers: over gloo here, by NCCL and CUDA IPC where GPUs are."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lego.engine.pool import EnginePool
from lego.engine.transfer import Broadcast, CudaIpc, Direct
from lego.engine.vllm import VllmServer
from lego.learn.client import Trainer
from lego.learn.trainer import TrainerSpec
from lego.records import Sampling
from tests.engine.reference import reference
from tests.engine.test_pool_live import kill_server
from tests.learn.samples import sample
from tests.tiny import write_model

SERVER = VllmServer(replicas=2, dtype="float32", kv_cache_mib=64, max_num_seqs=4, direct=Broadcast())
TRAINER = TrainerSpec(world_size=2, token_budget=256, lr=0.01)


async def versions(pool: EnginePool, models: Sequence[Path]) -> list[int]:
    """Asks each server; the versions it says, once its answer's log-probabilities are those of that version's model."""
    found = []
    for replica in pool._replicas:
        assert replica.engine is not None
        prompt = np.arange(40, dtype=np.int32) + replica.index
        got = await replica.engine.generate(prompt, Sampling(max_tokens=12), session="a")
        (span,) = got.versions
        want, _ = reference(models[span.version], np.concatenate([prompt, got.output_ids]), len(prompt))
        np.testing.assert_allclose(got.logprobs, want, atol=1e-4)
        found.append(span.version)
    return found


async def learned(trainer: Trainer, models: list[Path], home: Path) -> None:
    """One step; its weights are the last of the models then, and far from those before them."""
    rng = np.random.default_rng(len(models))
    await trainer.step([sample(rng, 60) for _ in range(4)])
    models.append(home / f"model-{len(models)}")
    await trainer.save_hf(models[-1])
    old, new = (reference(model, np.arange(52, dtype=np.int32), 1)[0] for model in models[-2:])
    assert np.abs(old - new).max() > 0.01


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def sent() -> dict[str, Any]:
    """What `both_ends` saw."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-m", "tests.engine.both_ends"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_way_is_opened_once_in_a_servers_life_and_names_each_version(sent: dict[str, Any]):
    assert sent["whole"]["seen"] == [[None, "1", [1.0], 1], [None, "2", [2.0], 1], [None, "3", [3.0], 2]]
    assert sent["whole"]["gathered"] == 9


@pytest.mark.parametrize(
    "case, words",
    [
        ("start", ["/start_weight_update: status 500", "broken"]),
        ("middle", ["/update_weights: status 500", "no b.weight here"]),
        ("finish", ["/finish_weight_update: status 500", "broken"]),
    ],
)
def test_a_server_that_fails_is_told_once_all_is_gathered_and_the_next_gets_its_weights(
    sent: dict[str, Any], case: str, words: list[str]
):
    found = sent[case]
    assert all(word in found["failure"] for word in words)
    assert found["gathered"] == 3, "another rank would wait for the rest"
    assert found["next"] is None and found["values"] == [5.0]


def test_layers_that_nobody_sent_are_missed_before_the_version_is_named(sent: dict[str, Any]):
    assert "left 1 layers without all weights, first c (0 of 262144" in sent["lacking"]["failure"]
    assert sent["lacking"]["version"] == ""


def test_a_server_that_is_not_there_is_named_and_all_is_gathered(sent: dict[str, Any]):
    assert "/get_world_size: " in sent["nobody"]["failure"] and "refused" in sent["nobody"]["failure"]
    assert sent["nobody"]["gathered"] == 3


@pytest.mark.parametrize("answer", ["html", "list", "none", "word", "empty", "cut", "ssh", "silent"])
def test_a_server_that_answers_garbage_fails_alone_and_all_is_gathered(sent: dict[str, Any], answer: str):
    found = sent["garbled"][answer]
    assert found["failure"].startswith("/get_world_size: ")
    assert found["gathered"] == 3, "the trainer would end, or another rank wait"


def test_a_life_that_is_over_leaves_nothing_open(sent: dict[str, Any]):
    assert max(sent["kept"]) <= sent["kept"][0] + 2, "sockets that wait for the collector"


def test_a_group_is_destroyed_once_whoever_asks_for_it(sent: dict[str, Any]):
    assert sent["ended"] == 1


def test_a_tensor_larger_than_the_buffer_has_a_buffer_of_its_size(sent: dict[str, Any]):
    assert sent["rooms"] == [1, 6]


@pytest.mark.gpu
@pytest.mark.parametrize("direct, devices, engines", [(Broadcast(), 2, "1"), (CudaIpc(), 1, "0")], ids=str)
async def test_a_gpu_brings_an_engine_its_weights(
    tiny_model: Path, tmp_path: Path, direct: Direct, devices: int, engines: str
):
    """NCCL needs a GPU at each end; CUDA IPC has both ends on one."""
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} GPUs")
    models = [tiny_model, write_model(tmp_path / "other", seed=7)]
    server = replace(SERVER, replicas=1, direct=direct, env={"CUDA_VISIBLE_DEVICES": engines})
    async with (
        server.open(tiny_model, tmp_path) as pool,
        replace(TRAINER, world_size=1).open(models[1], tmp_path, direct=direct) as trainer,
    ):
        await pool.update_from(trainer, 1)
        assert await versions(pool, models) == [1]
        await learned(trainer, models, tmp_path)
        await pool.update_from(trainer, 2)
        assert await versions(pool, models) == [2]


async def test_two_ranks_bring_two_servers_their_weights_and_the_file_those_that_come_later(
    tiny_model: Path, tmp_path: Path
):
    models = [tiny_model, write_model(tmp_path / "other", seed=7)]
    logs = tmp_path / "logs"
    logs.mkdir()
    async with (
        SERVER.open(tiny_model, logs) as pool,
        TRAINER.open(models[1], tmp_path, direct=Broadcast()) as trainer,
    ):
        assert await versions(pool, models) == [0, 0]
        await pool.update_from(trainer, 1)
        assert await versions(pool, models) == [1, 1]
        await learned(trainer, models, tmp_path)
        async with pool.pinned() as pinned:  # goes past it, and its own come from the file
            await pool.update_from(trainer, 2)
            assert sorted(await versions(pool, models)) == [1, 2] and pinned.version == 1
        await until(lambda: not any(r.behind for r in pool._replicas))
        assert await versions(pool, models) == [2, 2]
        await learned(trainer, models, tmp_path)
        victim = pool._replicas[0]
        assert victim.engine is not None and victim.engine.pid is not None
        update = asyncio.create_task(pool.update_from(trainer, 3))
        kill_server(victim.engine.pid)
        await update
        await until(lambda: victim.serves and victim.restarts == 1)
        assert await versions(pool, models) == [3, 3]
        await learned(trainer, models, tmp_path)
        await pool.update_from(trainer, 4)  # over a new way to the server's new life
        assert await versions(pool, models) == [4, 4]
        usage, last = pool.usage(), pool.usage().last_update
        assert usage.restarts == 1 and last is not None and last.bytes > 100_000 and last.pause_seconds > 0
