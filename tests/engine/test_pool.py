"""The pool over servers that only pretend: where calls go, what a death costs, and what an update may never leave."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientError, web
from aiohttp.test_utils import TestServer

from lego.engine import pool as pools
from lego.engine import replica as replicas
from lego.engine import vllm_client
from lego.engine.admission import Admission
from lego.engine.base import Pool
from lego.engine.pool import EnginePool
from lego.engine.replica import Restarts, Start
from lego.engine.vllm_client import VllmEngine, connect
from lego.errors import EngineError, TrainerError
from lego.records import Floats, Generation, Ids, Sampling
from tests.engine.test_vllm_client import DENSE, chunk, stream

STOP = 9
UPDATE = [
    "/pause?mode=keep",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache?reset_running_requests=true&reset_external=true",
    "/resume",
    "/weight_info",
]


class Fake:
    """A server that dies and starts again; each token it samples is 1 + its version, the last one is `STOP`.

    The first logprob of an answer tells how many tokens of the prompt were cached: -1 less that.
    """

    def __init__(self) -> None:
        self.length, self.step_s = 3, 0.0
        self.routing = False
        self.asked: list[str] = []
        self.sessions: list[str] = []
        self.prompts: list[list[int]] = []
        self.bodies: list[dict[str, Any]] = []
        self.mixed = 0
        """Answers given while only a part of the new weights was there."""
        self.fails: dict[str, int] = {}
        self.refuses_resets = False
        self.starts = self.bad_starts = 0
        self.kv_usage: float | None = None
        self.sick = False
        self.dead = True
        self._reborn()

    def _reborn(self) -> None:
        self.version, self.loading, self.paused = 0, False, False
        self.cache: list[list[int]] = []

    @asynccontextmanager
    async def start(self) -> AsyncIterator[VllmEngine]:
        """One life of it."""
        self.starts += 1
        if self.bad_starts > 0:
            self.bad_starts -= 1
            raise EngineError(f"start {self.starts} failed")
        self.dead = self.sick = False
        self._reborn()
        life = self.starts

        def obituary() -> str | None:
            return "killed" if self.dead or life != self.starts else None

        async with self.serving() as url, connect(url) as http:
            yield VllmEngine(http, DENSE, url=url, routing=self.routing, obituary=obituary)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Its address while it listens."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        async with TestServer(app, handler_cancellation=True) as server:
            yield str(server.make_url("/"))

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if self.dead:
            return self._cut(request)
        if request.path in ("/health", "/metrics"):
            return self._looked_at(request.path)
        body = await request.json() if request.can_read_body else {}
        generates = request.path == "/inference/v1/generate"
        if not generates:
            self.asked.append(request.path_qs)
        if self.fails.get(request.path, 0):
            self.fails[request.path] -= 1
            return web.json_response({"error": "disk on fire"}, status=500)
        if generates:
            return await self._generate(request, body)
        return web.json_response(self._did(request.path, body))

    def _cut(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    def _looked_at(self, path: str) -> web.Response:
        if path == "/health":
            return web.Response(status=503 if self.sick else 200)
        if self.kv_usage is None:
            return web.Response(status=404)
        busy = 'vllm:num_requests_running{engine="0"} 3\nvllm:num_requests_waiting{engine="0"} 1\n'
        return web.Response(text=f'{busy}vllm:kv_cache_usage_perc{{engine="0"}} {self.kv_usage}\n')

    def _did(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/update_weight_version":
            self.version = int(body["new_version"])
        elif path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        elif path == "/start_weight_update":
            self.loading = True
        elif path == "/finish_weight_update":
            self.version, self.loading = int(body["weight_version"]), False
        elif path == "/reset_prefix_cache":
            if self.refuses_resets:
                return {"success": False}
            self.cache.clear()
        return {"success": True, "weight_version": str(self.version)}

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if request.headers["X-Session-ID"] != "check":
            self.sessions.append(request.headers["X-Session-ID"])
            self.prompts.append(body["token_ids"])
            self.bodies.append(body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        cached = max((len(p) for p in self.cache if p == body["token_ids"][: len(p)]), default=0)
        asked = body["sampling_params"]
        length = min(self.length, asked["max_tokens"])
        spans: list[dict[str, Any]] = []
        life = self.starts
        for i in range(length):
            await asyncio.sleep(self.step_s)
            while self.paused and not self.dead:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            if self.dead or life != self.starts:
                return self._cut(request)
            self.mixed += self.loading
            if not spans or spans[-1]["version"] != str(self.version):
                spans.append({"version": str(self.version), "start": i, "end": i})
            spans[-1]["end"] = i + 1
            last = i == length - 1
            finish = {"finish_reason": "stop" if last and i == self.length - 1 else "length"} if last else {}
            token = STOP if finish.get("finish_reason") == "stop" else 1 + self.version
            more = {**finish, "weight_versions": spans} if last else {}
            logprob = 0.0 if asked["top_k"] == 1 else -1.0 - cached
            await response.write(stream(chunk(token, logprob, **more)))
        self.cache.append(body["token_ids"])
        usage = {"choices": [], "usage": {"prompt_tokens": len(body["token_ids"])}}
        await response.write(stream(usage) + b"data: [DONE]\n\n")
        return response


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "LOOK_S", 0.01)
    monkeypatch.setattr(replicas, "HEALTH_EVERY_S", 0.02)
    monkeypatch.setattr(replicas, "PATIENCE_STEP_S", 0.01)
    monkeypatch.setattr(pools, "MOVE_PAUSE_S", 0.005)


@asynccontextmanager
async def pooled(*fakes: Fake, most: int = 3, unhealthy_s: float = 60.0, **options: Any) -> AsyncIterator[EnginePool]:
    pool = EnginePool(
        [Start(open=fake.start) for fake in fakes],
        admission=options.get("admission", Admission()),
        most_tokens=options.get("most_tokens", 0),
        restarts=Restarts(most=most, window_s=options.get("window_s", 600.0), unhealthy_s=unhealthy_s),
    )
    async with asyncio.timeout(20), pool.open() as opened:
        yield opened


@pytest.fixture
def weights(tiny_model: Path) -> Path:
    return tiny_model / "model.safetensors"


def ids(*tokens: int) -> Ids:
    return np.array(tokens, np.int32)


async def ask(pool: Any, session: str = "s", prompt: Sequence[int] = (1, 2), **options: Any) -> Generation:
    return await pool.generate(ids(*prompt), Sampling(max_tokens=50), session=session, **options)


async def until(condition: Any) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


def spans(got: Generation) -> list[tuple[int, int, int]]:
    return [(v.version, v.start, v.stop) for v in got.versions]


async def test_a_session_stays_and_new_ones_go_where_least_is_going_on():
    fakes = [Fake(), Fake()]
    async with pooled(*fakes) as pool:
        for fake in fakes:
            fake.step_s = 0.05
        async with asyncio.TaskGroup() as group:
            for i in range(10):
                group.create_task(ask(pool, f"s{i}"))
        assert [len(fake.sessions) for fake in fakes] == [5, 5]
        for fake in fakes:
            fake.step_s = 0.0
        first = set(fakes[0].sessions)
        for _ in range(3):
            for i in range(10):
                await ask(pool, f"s{i}")
        assert set(fakes[0].sessions) == first and pool.usage().moved_sessions == 0


async def test_every_request_carries_all_sampling_fields():
    fake = Fake()
    async with pooled(fake) as pool:
        await pool.generate(
            ids(1), Sampling(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, max_tokens=3, seed=5), session="s"
        )
    told = fake.bodies[0]["sampling_params"]
    wanted = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "max_tokens": 3, "seed": 5, "n": 1}
    wanted |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_tokens": 0}
    wanted |= {"stop": [], "stop_token_ids": [STOP], "ignore_eos": True, "logprobs": 0, "logit_bias": None}
    assert told.items() >= wanted.items()


async def test_no_call_is_lost_when_a_replica_is_killed_and_what_was_told_stays_told():
    fakes = [Fake(), Fake()]
    told: dict[int, list[Ids]] = {i: [] for i in range(8)}
    async with pooled(*fakes) as pool:
        for fake in fakes:
            fake.length, fake.step_s = 10, 0.02
        async with asyncio.TaskGroup() as group:
            calls = [
                group.create_task(
                    ask(pool, f"s{i}", progress=lambda so_far, _, mine=told[i]: mine.append(so_far.copy()))
                )
                for i in range(8)
            ]
            await until(lambda: all(told.values()))
            fakes[0].dead = True
        usage = pool.usage()
    for i, call in enumerate(calls):
        got = call.result()
        assert got.finish == "stop" and got.output_ids[-1] == STOP and got.prompt_len == 2
        assert len(got.logprobs) == len(got.output_ids) and spans(got) == [(0, 0, len(got.output_ids))]
        for before, after in zip(told[i], told[i][1:], strict=False):
            np.testing.assert_array_equal(before, after[: len(before)])
        np.testing.assert_array_equal(told[i][-1], got.output_ids)
    assert usage.moved_calls == 4 and usage.moved_sessions == 4


async def test_a_replica_that_died_is_back_with_the_newest_weights(weights: Path):
    fakes = [Fake(), Fake()]
    async with pooled(*fakes) as pool:
        await pool.update(weights, 3)
        fakes[1].dead = True
        await until(lambda: fakes[1].starts == 2 and pool.usage().alive == 2)
        assert fakes[1].version == 3 and pool.usage().restarts == 1
        assert fakes[1].asked[-len(UPDATE) :] == UPDATE
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(ask(pool, f"n{i}")) for i in range(4)]
        assert {spans(call.result())[0][0] for call in calls} == {3} and fakes[1].sessions


async def test_calls_wait_for_the_only_replica_to_come_back():
    fake = Fake()
    async with pooled(fake) as pool:
        fake.length, fake.step_s = 10, 0.02
        async with asyncio.TaskGroup() as group:
            call = group.create_task(ask(pool))
            await until(lambda: fake.sessions)
            fake.dead = True
            await until(lambda: fake.starts == 2)
            later = group.create_task(ask(pool, "other"))
        assert call.result().finish == later.result().finish == "stop"


async def test_a_replica_that_keeps_dying_is_given_up_and_the_first_cause_is_told(weights: Path):
    fake = Fake()
    async with pooled(fake, most=2) as pool:
        fake.bad_starts = 9
        fake.dead = True
        with pytest.raises(EngineError, match=r"^.*killed.*engine 0 then failed 2 times more"):
            await ask(pool)
        with pytest.raises(EngineError, match=r"^killed; engine 0 then failed 2 times more within 600 s$"):
            await pool.update(weights, 1)
        assert fake.starts == 3


async def test_one_replica_given_up_leaves_the_other_serving():
    fakes = [Fake(), Fake()]
    async with pooled(*fakes, most=0) as pool:
        fakes[0].dead = True
        await until(lambda: pool.usage().alive == 1)
        for i in range(4):
            await ask(pool, f"s{i}")
        assert pool.usage().alive == 1 and fakes[0].starts == 1


async def test_a_server_that_does_not_come_up_at_first_ends_the_others_too():
    fakes = [Fake(), Fake()]
    fakes[1].bad_starts = 1
    before = asyncio.all_tasks()
    with pytest.raises(EngineError, match=r"^start 1 failed$"):
        async with pooled(*fakes):
            raise AssertionError("opened")
    await asyncio.sleep(0.05)
    assert asyncio.all_tasks() == before


async def test_an_error_inside_is_not_wrapped():
    with pytest.raises(KeyError):
        async with pooled(Fake()):
            raise KeyError("mine")


async def test_a_server_that_stops_answering_for_its_health_is_started_again():
    fake = Fake()
    async with pooled(fake, unhealthy_s=0.4) as pool:
        fake.length, fake.step_s = 2, 0.1
        async with asyncio.TaskGroup() as group:
            call = group.create_task(ask(pool))
            await until(lambda: fake.sessions)
            fake.sick, fake.paused = True, True  # it hangs: neither answers nor breaks off
        assert call.result().finish == "stop" and fake.starts == 2


async def test_a_refused_prompt_is_the_callers_error_and_tried_once():
    fake = Fake()
    async with pooled(fake, Fake()) as pool:
        with pytest.raises(EngineError, match="engine's answer lacks a field"):
            await pool.generate(ids(1), Sampling(max_tokens=0), session="s")
        assert pool.usage().moved_calls == 0 and pool.usage().alive == 2


async def test_an_update_reaches_all_replicas_in_the_one_right_order(weights: Path):
    fakes = [Fake(), Fake()]
    async with pooled(*fakes) as pool:
        await pool.update(weights, 4)
        last = pool.usage().last_update
    for fake in fakes:
        assert fake.asked == ["/update_weight_version", *UPDATE] and fake.version == 4
    assert pool.version == 4 and last is not None and last.bytes == weights.stat().st_size
    assert 0 < last.pause_seconds <= last.seconds


async def test_the_first_answers_after_an_update_use_nothing_cached(weights: Path):
    fakes = [Fake(), Fake()]
    async with pooled(*fakes) as pool:
        for _ in range(2):
            async with asyncio.TaskGroup() as group:
                calls = [group.create_task(ask(pool, f"s{i}", (1, 2, 3))) for i in range(4)]
        assert {call.result().logprobs[0] for call in calls} == {-4.0}
        await pool.update(weights, 1)
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(ask(pool, f"s{i}", (1, 2, 3))) for i in range(2)]
        assert {call.result().logprobs[0] for call in calls} == {-1.0}


async def test_answers_under_way_go_on_after_an_update_and_say_where(weights: Path):
    fakes = [Fake(), Fake()]
    async with pooled(*fakes) as pool:
        for fake in fakes:
            fake.length, fake.step_s = 12, 0.01
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(ask(pool, f"s{i}")) for i in range(4)]
            await until(lambda: all(fake.sessions for fake in fakes))
            await asyncio.sleep(0.04)
            await pool.update(weights, 1)
    for call in calls:
        (_, _, cut), (_, start, stop) = spans(call.result())
        assert 0 < cut == start < stop == 12
        assert call.result().output_ids[:-1].tolist() == [1] * cut + [2] * (11 - cut)
    assert not any(fake.mixed for fake in fakes)


@pytest.mark.parametrize("step", [line.split("?")[0] for line in UPDATE[:-1]])
async def test_a_half_failed_update_leaves_no_replica_on_mixed_weights(weights: Path, step: str):
    fakes = [Fake(), Fake()]
    async with pooled(*fakes) as pool:
        fakes[1].fails[step] = 1
        await pool.update(weights, 2)
        assert pool.version == 2 and pool.usage().alive == 1
        await ask(pool)
        await until(lambda: pool.usage().alive == 2)
        assert [fake.version for fake in fakes] == [2, 2] and fakes[1].starts == 2
    assert not any(fake.mixed for fake in fakes)


async def test_an_update_that_fails_everywhere_is_finished_by_servers_that_start_again(weights: Path):
    fakes = [Fake(), Fake()]
    async with pooled(*fakes) as pool:
        await pool.update(weights, 1)
        for fake in fakes:
            fake.fails["/update_weights"] = 1
        await pool.update(weights, 2)
        assert spans(await ask(pool))[0][0] == pool.version == 2
        await until(lambda: pool.usage().alive == 2)
        assert [fake.version for fake in fakes] == [2, 2] and [fake.starts for fake in fakes] == [2, 2]
    assert not any(fake.mixed for fake in fakes)


async def test_weights_that_no_server_can_take_are_an_error_with_the_first_cause(weights: Path):
    fakes = [Fake(), Fake()]
    async with pooled(*fakes, most=1) as pool:
        for fake in fakes:
            fake.fails["/update_weights"] = 9
        with pytest.raises(
            EngineError, match=r"^update to version 1 failed: /update_weights: status 500.*disk on fire"
        ):
            await pool.update(weights, 1)
        assert [fake.starts for fake in fakes] == [2, 2]


class Sending:
    """Weights that are sent straight to servers, as `lego.engine.direct` does; the file is there after `export`."""

    def __init__(self, file: Path, fakes: Sequence[Fake]) -> None:
        self.file, self.fakes = file, fakes
        self.seen: list[tuple[str, list[bool], list[int]]] = []
        """Each act's name, with which servers were paused then and what versions they had."""
        self.lives: list[str] = []
        self.dies_after = 99
        self.breaks = ""
        """What ends the trainer: `send`, at its second one, or `export`; `hang`: its second sending never ends."""

    async def send(self, url: str, life: str, version: int) -> None:
        self._see("send")
        self.lives.append(life)
        if self.breaks == "send" and len(self.lives) == 2:
            raise TrainerError("rank 1 failed")
        if self.breaks == "hang" and len(self.lives) == 2:
            await asyncio.sleep(60)
        try:
            await self._sent(url, version)
        except ClientError as error:
            raise EngineError(f"weights from the trainer: {error}") from error
        self.dies_after -= 1
        if not self.dies_after:
            self.fakes[1].dead = True

    async def _sent(self, url: str, version: int) -> None:
        async with connect(url) as http:
            for path, body in (("start", {}), ("update", {}), ("finish", {"weight_version": str(version)})):
                async with http.post(f"/{path}_weight{'s' if path == 'update' else '_update'}", json=body) as answer:
                    if answer.status != 200:
                        raise EngineError(f"weights from the trainer: {await answer.text()}")

    async def export(self, version: int) -> Path:
        self._see("export")
        if self.breaks == "export":
            raise TrainerError("no room")
        return self.file

    def _see(self, what: str) -> None:
        self.seen.append((what, [fake.paused for fake in self.fakes], [fake.version for fake in self.fakes]))


async def test_weights_are_sent_to_one_server_after_the_other_while_the_rest_samples(weights: Path):
    fakes = [Fake(), Fake()]
    source = Sending(weights, fakes)
    async with pooled(*fakes) as pool:
        await pool.update_from(source, 1)
        await pool.update_from(source, 2)
        assert {spans(await ask(pool, f"s{i}"))[0][0] for i in range(4)} == {2}
        assert pool.usage().last_update is not None
    first, second, export = source.seen[:3]
    assert first == ("send", [True, False], [0, 0])
    assert second == ("send", [False, True], [1, 0])
    assert export == ("export", [False, False], [1, 1])
    assert source.lives[:2] == source.lives[2:] and len(set(source.lives)) == 2


@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)])
async def test_servers_that_weights_did_not_reach_start_again_with_the_file(weights: Path, failing: tuple[int, ...]):
    fakes = [Fake(), Fake()]
    source = Sending(weights, fakes)
    async with pooled(*fakes) as pool:
        for i in failing:
            fakes[i].fails["/update_weights"] = 1
        await pool.update_from(source, 1)
        assert spans(await ask(pool))[0][0] == 1
        await until(lambda: pool.usage().alive == 2)
        await pool.update_from(source, 2)
        assert [fake.version for fake in fakes] == [2, 2]
        assert [fake.starts for fake in fakes] == [2 if i in failing else 1 for i in (0, 1)]
    lives = source.lives
    assert [lives[i] != lives[i + 2] for i in (0, 1)] == [i in failing for i in (0, 1)], "a new life has a new way"
    assert not any(fake.mixed for fake in fakes)


async def test_a_server_that_ends_before_its_turn_holds_nobody_up(weights: Path):
    fakes = [Fake(), Fake()]
    source = Sending(weights, fakes)
    source.dies_after = 1
    async with pooled(*fakes) as pool:
        await pool.update_from(source, 1)
        await until(lambda: pool.usage().alive == 2)
        assert [fake.version for fake in fakes] == [1, 1] and fakes[1].starts == 2


@pytest.mark.parametrize("breaks", ["send", "export"])
async def test_weights_that_no_file_holds_are_given_up_when_the_trainer_ends(weights: Path, breaks: str):
    fakes = [Fake(), Fake()]
    source = Sending(weights, fakes)
    async with pooled(*fakes) as pool:
        await pool.update(weights, 1)
        source.breaks = breaks
        with pytest.raises(TrainerError):
            await pool.update_from(source, 2)
        await until(lambda: pool.usage().alive == 2)
        assert [fake.version for fake in fakes] == [pool.version] * 2 == [1, 1]
    assert not any(fake.mixed for fake in fakes)


async def test_a_cancelled_sending_leaves_one_version_everywhere(weights: Path):
    fakes = [Fake(), Fake()]
    source = Sending(weights, fakes)
    async with pooled(*fakes) as pool:
        source.breaks = "hang"
        update = asyncio.create_task(pool.update_from(source, 1))
        await until(lambda: len(source.lives) == 2)
        update.cancel()
        await asyncio.gather(update, return_exceptions=True)
        await until(lambda: pool.usage().alive == 2)
        assert [fake.version for fake in fakes] == [pool.version] * 2 == [0, 0]
        await pool.update_from(source, 1)
        assert [fake.version for fake in fakes] == [1, 1]


@pytest.mark.parametrize("hangs", ["/pause", "/update_weights", "/resume"])
async def test_a_server_that_hangs_in_a_sending_is_started_again_and_the_others_have_the_weights(
    weights: Path, hangs: str
):
    class Hanging(Fake):
        async def _handle(self, request: web.Request) -> web.StreamResponse:
            if request.path == hangs and self.starts == 1:
                self.sick = True  # as one that is stopped: nothing answers until it is killed
                await asyncio.sleep(1.0)
                return self._cut(request)
            return await super()._handle(request)

    fakes = [Hanging(), Fake()]
    async with pooled(*fakes, unhealthy_s=0.1) as pool:
        await pool.update_from(Sending(weights, fakes), 1)
        await until(lambda: pool.usage().alive == 2)
        assert [fake.version for fake in fakes] == [1, 1] and fakes[0].starts == 2


async def test_servers_that_never_take_the_weights_are_given_up_however_slowly_they_start(weights: Path):
    class Slow(Fake):
        @asynccontextmanager
        async def start(self) -> AsyncIterator[VllmEngine]:
            if self.starts:
                await asyncio.sleep(0.06)
            async with super().start() as engine:
                yield engine

    fake = Slow()
    async with pooled(fake, most=2, window_s=0.1) as pool:
        fake.fails["/update_weights"] = 99
        async with asyncio.timeout(5):
            with pytest.raises(EngineError, match="engine 0 then failed 2 times more"):
                await pool.update(weights, 1)
        assert fake.starts == 3


async def test_a_look_at_a_server_that_breaks_off_meanwhile_ends_nothing_else(
    weights: Path, monkeypatch: pytest.MonkeyPatch
):
    healthy = VllmEngine.healthy

    async def at_last(engine: VllmEngine) -> bool:
        well = await healthy(engine)
        if breaks and engine.url == breaks.pop():
            await engine.break_off("an update of it failed")
        return well

    fakes = [Fake(), Fake()]
    async with pooled(*fakes) as pool:
        await pool.update(weights, 1)
        first = pool._replicas[0].engine
        assert first is not None
        breaks = [first.url] * 9
        monkeypatch.setattr(VllmEngine, "healthy", at_last)
        await until(lambda: first.broken)
        await until(lambda: pool.usage().alive == 2)
        assert [fake.version for fake in fakes] == [1, 1] and pool.usage().restarts == 1


async def test_a_server_that_served_for_long_is_not_given_up_for_what_was_before():
    fake = Fake()
    async with pooled(fake, most=1, window_s=0.05) as pool:
        for life in (1, 2, 3):
            await until(lambda: pool.usage().alive == 1 and fake.starts == life)  # noqa: B023
            await asyncio.sleep(0.1)
            fake.dead = True
        await until(lambda: pool.usage().alive == 1 and fake.starts == 4)


async def test_a_cache_that_stays_full_of_old_keys_fails_the_update_and_says_who_holds_it(
    weights: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("lego.engine.vllm_client.RESET_TRIES", 2)
    fake = Fake()
    async with pooled(fake, most=0) as pool:
        fake.refuses_resets, fake.kv_usage = True, 0.5
        with pytest.raises(EngineError, match=r"refused 2 times, blocks .* by 3 answers under way and 1 waiting"):
            await pool.update(weights, 1)
        assert fake.asked[-2:] == UPDATE[4:5] * 2  # not resumed


async def test_a_cancelled_update_leaves_whole_weights_everywhere(weights: Path):
    fakes = [Fake(), Fake()]
    async with pooled(*fakes) as pool:
        for delay_s in (0.0, 0.002, 0.004, 0.008):
            task = asyncio.create_task(pool.update(weights, pool.version + 1))
            await asyncio.sleep(delay_s)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: pool.usage().alive == 2)
            assert [fake.version for fake in fakes] == [pool.version] * 2
        await pool.update(weights, 90)
        assert [fake.version for fake in fakes] == [90, 90]


async def test_a_bad_weights_file_touches_nobody(tmp_path: Path):
    fakes = [Fake(), Fake()]
    async with pooled(*fakes) as pool:
        with pytest.raises(EngineError, match="No such file"):
            await pool.update(tmp_path / "none", 1)
        assert pool.usage().alive == 2 and all(fake.asked == ["/update_weight_version"] for fake in fakes)


async def test_told_tokens_of_a_routed_model_do_not_go_on_with_other_weights(weights: Path):
    fakes = [Fake(), Fake()]
    for fake in fakes:
        fake.routing, fake.length, fake.step_s = True, 40, 0.02
    heard: list[Ids] = []

    def hear(so_far: Ids, _: Floats) -> None:
        heard.append(so_far)

    async with pooled(*fakes) as pool:
        async with asyncio.TaskGroup() as group:
            call = group.create_task(failure(pool, hear))
            await until(lambda: heard)
            fakes[0].fails["/start_weight_update"] = 1
            await pool.update(weights, 1)
        assert "update to version 1 failed" in call.result() and pool.usage().moved_sessions == 0


@pytest.mark.parametrize("routing", [True, False])
async def test_an_answer_of_a_dead_replica_that_was_behind_goes_on_with_newer_weights_unless_experts_are_told(
    weights: Path, routing: bool
):
    fakes = [Fake(), Fake()]
    for fake in fakes:
        fake.routing, fake.length, fake.step_s = routing, 40, 0.01
    heard: list[Ids] = []

    def hear(so_far: Ids, _: Floats) -> None:
        heard.append(so_far)

    async with pooled(*fakes) as pool, pool.pinned(), asyncio.TaskGroup() as group:
        call = group.create_task(failure(pool, hear) if routing else ask(pool, progress=hear))
        await until(lambda: heard and fakes[0].sessions)
        await pool.update(weights, 1)
        fakes[0].dead = True
    got = call.result()
    if isinstance(got, str):
        assert "killed; then: an answer whose engine died after" in got and "version 0 cannot go on" in got
    else:
        (old, _, cut), (new, start, stop) = spans(got)
        assert (old, new) == (0, 1) and 0 < cut == start < stop and got.output_ids[-1] == STOP
        assert got.output_ids[:-1].tolist() == [1] * cut + [2] * (stop - start - 1)


async def failure(pool: EnginePool, progress: Any) -> str:
    with pytest.raises(EngineError) as caught:
        await ask(pool, progress=progress)
    return str(caught.value)


async def test_a_pinned_engine_keeps_its_weights_while_the_other_is_updated(weights: Path):
    fakes = [Fake(), Fake()]
    async with pooled(*fakes) as pool:
        await pool.update(weights, 1)
        async with pool.pinned() as pinned:
            await pool.update(weights, 2)
            await pool.update(weights, 3)
            assert [spans(await ask(pinned, "v"))[0][0] for _ in range(3)] == [1, 1, 1]
            assert {spans(await ask(pool, f"s{i}"))[0][0] for i in range(6)} == {3}
            with pytest.raises(RuntimeError, match="pinned to version 1"):
                await pinned.update(weights, 9)
        await until(lambda: [fake.version for fake in fakes] == [3, 3])
        await until(lambda: not any(fake.loading or fake.paused for fake in fakes))


async def test_with_one_replica_an_update_waits_for_the_pin(weights: Path):
    fake = Fake()
    async with pooled(fake) as pool:
        async with pool.pinned() as pinned:
            update = asyncio.create_task(pool.update(weights, 1))
            await asyncio.sleep(0.1)
            assert not update.done() and spans(await ask(pinned))[0][0] == 0
        await update
        assert fake.version == 1


async def test_a_pin_moves_to_another_replica_of_its_version_or_says_that_there_is_none(weights: Path):
    fakes = [Fake(), Fake()]
    async with pooled(*fakes, most=0) as pool, pool.pinned() as pinned:
        fakes[0].dead = True
        assert [spans(await ask(pinned, "v"))[0][0] for _ in range(2)] == [0, 0]
        assert fakes[1].sessions == ["v", "v"]
        update = asyncio.create_task(pool.update(weights, 1))
        await asyncio.sleep(0.05)
        assert not update.done()
        update.cancel()


async def test_a_pin_whose_weights_are_gone_is_an_engine_error(weights: Path):
    fakes = [Fake(), Fake()]
    async with pooled(*fakes) as pool, pool.pinned() as pinned:
        await pool.update(weights, 1)
        fakes[0].dead = True
        with pytest.raises(EngineError, match="pinned to version 0 is gone"):
            await ask(pinned, "v")
        await until(lambda: [fake.version for fake in fakes] == [1, 1])


async def test_tokens_told_before_and_after_an_update_do_not_outlive_their_engine(weights: Path):
    fakes = [Fake(), Fake()]
    for fake in fakes:
        fake.length, fake.step_s = 200, 0.01
    heard: list[Ids] = []

    def hear(so_far: Ids, _: Floats) -> None:
        heard.append(so_far)

    async with pooled(*fakes) as pool, asyncio.TaskGroup() as group:
        call = group.create_task(failure(pool, hear))
        await until(lambda: heard)
        await pool.update(weights, 1)
        before = len(heard)
        await until(lambda: len(heard) > before + 2)
        fakes[0].dead = True
    assert "killed" in call.result() and not fakes[1].sessions  # only its end would have said where


async def test_an_engine_that_fails_one_call_does_not_get_that_call_again_if_there_is_another():
    fakes = [Fake(), Fake()]
    async with pooled(*fakes) as pool:
        fakes[0].fails["/inference/v1/generate"] = 99
        assert (await ask(pool)).finish == "stop"
        assert fakes[0].fails["/inference/v1/generate"] == 98 and pool.usage().moved_calls == 1


async def test_an_engine_that_fails_every_call_is_told_by_its_first_words_and_the_number_of_tries():
    fake = Fake()
    async with pooled(fake) as pool:
        fake.fails["/inference/v1/generate"] = 99
        with pytest.raises(EngineError, match=r"^/inference/v1/generate: status 500.*; tried 7 times, at last: "):
            await ask(pool)
        assert fake.fails["/inference/v1/generate"] == 99 - 7


async def test_connections_that_drop_cost_nothing():
    fake = Fake()
    async with pooled(fake) as pool:
        fake.length, fake.step_s = 20, 0.01
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(ask(pool, f"s{i}")) for i in range(4)]
            await until(lambda: len(fake.sessions) == 4)
            await asyncio.sleep(0.05)
            engine = pool._replicas[0].engine
            assert engine is not None
            for response in tuple(engine._reading):
                response.close()
        assert [call.result().finish for call in calls] == ["stop"] * 4 and fake.starts == 1


async def test_full_engines_make_calls_wait_here_until_they_tell_of_room():
    fake = Fake()
    fake.kv_usage = 0.95
    async with pooled(fake, most_tokens=100, admission=Admission(idle_grace_s=0.0)) as pool:
        fake.length, fake.step_s = 1000, 0.01
        async with asyncio.TaskGroup() as group:
            await until(lambda: pool.usage().kv_usage == 0.95)
            first = group.create_task(ask(pool, "a"))
            await until(lambda: fake.sessions == ["a"])
            others = [group.create_task(ask(pool, name)) for name in "bc"]
            await asyncio.sleep(0.1)
            assert fake.sessions == ["a"] and pool.usage().waiting == 2
            fake.kv_usage = 0.1
            await until(lambda: fake.sessions == ["a", "b", "c"])
            assert pool.usage().waiting == 0
            for call in (first, *others):
                call.cancel()
        assert pool.usage().running == 0


async def test_a_call_that_waits_at_a_replica_that_dies_goes_to_another():
    fakes = [Fake(), Fake()]
    fakes[0].kv_usage = 0.95
    async with pooled(*fakes, most=0, most_tokens=100) as pool:
        await until(lambda: pool.usage().kv_usage == 0.95)
        fakes[0].length, fakes[0].step_s = 1000, 0.01
        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            calls = [group.create_task(ask(pool, "s"))]
            await until(lambda: fakes[0].sessions)
            calls.append(group.create_task(ask(pool, "s", (5, 6))))
            await until(lambda: pool.usage().waiting == 1)
            fakes[0].dead = True
        assert [call.result().finish for call in calls] == ["stop"] * 2 and fakes[1].sessions == ["s"] * 2


async def test_a_pool_is_a_pool_and_costs_little_a_call():
    async with AsyncExitStack() as stack:
        pool: Pool = await stack.enter_async_context(pooled(*(Fake() for _ in range(4))))
        began = time.process_time()
        async with asyncio.TaskGroup() as group:
            for i in range(400):
                group.create_task(ask(pool, f"s{i}"))
        assert (time.process_time() - began) / 400 < 0.02  # with both ends of HTTP in this process


async def test_a_replica_that_could_not_read_the_new_weights_gets_them_before_it_serves_again(
    weights: Path, monkeypatch: pytest.MonkeyPatch
):
    check, fails = vllm_client.check_weights_file, [1]

    def at_times(file: Path, version: int) -> Path:
        if fails:
            fails.pop()
            raise EngineError(f"{file}: input/output error")
        return check(file, version)

    fakes = [Fake(), Fake()]
    async with pooled(*fakes) as pool:
        monkeypatch.setattr(vllm_client, "check_weights_file", at_times)
        await pool.update(weights, 1)
        assert {spans(await ask(pool, f"s{i}"))[0][0] for i in range(6)} == {1}
        await until(lambda: [fake.version for fake in fakes] == [1, 1])


async def test_a_server_that_hangs_while_it_comes_back_holds_no_update_up(weights: Path):
    class Hanging(Fake):
        async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            if self.starts == 2:
                await asyncio.sleep(60)
            return await super()._generate(request, body)

    fakes = [Fake(), Hanging()]
    async with pooled(*fakes, unhealthy_s=0.3) as pool:
        fakes[1].dead = True
        await until(lambda: fakes[1].starts == 2)
        await pool.update(weights, 1)
        await until(lambda: [fake.version for fake in fakes] == [1, 1])
        assert fakes[1].starts == 3
