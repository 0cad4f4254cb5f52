"""One real server: what it reports is what the model computes, before, during and after weight updates."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lego.engine.vllm import VllmServer, reserve_port
from lego.engine.vllm_client import VllmEngine
from lego.errors import EngineError, UsageError
from lego.records import Floats, Generation, Ids, Sampling
from tests.engine.reference import reference
from tests.tiny import write_model


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape with other weights."""
    return write_model(tmp_path_factory.mktemp("model") / "other", seed=1)


def prompt(seed: int, length: int = 90) -> Ids:
    return np.random.default_rng(seed).integers(0, 256, length).astype(np.int32)


def joined(ids: Ids, got: Generation) -> Ids:
    return np.concatenate([ids, got.output_ids])


def check_against(folder: Path, ids: Ids, got: Generation, temperature: float = 1.0) -> None:
    logprobs, experts = reference(folder, joined(ids, got), len(ids), temperature)
    np.testing.assert_allclose(got.logprobs, logprobs, atol=1e-4)
    assert got.routing is not None
    np.testing.assert_array_equal(np.sort(got.routing, -1), experts[got.routing_start :])


@contextmanager
def stopping_at(engine: VllmEngine, stop_ids: tuple[int, ...]) -> Iterator[None]:
    model = engine.model
    engine.model = replace(model, stop_ids=stop_ids)
    yield
    engine.model = model


async def test_answers_at_once_report_the_logprobs_and_experts_of_the_model(vllm_engine: VllmEngine, tiny_model: Path):
    prompts = [prompt(i, 40 + 17 * i) for i in range(8)]
    sampling = Sampling(max_tokens=24, temperature=0.7)
    with stopping_at(vllm_engine, ()):
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(vllm_engine.generate(ids, sampling, session=str(ids[0]))) for ids in prompts]
    for ids, call in zip(prompts, calls, strict=True):
        got = call.result()
        assert (got.prompt_len, len(got.output_ids), got.finish) == (len(ids), 24, "length")
        assert [(v.version, v.start, v.stop) for v in got.versions] == [(0, 0, 24)]
        check_against(tiny_model, ids, got, temperature=0.7)


async def test_the_same_seed_gives_the_same_answer_and_another_seed_another(vllm_engine: VllmEngine):
    ids = prompt(50)
    one, two, three = [
        await vllm_engine.generate(ids, Sampling(max_tokens=16, seed=seed), session="s") for seed in (5, 5, 6)
    ]
    np.testing.assert_array_equal(one.output_ids, two.output_ids)
    np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-5)
    assert one.output_ids.tolist() != three.output_ids.tolist()


async def test_the_stop_token_is_part_of_the_answer(vllm_engine: VllmEngine, tiny_model: Path):
    stop_ids = tuple(range(0, 512, 8))
    ids = prompt(51)
    with stopping_at(vllm_engine, stop_ids):
        got = await vllm_engine.generate(ids, Sampling(max_tokens=200, seed=1), session="s")
    assert got.finish == "stop" and 1 < len(got.output_ids) < 200
    assert [i % 8 == 0 for i in got.output_ids] == [False] * (len(got.output_ids) - 1) + [True]
    check_against(tiny_model, ids, got)


async def test_a_cached_turn_reports_the_same_rows_as_an_uncached_one(vllm_engine: VllmEngine, tiny_model: Path):
    ids = prompt(52, 300)
    first = await vllm_engine.generate(ids, Sampling(max_tokens=40), session="s")
    longer = np.concatenate([joined(ids, first), prompt(53, 20)])
    start = len(ids) + len(first.output_ids) - 1
    sampling = Sampling(max_tokens=10, seed=3)
    cached = await vllm_engine.generate(longer, sampling, session="s", routing_start=start)
    await vllm_engine.update(tiny_model / "model.safetensors", 0)  # empties the cache
    fresh = await vllm_engine.generate(longer, sampling, session="s")
    assert fresh.routing is not None and cached.routing is not None and first.routing is not None
    assert len(cached.routing) == 20 + 10
    np.testing.assert_array_equal(cached.routing, fresh.routing[start:])
    np.testing.assert_array_equal(first.routing, fresh.routing[:start])
    np.testing.assert_array_equal(cached.output_ids, fresh.output_ids)


async def test_an_update_gives_exactly_the_new_weights_and_back_exactly_the_old(
    vllm_engine: VllmEngine, tiny_model: Path, other_model: Path
):
    ids = prompt(54)
    sampling = Sampling(max_tokens=20, seed=7)
    before = await vllm_engine.generate(ids, sampling, session="s")
    await vllm_engine.update(other_model / "model.safetensors", 1)
    changed = await vllm_engine.generate(ids, sampling, session="s")
    await vllm_engine.update(tiny_model / "model.safetensors", 0)
    after = await vllm_engine.generate(ids, sampling, session="s")
    assert changed.versions[0].version == 1
    check_against(other_model, ids, changed)
    np.testing.assert_array_equal(before.logprobs, after.logprobs)
    assert np.abs(before.logprobs - changed.logprobs).max() > 0.1


async def test_an_answer_under_way_goes_on_with_the_new_weights_and_says_where(
    vllm_engine: VllmEngine, tiny_model: Path, other_model: Path
):
    ids = prompt(55, 64)
    with stopping_at(vllm_engine, ()):
        async with asyncio.TaskGroup() as group:
            call = group.create_task(vllm_engine.generate(ids, Sampling(max_tokens=400), session="s"))
            await asyncio.sleep(0.5)
            await vllm_engine.update(other_model / "model.safetensors", 1)
    got = call.result()
    await vllm_engine.update(tiny_model / "model.safetensors", 0)
    old, new = got.versions
    assert (old.version, new.version, old.start, new.stop) == (0, 1, 0, 400) and 0 < old.stop == new.start < 400
    whole = joined(ids, got)
    for folder, span in ((tiny_model, old), (other_model, new)):
        logprobs, experts = reference(folder, whole, len(ids))
        np.testing.assert_allclose(got.logprobs[span.start : span.stop], logprobs[span.start : span.stop], atol=1e-4)
        assert got.routing is not None
        rows = slice(len(ids) + span.start, len(ids) + span.stop - 1)
        np.testing.assert_array_equal(np.sort(got.routing[rows], -1), experts[rows])


@asynccontextmanager
async def under_way(engine: VllmEngine, max_tokens: int) -> AsyncIterator[asyncio.Task[Generation]]:
    """A call whose first token has come."""
    begun = asyncio.Event()
    with stopping_at(engine, ()):
        async with asyncio.TaskGroup() as group:
            sampling = Sampling(max_tokens=max_tokens)
            call = engine.generate(prompt(56), sampling, session="s", progress=lambda *_: begun.set())
            task = group.create_task(call)
            await begun.wait()
            yield task


async def abort_all(engine: VllmEngine) -> int:
    """How many requests the engine was at work on."""
    return (await engine._step("/abort_requests", {}))["aborted"]


async def test_a_call_cancelled_between_chunks_is_aborted_in_the_engine_within_a_second(vllm_engine: VllmEngine):
    async with under_way(vllm_engine, 3900) as call:
        call.cancel()
        await asyncio.sleep(1)
        assert await abort_all(vllm_engine) == 0  # sampling all would have taken longer


async def test_an_answer_that_the_engine_aborts_is_an_error_not_a_turn(vllm_engine: VllmEngine):
    aborted = pytest.RaisesExc(EngineError, match=r"finish_reason 'abort' after \d+ tokens")
    with pytest.RaisesGroup(aborted):
        async with under_way(vllm_engine, 3900) as call:
            assert await abort_all(vllm_engine) == 1
            await asyncio.wait((call,), timeout=1)


async def test_a_new_version_label_aborts_nothing(vllm_engine: VllmEngine):
    async with under_way(vllm_engine, 300) as call:
        await vllm_engine.label(8)
        await vllm_engine.label(0)
        got = await call
    assert len(got.output_ids) == 300 and got.versions[0].version == got.versions[-1].version == 0


async def test_progress_is_every_token_and_its_logprob_in_order(vllm_engine: VllmEngine, tiny_model: Path):
    told: list[tuple[Ids, Floats]] = []
    ids = prompt(59)
    with stopping_at(vllm_engine, ()):
        got = await vllm_engine.generate(
            ids, Sampling(max_tokens=50), session="s", progress=lambda *so_far: told.append(so_far)
        )
    sizes = [len(some) for some, _ in told]
    assert len(sizes) > 1 and sizes[-1] == 50 and sizes == sorted(set(sizes))
    assert set(sizes) <= {1, 17, 33, 49, 50}, "as the server sends them; a busy reader may get two at once"
    for some, logprobs in told:
        np.testing.assert_array_equal(some, got.output_ids[: len(some)])
        np.testing.assert_array_equal(logprobs, got.logprobs[: len(some)])
    check_against(tiny_model, ids, got)


async def test_a_seed_gives_the_same_answer_whether_the_prompt_went_through_in_pieces_or_at_once(
    vllm_engine: VllmEngine, tiny_model: Path
):
    ids = prompt(60, 3000)
    sampling = Sampling(max_tokens=8, seed=4)
    in_pieces = await vllm_engine.generate(ids, sampling, session="s")
    at_once = await vllm_engine.generate(ids, sampling, session="s")  # all but the last block is cached
    np.testing.assert_array_equal(in_pieces.output_ids, at_once.output_ids)
    check_against(tiny_model, ids, in_pieces)


async def test_a_prompt_beyond_the_context_is_refused_with_the_servers_words(vllm_engine: VllmEngine):
    with pytest.raises(EngineError, match=r"maximum model length of 4096"):
        await vllm_engine.generate(prompt(57, 4097), Sampling(max_tokens=5), session="s")


async def test_a_bad_model_folder_is_told_before_anything_is_started(tmp_path: Path):
    with pytest.raises(UsageError, match="nothing does not exist"):
        async with VllmServer().open(tmp_path / "nothing", tmp_path):
            pass
    dense = write_model(tmp_path / "dense", num_experts=0)
    with pytest.raises(UsageError, match=r"routing is on but model folder .*dense has no routed experts"):
        async with VllmServer(routing=True).open(dense, tmp_path):
            pass
    assert not (tmp_path / "vllm.log").exists()


async def test_a_taken_port_is_told_before_anything_is_started(tiny_model: Path, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(EngineError, match=f"port {port} on 127.0.0.1 cannot be used"):
            async with VllmServer(port=port).open(tiny_model, tmp_path):
                pass
    assert not (tmp_path / "vllm.log").exists()


def test_a_reserved_port_stays_free_for_a_server_that_reuses_addresses():
    with reserve_port(0) as taken, socket.create_server(taken.getsockname()) as server:
        assert server.getsockname()[1] == taken.getsockname()[1]


async def test_a_server_that_ends_early_is_told_with_its_last_words(tiny_model: Path, tmp_path: Path):
    server = VllmServer(env={"PYTHONHOME": "/nowhere"})
    with pytest.raises(EngineError, match=r"vLLM ended with status 1(.|\n)*No module named 'encodings'"):
        async with server.open(tiny_model, tmp_path):
            pass


async def test_cancelling_the_start_leaves_no_process(tiny_model: Path, tmp_path: Path):
    server = VllmServer(extra=("--seed", "77"), stop_grace_s=1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2):
            async with server.open(tiny_model, tmp_path):
                pass
    assert not processes_about(tiny_model, "77")


def processes_about(*words: object) -> list[str]:
    """Command lines that hold all these words."""
    lines = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                lines.append((folder / "cmdline").read_text().split("\0"))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return [" ".join(line) for line in lines if all(str(word) in line for word in words)]
