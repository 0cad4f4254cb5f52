"""What the pool is made of: answers in two parts, a scripted pool, and the fields that say which servers there are."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lego.engine.admission import Admission
from lego.engine.base import Pool
from lego.engine.scripted import ScriptedEngine
from lego.engine.splice import Told
from lego.engine.transfer import Broadcast, CudaIpc
from lego.engine.vllm import DEVICES, VllmServer, devices_of
from lego.errors import EngineError
from lego.records import Floats, Generation, Ids, Sampling, VersionSpan
from tests.engine.test_pool import Fake, until


def ids(*tokens: int) -> Ids:
    return np.array(tokens, np.int32)


def logs(*values: float) -> Floats:
    return np.array(values, np.float32)


def rest_of(tokens: Ids, *spans: tuple[int, int, int]) -> Generation:
    return Generation(
        prompt_len=4,
        output_ids=tokens,
        logprobs=-tokens.astype(np.float32),
        routing=np.zeros((6, 1, 1), np.uint8),
        routing_start=0,
        versions=tuple(VersionSpan(version=v, start=a, stop=b) for v, a, b in spans),
        finish="stop",
    )


def test_an_answer_in_two_parts_is_one_with_both_parts_tokens_and_versions():
    told = Told().and_then(ids(5, 6), logs(-5, -6), 3)
    assert told.prompt(ids(1, 2)).tolist() == [1, 2, 5, 6]
    got = told.joined(rest_of(ids(7, 8), (3, 0, 1), (4, 1, 2)))
    assert (got.prompt_len, got.output_ids.tolist(), got.logprobs.tolist()) == (2, [5, 6, 7, 8], [-5, -6, -7, -8])
    assert [(v.version, v.start, v.stop) for v in got.versions] == [(3, 0, 3), (4, 3, 4)]


def test_an_answer_in_three_parts_counts_on():
    told = Told().and_then(ids(5), logs(-5), 0).and_then(ids(6, 7), logs(-6, -7), 1)
    got = told.joined(rest_of(ids(8), (1, 0, 1)))
    assert [(v.version, v.start, v.stop) for v in got.versions] == [(0, 0, 1), (1, 1, 4)]


def test_nothing_told_changes_nothing():
    got = rest_of(ids(7), (0, 0, 1))
    assert Told().joined(got) is got and not Told().complete(Sampling(), (9,))
    assert Told().rest(Sampling(max_tokens=9, seed=4)) == Sampling(max_tokens=9, seed=4)


def test_the_rest_is_shorter_and_its_seed_draws_other_numbers():
    told = Told().and_then(ids(5, 6), logs(-5, -6), 0)
    sampling = Sampling(max_tokens=9, seed=4, temperature=0.5)
    assert told.rest(sampling) == replace(sampling, max_tokens=7, seed=6)
    assert told.rest(replace(sampling, seed=None)).seed is None


@pytest.mark.parametrize(
    ("tokens", "most", "wanted"), [((5, 9), 8, True), ((5, 6), 2, True), ((5, 6), 3, False), ((9, 5), 8, False)]
)
def test_an_answer_that_lacks_only_its_end_is_known(tokens: tuple[int, ...], most: int, wanted: bool):
    told = Told().and_then(ids(*tokens), logs(*map(float, tokens)), 0)
    assert told.complete(Sampling(max_tokens=most), (9,)) is wanted


async def test_a_scripted_pool_keeps_its_version_while_pinned():
    pool: Pool = ScriptedEngine(lambda _: [1])
    await pool.update(Path("w"), 1)
    async with pool.pinned() as pinned, pool.pinned():
        update = asyncio.create_task(pool.update(Path("w"), 2))
        await asyncio.sleep(0.01)
        got = await pinned.generate(ids(1), Sampling(), session="s")
        assert pool.version == 1 == got.versions[0].version
    await update
    assert pool.version == 2 and pool.usage().running == 0


GOOD = VllmServer(replicas=2, port=8000, env={DEVICES: "0,1,2,3"})


@pytest.mark.parametrize(
    ("server", "told"),
    [
        (GOOD, None),
        (VllmServer(urls=("http://a:1", "http://b:1")), None),
        (VllmServer(replicas=0), "engine.replicas: 0, wanted 1 or more"),
        (
            VllmServer(replicas=2, urls=("http://a:1",)),
            "engine.replicas: 2, wanted 1 with engine.urls, which are a serv",
        ),
        (VllmServer(urls=("a:1",)), "engine.urls: a:1, wanted http://HOST:PORT or https://HOST:PORT, each once"),
        (VllmServer(urls=("http://a", "http://a")), "engine.urls: http://a, wanted http://HOST:PORT or https://HOST:P"),
        (VllmServer(replicas=3, port=65534), "engine.port: 65534, wanted 0 or 1 to 65533 for 3 servers"),
        (VllmServer(port=-1), "engine.port: -1, wanted 0 or 1 to 65535 for 1 servers"),
        (
            replace(GOOD, replicas=3),
            "engine.env CUDA_VISIBLE_DEVICES: 4 devices, wanted a multiple of engine.replicas 3",
        ),
        (VllmServer(direct=Broadcast()), None),
        (VllmServer(direct=CudaIpc()), "engine.direct: CudaIpc, wanted Broadcast or None: vLLM is here as its CPU"),
        (VllmServer(direct=Broadcast), "engine.direct: <class 'lego.engine.transfer.Broadcast'>, wanted Broadcast()"),  # type: ignore[arg-type]
        (VllmServer(transfer="x"), "engine.transfer: 'x', wanted SharedMemory() or SharedFolder(path=...)"),  # type: ignore[arg-type]
        (VllmServer(direct=Broadcast(host="host.invalid")), "engine.direct.host: 'host.invalid', wanted an address of"),
        (VllmServer(direct=Broadcast(host="")), "engine.direct.host: '', wanted an address of this machine"),
        (VllmServer(restarts=-1), "engine.restarts: -1, wanted 0 or more"),
        (VllmServer(unhealthy_s=-1.0), "engine.unhealthy_s: -1.0, wanted 0 or more"),
        (VllmServer(restart_window_s=0.0), "engine.restart_window_s: 0.0, wanted over 0"),
        (
            VllmServer(admission=Admission(hit_threshold=2.0)),
            "engine.admission.hit_threshold: 2.0, wanted over 0, up to",
        ),
    ],
)
def test_problems_name_the_field_the_value_and_the_range(server: VllmServer, told: str | None):
    found = list(server.problems())
    assert bool(found) == (told is not None)
    assert told is None or all(line.startswith(told) for line in found)


@pytest.mark.parametrize(
    ("env", "index", "replicas", "wanted"),
    [
        ({}, 0, 2, {}),
        ({DEVICES: "4,5"}, 0, 1, {}),
        ({DEVICES: "4,5"}, 1, 2, {DEVICES: "5"}),
        ({DEVICES: "0,1,2,3"}, 0, 2, {DEVICES: "0,1"}),
    ],
)
def test_devices_are_dealt_out(env: Mapping[str, str], index: int, replicas: int, wanted: Mapping[str, str]):
    assert devices_of(env, index, replicas) == wanted


async def test_servers_that_run_elsewhere_are_used_and_none_is_started(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    fakes = [Fake(), Fake()]
    for fake in fakes:
        fake.dead = False
    async with fakes[0].serving() as one, fakes[1].serving() as two:
        fakes[1].version = 7  # left by an earlier run
        server = VllmServer(urls=(one, two), restarts=1)
        async with server.open(tiny_model, tmp_path / "logs", stop_ids=(9,)) as pool:
            assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
                "engine 1 holds weights labelled 7, taken for the policy's own until an update"
            ]
            for session in "abcd":
                assert (await pool.generate(ids(1, 2), Sampling(), session=session)).finish == "stop"
            await pool.update(tiny_model / "model.safetensors", 1)
            assert [fake.version for fake in fakes] == [1, 1]
            fakes[0].fails["/update_weights"] = 1
            await pool.update(tiny_model / "model.safetensors", 2)
            await until(lambda: pool.usage().alive == 2)
            assert [fake.version for fake in fakes] == [2, 2]
    assert not (tmp_path / "logs").exists()


async def test_a_server_elsewhere_that_does_not_answer_is_told_by_its_address(tiny_model: Path, tmp_path: Path):
    server = VllmServer(urls=("http://127.0.0.1:1",), start_timeout_s=0.1)
    with pytest.raises(EngineError, match=r"vLLM at http://127.0.0.1:1 did not answer within 0.1 s$"):
        async with server.open(tiny_model, tmp_path):
            pass


async def test_half_an_update_of_a_server_elsewhere_is_finished_once_it_is_reached_again(
    tiny_model: Path, tmp_path: Path
):
    fake = Fake()
    fake.dead = False
    async with (
        fake.serving() as url,
        VllmServer(urls=(url,), restarts=1).open(tiny_model, tmp_path, stop_ids=(9,)) as pool,
    ):
        fake.fails["/update_weights"] = 1
        await pool.update(tiny_model / "model.safetensors", 1)
        got = await pool.generate(ids(1), Sampling(), session="s")
        assert got.versions[0].version == 1 == fake.version and fake.mixed == 0
