"""Two real servers as one engine: sixteen sessions, new weights in the middle, and one server killed."""

import asyncio
import logging
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lego.engine.pool import EnginePool
from lego.engine.vllm import CPU_BLOCK_TOKENS, VllmServer
from lego.engine.vllm_client import VllmEngine
from lego.records import Floats, Generation, Ids, Sampling
from tests.engine.reference import reference
from tests.tiny import write_model

log = logging.getLogger(__name__)

ANSWER = 400
"""Tokens of an answer that is to last until all have begun, on a machine that is busy."""
SESSIONS = [f"session {i}" for i in range(16)]
SERVER = VllmServer(replicas=2, dtype="float32", kv_cache_mib=64, max_num_seqs=16, restarts=1)


def prompt(seed: int, length: int) -> Ids:
    return np.random.default_rng(seed).integers(0, 256, length).astype(np.int32)


class Talk:
    """One session: its context so far, and what it was told of the answer under way."""

    def __init__(self, pool: EnginePool, name: str, seed: int) -> None:
        self.pool, self.name = pool, name
        self.ids = prompt(seed, 200 + 7 * seed)
        self.told: list[Ids] = []
        self.seen = 0
        """Tokens of whole blocks that the last call left in its engine's cache."""
        self.knowable = 0
        """The same of all calls but the first, summed: what an engine that stayed the session's can have found."""

    async def turn(self, tokens: int) -> Generation:
        self.told = []
        asked = self.ids
        self.knowable += self.seen
        got = await self.pool.generate(asked, Sampling(max_tokens=tokens), session=self.name, progress=self._hear)
        assert got.prompt_len == len(asked) and len(got.output_ids) == tokens and got.finish == "length"
        for before, after in zip(self.told, [*self.told[1:], got.output_ids], strict=True):
            np.testing.assert_array_equal(before, after[: len(before)])
        whole = np.concatenate([asked, got.output_ids])
        self.seen = (len(whole) - 1) // CPU_BLOCK_TOKENS * CPU_BLOCK_TOKENS
        self.ids = np.concatenate([whole, prompt(len(whole), 20)])
        return got

    def _hear(self, ids: Ids, _: Floats) -> None:
        self.told.append(ids)


async def all_turns(talks: list[Talk], tokens: int) -> list[Generation]:
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(talk.turn(tokens)) for talk in talks]
    return [call.result() for call in calls]


def where(pool: EnginePool) -> list[int]:
    """The replica of each session."""
    return [pool._places.choose(name, {0: 0, 1: 0}) for name in SESSIONS]


async def begun(talks: list[Talk]) -> None:
    """Until the answers of most sessions, and so some of each server, have begun."""
    before = [talk.told for talk in talks]
    most = len(talks) // 2 + 2
    await until(lambda: sum(bool(t.told) and t.told is not old for t, old in zip(talks, before, strict=True)) >= most)


def first(pool: EnginePool) -> VllmEngine:
    """The engine of the first replica."""
    engine = pool._replicas[0].engine
    assert engine is not None
    return engine


async def hits(pool: EnginePool) -> int:
    """Prompt tokens that the engines found in their caches so far."""
    await asyncio.sleep(0.3)  # the last step's numbers
    readings = [await r.engine.read_metrics() for r in pool._replicas if r.engine is not None]
    return sum(reading.prefix_hits or 0 for reading in readings)


async def until(condition: Any) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.02)


def check(folders: dict[int, Path], asked: Ids, got: Generation) -> None:
    """Every token's logprob is that of the weights that its span names, and its experts are theirs."""
    whole = np.concatenate([asked, got.output_ids])
    assert got.routing is not None and [v.start for v in got.versions] == [0, *(v.stop for v in got.versions[:-1])]
    assert got.versions[-1].stop == len(got.output_ids)
    for span in got.versions:
        logprobs, experts = reference(folders[span.version], whole, len(asked))
        np.testing.assert_allclose(got.logprobs[span.start : span.stop], logprobs[span.start : span.stop], atol=1e-4)
        rows = slice(len(asked) + span.start, len(asked) + span.stop - 1)
        np.testing.assert_array_equal(np.sort(got.routing[rows], -1), experts[rows])


def kill_server(guard: int) -> None:
    """SIGKILL to the server that the guard runs."""
    children = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)


async def test_two_servers_lose_no_call_and_mix_no_weights(tiny_model: Path, tmp_path: Path):
    other_model = write_model(tmp_path / "other", seed=1)
    folders = {0: tiny_model, 1: other_model}
    steps: list[tuple[int, int, str]] = []
    began = time.monotonic()
    async with SERVER.open(tiny_model, tmp_path, progress=lambda *step: steps.append(step)) as pool:
        up_s = time.monotonic() - began
        assert steps == [(1, 2, "engines ready"), (2, 2, "engines ready")]
        for replica in pool._replicas:
            assert replica.engine is not None
            replica.engine.model = replace(replica.engine.model, stop_ids=())
        await replicas_sample_differently(pool)
        talks = [Talk(pool, name, i) for i, name in enumerate(SESSIONS)]
        idle = [Talk(pool, f"idle {i}", 100 + i) for i in range(2)]
        await sessions_stay(pool, talks)
        await an_update_is_exact_and_empties_the_caches(pool, talks, idle, folders)
        await a_killed_server_costs_nothing(pool, talks, folders)
        log.info("up %.0f s, whole %.0f s, %s", up_s, time.monotonic() - began, pool.usage())


async def replicas_sample_differently(pool: EnginePool) -> None:
    """The trials of a group begin with one prompt; on engines with one seed they would be the same."""
    ids = prompt(999, 40)
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(pool.generate(ids, Sampling(max_tokens=16), session=f"group {i}")) for i in range(2)]
    one, two = (call.result().output_ids.tolist() for call in calls)
    assert one != two and {pool._places.choose(f"group {i}", {0: 0, 1: 0}) for i in range(2)} == {0, 1}


async def sessions_stay(pool: EnginePool, talks: list[Talk]) -> None:
    """95 % of what a session's own turns left in a cache is found again by its next turn."""
    before = await hits(pool)
    for _ in range(3):
        await all_turns(talks, 24)
    share = (await hits(pool) - before) / sum(talk.knowable for talk in talks)
    log.info("sticky hit rate %.3f", share)
    assert 0.95 <= share <= 1.0
    assert pool.usage().moved_sessions == 0
    assert sum(where(pool)) == 8
    engine = pool._replicas[0].engine
    assert engine is not None
    reading = await engine.read_metrics()
    assert reading.kv_usage is not None and reading.running == 0 == reading.waiting
    assert reading.cache_tokens is not None and 10_000 < reading.cache_tokens < 64 << 20


async def an_update_is_exact_and_empties_the_caches(
    pool: EnginePool, talks: list[Talk], idle: list[Talk], folders: dict[int, Path]
) -> None:
    await all_turns(idle, 8)
    again = [talk.ids for talk in idle]
    before = await hits(pool)
    await asyncio.gather(*(ask_again(pool, talk, ids) for talk, ids in zip(idle, again, strict=True)))
    assert await hits(pool) - before == sum(talk.seen for talk in idle)
    asked = [talk.ids for talk in talks]
    async with asyncio.TaskGroup() as group:
        turns = group.create_task(all_turns(talks, ANSWER))
        await begun(talks)
        await pool.update(folders[1] / "model.safetensors", 1)
    got = turns.result()
    crossed = [i for i, one in enumerate(got) if len(one.versions) > 1]
    log.info("%d of %d answers crossed the update", len(crossed), len(got))
    places = where(pool)
    assert {places[i] for i in crossed} == {0, 1}
    for i in {crossed[0], crossed[-1], 0, 15}:
        check(folders, asked[i], got[i])
    before = await hits(pool)
    await asyncio.gather(*(ask_again(pool, talk, ids) for talk, ids in zip(idle, again, strict=True)))
    assert await hits(pool) - before == 0


async def ask_again(pool: EnginePool, talk: Talk, ids: Ids) -> None:
    await pool.generate(ids, Sampling(max_tokens=1), session=talk.name)


async def a_killed_server_costs_nothing(pool: EnginePool, talks: list[Talk], folders: dict[int, Path]) -> None:
    asked, before, victim = [talk.ids for talk in talks], where(pool), first(pool).pid
    assert victim is not None
    async with asyncio.TaskGroup() as group:
        turns = group.create_task(all_turns(talks, ANSWER))
        await begun(talks)
        kill_server(victim)
    got, after = turns.result(), where(pool)
    moved = [i for i in range(len(talks)) if before[i] != after[i]]
    log.info("%d of %d calls moved", len(moved), len(got))
    assert moved and pool.usage().moved_calls >= len(moved) == pool.usage().moved_sessions
    assert all([(v.version, v.start, v.stop) for v in one.versions] == [(1, 0, ANSWER)] for one in got)
    for i in {moved[0], moved[-1], before.index(1)}:
        check(folders, asked[i], got[i])
    await until(lambda: pool.usage().alive == 2)
    back = first(pool)
    assert pool.usage().restarts == 1 and back.pid != victim
    ids = prompt(77, 100)
    check(folders, ids, await back.generate(ids, Sampling(max_tokens=20), session="s"))
