"""The client against a server that only pretends: orders, refusals and broken connections a real one rarely shows."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from lego.engine.folder import ModelFolder
from lego.engine.vllm_client import VllmEngine, check_weights_file, connect, events
from lego.errors import EngineError
from lego.records import Floats, Ids, Sampling

DENSE = ModelFolder(
    path=Path("m"), stop_ids=(9,), vocab_size=10, experts=0, experts_per_token=0, layers=1, moe_layers=()
)
PROMPT = np.array([1, 2], np.int32)


class Pretender:
    """Keeps the order of what it was asked and a prefix cache of prompts, like a server would."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.cache: set[tuple[int, ...]] = set()
        self.version = "0"
        self.answers: dict[str, tuple[int, Any]] = {}
        self.raw: bytes | None = None
        self.finish = "stop"
        self.refuse_resets = 0
        self.hold = asyncio.Event()
        self.hold.set()
        self.busy = asyncio.Event()
        self.dropped = asyncio.Semaphore(0)
        self.cut = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path_qs)
        if request.path in self.answers:
            status, answer = self.answers[request.path]
            return web.json_response(answer, status=status)
        body = await request.json() if request.can_read_body else {}
        if request.path == "/inference/v1/generate":
            return await self.generate(request, body)
        if request.path == "/finish_weight_update":
            self.version = body["weight_version"]
        if request.path == "/reset_prefix_cache":
            return self.reset()
        return web.json_response({"weight_version": self.version})

    def reset(self) -> web.Response:
        self.refuse_resets -= 1
        if self.refuse_resets < 0:
            self.cache.clear()
        return web.json_response({"success": self.refuse_resets < 0})

    async def generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Token 4 for ever, as the answer is held, then token 9; a chunk each."""
        if self.raw is not None:
            return web.Response(body=self.raw)
        prompt = tuple(body["token_ids"])
        cached = len(prompt) if prompt in self.cache else 0
        self.cache.add(prompt)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        sent = 0
        try:
            while not sent or not self.hold.is_set():
                await response.write(stream(chunk(4, -1.0 - cached)))
                sent += 1
                self.busy.set()
                if self.cut.is_set() and request.transport is not None:
                    request.transport.abort()
                await asyncio.sleep(0 if self.hold.is_set() else 0.05)
            spans = [{"version": self.version, "start": 0, "end": sent + 1}]
            last = chunk(9, -1.0 - cached, finish_reason=self.finish, weight_versions=spans)
            usage = {"choices": [], "usage": {"prompt_tokens": len(prompt)}}
            await response.write(stream(last, usage) + b"data: [DONE]\n\n")
        except (asyncio.CancelledError, ConnectionError):
            self.dropped.release()
            raise
        return response


def chunk(token: int, logprob: float, **last: Any) -> dict[str, Any]:
    choice = {"token_ids": [token], "logprobs": {"content": [{"token_id": token, "logprob": logprob}]}}
    return {
        "choices": [choice | {"finish_reason": None, "routed_experts": None, "weight_versions": None} | last],
        "usage": None,
    }


def stream(*chunks: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)


@asynccontextmanager
async def pretending(**options: Any) -> AsyncIterator[tuple[Pretender, VllmEngine]]:
    pretender = Pretender()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", pretender.handle)
    async with TestServer(app, handler_cancellation=True) as server, connect(str(server.make_url("/"))) as http:
        yield pretender, VllmEngine(http, DENSE, routing=False, **options)


@pytest.fixture
def weights(tiny_model: Path) -> Path:
    return tiny_model / "model.safetensors"


async def ask(engine: VllmEngine):
    return await engine.generate(PROMPT, Sampling(max_tokens=4), session="s")


async def test_an_update_pauses_loads_finishes_resets_and_only_then_resumes(weights: Path):
    async with pretending(pause="wait") as (pretender, engine):
        await engine.update(weights, 5)
    assert pretender.asked == [
        "/pause?mode=wait",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/reset_prefix_cache?reset_running_requests=true&reset_external=true",
        "/resume",
        "/weight_info",
    ]


async def test_the_first_answer_after_an_update_uses_nothing_cached(weights: Path):
    async with pretending() as (_, engine):
        await ask(engine)
        assert (await ask(engine)).logprobs[0] == -3.0  # the pretender shows two cached tokens
        await engine.update(weights, 5)
        got = await ask(engine)
    assert got.logprobs[0] == -1.0
    assert got.versions[0].version == 5


async def test_a_cache_reset_that_is_refused_for_a_while_is_asked_again(weights: Path):
    async with pretending() as (pretender, engine):
        pretender.refuse_resets = 2
        await engine.update(weights, 1)
    assert len([p for p in pretender.asked if p.startswith("/reset")]) == 3


async def test_a_cache_reset_that_stays_refused_fails_the_update_and_the_engine(weights: Path, monkeypatch):
    monkeypatch.setattr("lego.engine.vllm_client.RESET_TRIES", 2)
    async with pretending() as (pretender, engine):
        pretender.refuse_resets = 99
        with pytest.raises(EngineError, match="reset_prefix_cache: refused 2 times"):
            await engine.update(weights, 1)
        with pytest.raises(EngineError, match="update to version 1 failed: /reset_prefix_cache"):
            await ask(engine)
    assert "/resume" not in pretender.asked


@pytest.mark.parametrize(
    "step", ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume", "/weight_info"]
)
async def test_a_failing_step_is_named_and_ends_the_engine(weights: Path, step: str):
    async with pretending() as (pretender, engine):
        pretender.answers[step] = (500, {"error": "disk on fire"})
        with pytest.raises(EngineError, match=f"{step}.*status 500.*disk on fire"):
            await engine.update(weights, 1)
        with pytest.raises(EngineError, match="update to version 1 failed"):
            await ask(engine)


async def test_a_server_that_keeps_its_old_version_fails_the_update(weights: Path):
    async with pretending() as (pretender, engine):
        pretender.answers["/weight_info"] = (200, {"weight_version": "0"})
        with pytest.raises(EngineError, match="says version '0' after the update to 2"):
            await engine.update(weights, 2)


async def test_a_failed_update_ends_the_answers_under_way(weights: Path):
    async with pretending() as (pretender, engine):
        pretender.hold.clear()
        pretender.answers["/update_weights"] = (500, "no")
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            call = group.create_task(failure_of(engine))
            await pretender.busy.wait()
            with pytest.raises(EngineError, match="/update_weights"):
                await engine.update(weights, 1)
        assert "update to version 1 failed" in call.result()


async def failure_of(engine: VllmEngine) -> str:
    with pytest.raises(EngineError) as caught:
        await ask(engine)
    return str(caught.value)


@pytest.mark.parametrize("held", [False, True])
async def test_an_aborted_answer_is_an_error_though_the_status_is_200(held: bool):
    async with pretending() as (pretender, engine):
        pretender.finish = "abort"
        if held:
            pretender.hold.clear()
        async with asyncio.TaskGroup() as group:
            call = group.create_task(failure_of(engine))
            await pretender.busy.wait()
            pretender.hold.set()
        assert "finish_reason 'abort' after" in call.result()


async def test_progress_is_told_all_ids_and_logprobs_so_far_and_the_last_time_the_whole():
    told: list[tuple[Ids, Floats]] = []
    async with pretending() as (_, engine):
        got = await engine.generate(
            PROMPT, Sampling(max_tokens=4), session="s", progress=lambda *so_far: told.append(so_far)
        )
    assert [(ids.tolist(), logprobs.tolist()) for ids, logprobs in told] == [([4], [-1.0]), ([4, 9], [-1.0, -1.0])]
    np.testing.assert_array_equal(told[-1], (got.output_ids, got.logprobs))


async def test_an_error_in_the_middle_of_a_stream_is_told_in_the_servers_words():
    async with pretending(obituary=lambda: "vLLM ended with status 1") as (pretender, engine):
        error = {"error": {"message": "engine dead", "code": 500}}
        pretender.raw = stream(chunk(4, -1.0), error)
        with pytest.raises(EngineError, match=r"engine dead.*500.*; vLLM ended with status 1"):
            await ask(engine)


async def test_a_connection_cut_before_the_finish_is_told_with_the_servers_last_words():
    async with pretending(obituary=lambda: "vLLM ended with status 137") as (pretender, engine):
        pretender.hold.clear()
        async with asyncio.TaskGroup() as group:
            call = group.create_task(failure_of(engine))
            await pretender.busy.wait()
            pretender.cut.set()
        assert "ClientPayloadError" in call.result() and "status 137" in call.result()


async def test_a_stream_without_an_end_to_its_event_is_refused_at_a_size(monkeypatch):
    monkeypatch.setattr("lego.engine.vllm_client.MAX_EVENT_BYTES", 1000)
    async with pretending() as (pretender, engine):
        pretender.raw = stream(chunk(4, -1.0)) + b"data: " + b"x" * 1001
        with pytest.raises(EngineError, match="an event of over 1000 bytes"):
            await ask(engine)


async def test_events_are_the_same_however_their_bytes_are_cut():
    whole = b'data: {"a": 1}\n\ndata: {}\n\ndata: [DONE]\n\n'
    for size in range(1, len(whole) + 1):
        pieces = in_turn([whole[i : i + size] for i in range(0, len(whole), size)])
        assert [bytes(event) async for event in events(pieces)] == [b'{"a": 1}', b"{}"]


async def in_turn(pieces: list[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def test_logprobs_that_are_not_of_the_distribution_sampled_from_are_refused():
    async with pretending() as (pretender, engine):
        pretender.raw = one_token(0.0)
        await engine.check_logprobs()
        pretender.raw = one_token(-3.9)
        with pytest.raises(EngineError, match=r"logprob -3.900 .* --logprobs-mode processed_logprobs"):
            await engine.check_logprobs()


def one_token(logprob: float) -> bytes:
    spans = [{"version": "0", "start": 0, "end": 1}]
    usage = {"choices": [], "usage": {"prompt_tokens": 1}}
    return stream(chunk(4, logprob, finish_reason="length", weight_versions=spans), usage) + b"data: [DONE]\n\n"


async def test_a_refused_prompt_is_an_error_with_the_servers_words():
    async with pretending() as (pretender, engine):
        pretender.answers["/inference/v1/generate"] = (400, {"error": {"message": "prompt too long"}})
        with pytest.raises(EngineError, match=r"status 400.*prompt too long"):
            await ask(engine)


async def test_an_answer_that_is_no_stream_of_json_objects_is_an_error():
    async with pretending() as (pretender, engine):
        for answer, words in (
            (b"text", "ended before .DONE.; its last bytes: b'text'"),
            (b"data: text\n\n", "not JSON"),
            (b"data: 5\n\n", "JSON int, not an object"),
            (b"data: {}\n\n", "lacks a field"),
        ):
            pretender.raw = answer
            with pytest.raises(EngineError, match=words):
                await ask(engine)


async def test_cancelling_calls_while_tokens_come_closes_their_connections():
    async with pretending() as (pretender, engine):
        pretender.hold.clear()
        tasks = asyncio.all_tasks()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5), asyncio.TaskGroup() as group:
                for _ in range(50):
                    group.create_task(ask(engine))
        async with asyncio.timeout(1):
            for _ in range(50):
                await pretender.dropped.acquire()
        await asyncio.sleep(0.05)  # the server's own tasks end
        assert not engine._reading and asyncio.all_tasks() == tasks


async def test_a_dead_server_is_told_with_its_last_words():
    last_words = chain([None] * 12, repeat("vLLM ended with status 137"))  # more than a second late
    async with connect("http://127.0.0.1:1") as http:
        dead = VllmEngine(http, DENSE, routing=False, obituary=lambda: next(last_words))
        assert not await dead.healthy()
        with pytest.raises(EngineError, match=r"generate: ClientConnectorError.*status 137"):
            await ask(dead)


async def test_a_weights_file_that_is_none_is_refused_before_the_engine_is_touched(tmp_path: Path, weights: Path):
    cut = tmp_path / "cut"
    cut.write_bytes(weights.read_bytes()[:-4])
    junk = tmp_path / "junk"
    junk.write_bytes(b"\x10\0\0\0\0\0\0\0not json not json not json")
    check_weights_file(weights)
    async with pretending() as (pretender, engine):
        for path, words in ((tmp_path / "none", "No such file"), (cut, "its header says"), (junk, "not a safetensors")):
            with pytest.raises(EngineError, match=f"weights file {path}.*{words}"):
                await engine.update(path, 1)
        assert pretender.asked == []
        await ask(engine)
