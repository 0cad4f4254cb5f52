"""The capture proxy: sockets on one side, the engine on the other, a session for each trial between."""

import asyncio
import json
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from aiohttp import web
from aiohttp.web_exceptions import HTTPRequestEntityTooLarge

from lego.capture import dialects
from lego.capture.events import Stream, stream_of
from lego.capture.journal import Origin
from lego.capture.refusals import TOLD, Refused, Told, error_body, refusal
from lego.capture.session import CANCELLED, ENGINE_ERROR, Limits, Plan, Renders, Session, SessionClosed
from lego.capture.wire import Dialect, Reply, Request
from lego.engine.base import Engine
from lego.errors import EngineError, UsageError
from lego.records import Drift, Floats, Ids, Sampling, Turn

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 2**20
_JSON = "application/json"


@dataclass(eq=False)
class Handle:
    """A live trial: where its harness calls, and what was captured. Made by `Proxy.session`."""

    name: str
    url: str
    """Base URL without a trailing slash and without /v1; the path is the trial's secret."""
    key: str
    """API key that names this trial on any path."""
    session: Session
    proxy: "Proxy"
    began: float = field(default_factory=time.monotonic)
    engine_error: EngineError | None = None
    """The first failure of the engine in this trial."""
    bug: Exception | None = None
    """The first error that no harness, engine or client explains; leaving the session raises it."""
    calls: set[asyncio.Task] = field(default_factory=set)

    @asynccontextmanager
    async def serve(self, listener: socket.socket) -> AsyncIterator[None]:
        """Answers for this trial on a listening socket, whatever path or key a request has."""
        async with _serving(partial(_answer, self)) as runner:
            await web.SockSite(runner, listener).start()
            yield

    async def end(self) -> None:
        """Closes the session and cancels what is still being sampled for it."""
        self.session.close()
        running = [task for task in self.calls if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


@dataclass(eq=False, kw_only=True)
class Proxy:
    """Serves model calls of many trials over one engine."""

    engine: Engine
    renderer: Renders
    sampling: Sampling
    limits: Limits
    model: str = "policy"
    """The name that /v1/models tells."""
    beat_s: float = 10.0
    """Seconds between events that tell a streaming client that its answer is still being sampled."""
    url: str = field(default="", init=False)
    _secrets: dict[str, Handle] = field(default_factory=dict, init=False)
    _keys: dict[str, Handle] = field(default_factory=dict, init=False)

    @asynccontextmanager
    async def open(self, host: str = "127.0.0.1", port: int = 0) -> "AsyncIterator[Proxy]":
        """Listens while it is entered. Raises UsageError if the port is taken."""
        await asyncio.to_thread(dialects.load)
        async with _serving(self._dispatch) as runner:
            try:
                await web.TCPSite(runner, host, port).start()
            except OSError as error:
                raise UsageError(f"proxy: cannot listen on {host}:{port} ({error.strerror or error})") from error
            address = runner.addresses[0]
            self.url = f"http://{address[0]}:{address[1]}"
            yield self

    @asynccontextmanager
    async def session(self, name: str) -> AsyncIterator[Handle]:
        """One trial's session; on leaving it is closed, and its calls in flight are cancelled.

        Raises on leaving what went wrong in the proxy itself.
        """
        if not self.url:
            raise RuntimeError("the proxy is not open: use `async with proxy.open()` around its sessions")
        secret, key = secrets.token_hex(16), f"sk-{secrets.token_hex(16)}"
        session = Session(secrets.token_hex(6), self.renderer, self.limits)
        handle = Handle(name, f"{self.url}/t/{secret}", key, session, self)
        self._secrets[secret] = self._keys[key] = handle
        try:
            yield handle
        finally:
            del self._secrets[secret], self._keys[key]
            await handle.end()
        if handle.bug is not None:
            raise handle.bug

    async def _dispatch(self, request: web.BaseRequest) -> web.StreamResponse:
        parts = request.path.split("/", 3)
        trial = len(parts) == 4 and parts[1] == "t"
        by_path = self._secrets.get(parts[2]) if trial else None
        handle = by_path or self._keys.get(_api_key(request))
        if handle is None:
            refused = Refused(404, "unknown or closed trial") if trial else Refused(401, "unknown API key")
            return _plain(error_body(refused, _dialect_of(request) or Dialect.CHAT), refused.status)
        return await _answer(handle, request)


@asynccontextmanager
async def _serving(answer: Any) -> AsyncIterator[web.ServerRunner]:
    def make(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        loop = asyncio.get_running_loop()
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=MAX_BODY_BYTES)

    # handler_cancellation: a client that goes cancels the handler, and with it the engine's work.
    server = web.Server(answer, request_factory=make, handler_cancellation=True, access_log=None)
    runner = web.ServerRunner(server, shutdown_timeout=1.0)
    await runner.setup()
    try:
        yield runner
    finally:
        await runner.cleanup()


async def _answer(handle: Handle, request: web.BaseRequest) -> web.StreamResponse:
    """Any request of a known trial."""
    task = asyncio.current_task()
    assert task is not None
    handle.calls.add(task)
    try:
        return await _route(handle, request)
    except ConnectionError:
        raise
    except Exception as error:
        handle.bug = handle.bug or error
        raise
    finally:
        handle.calls.discard(task)


async def _route(handle: Handle, request: web.BaseRequest) -> web.StreamResponse:
    path = request.path.rstrip("/")
    if request.method in ("GET", "HEAD"):
        return _described(handle.proxy.model, path)
    counting = path.endswith("/count_tokens")
    dialect = _dialect_of(request)
    if dialect is None:
        return _plain(error_body(Refused(404, f"no such endpoint: {request.path}"), Dialect.CHAT), 404)
    if request.method != "POST":
        return _plain(error_body(Refused(405, f"{request.method}: POST is wanted"), dialect), 405)
    try:
        body = await _read(request)
        if counting:
            return _plain({"input_tokens": await _count(handle, body)}, 200)
        return await _Call(handle, dialect, body, request.headers).run(request)
    except TOLD as error:
        refused = refusal(error, dialect)
        log.info("%s refused status=%d: %s", handle.name, refused.status, refused.message)
        return _plain(error_body(refused, dialect), refused.status)


class _Call:
    """One model call from its body to the last byte of its answer."""

    def __init__(self, handle: Handle, dialect: Dialect, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        self.handle, self.dialect, self.body = handle, dialect, body
        self.hint = _hint(headers)
        self.reply_id = ""
        self.plan: Plan | None = None
        self.planned = asyncio.Event()
        self.turn: Turn | None = None
        self.sampled = _Sampled()

    async def run(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            if self.body.get("stream"):
                return await self._streamed(request)
            answer = await dialects.converse(self.dialect, self.body, self._sample)
            return await self._send(request, answer)
        except (asyncio.CancelledError, ConnectionError):
            self._lost()
            raise

    def _lost(self) -> None:
        """The client went: what was sampled for it, if anything, did not arrive."""
        if self.turn is not None:
            self.handle.session.lost(self.turn.index)

    async def _send(self, request: web.BaseRequest, answer: Mapping[str, Any]) -> web.StreamResponse:
        response = web.Response(body=json.dumps(answer).encode(), content_type=_JSON)
        await response.prepare(request)
        await response.write_eof()
        self.turn = None
        return response

    async def _streamed(self, request: web.BaseRequest) -> web.StreamResponse:
        response: web.StreamResponse | None = None
        async with asyncio.TaskGroup() as group:
            work = group.create_task(self._settled())
            planned = group.create_task(self.planned.wait())
            await asyncio.wait((work, planned), return_when=asyncio.FIRST_COMPLETED)
            planned.cancel()
            if self.planned.is_set():
                response = await self._stream(request, work)
        if response is not None:
            return response
        # Refused before a byte was sent: an HTTP status, not an event.
        error = work.result()
        assert isinstance(error, Exception), "an answer that was never planned"
        raise error

    async def _settled(self) -> Mapping[str, Any] | Told:
        """The answer, or the error that a harness is to be told."""
        try:
            return await dialects.converse(self.dialect, self.body, self._sample)
        except TOLD as error:
            return error
        finally:
            self.sampled.end()

    async def _stream(
        self, request: web.BaseRequest, work: "asyncio.Task[Mapping[str, Any] | Told]"
    ) -> web.StreamResponse:
        assert self.plan is not None
        told, cached = len(self.plan.prompt_ids), self.handle.session.cached(self.plan)
        events = stream_of(self.dialect, self.reply_id, self.body, told, cached)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            await response.prepare(request)
            await response.write(events.opening())
            while not work.done():
                heard = await self.sampled.heard(self.handle.proxy.beat_s)
                if not work.done():
                    await response.write(self._so_far(events) if heard else events.beat())
            await response.write(self._last_events(events, work.result()))
            self.turn = None
            await response.write_eof()
        except ConnectionError:
            work.cancel()
            self._lost()
        return response

    def _so_far(self, events: Stream) -> bytes:
        """The text that is certain by now."""
        assert self.plan is not None
        told = self.handle.proxy.renderer.partial(self.sampled.ids, self.plan.prompt_ids)
        return events.progress(told.reasoning, told.content)

    def _last_events(self, events: Stream, answer: Mapping[str, Any] | Told) -> bytes:
        if not isinstance(answer, TOLD):
            return events.closing(answer)
        refused = refusal(answer, self.dialect)
        log.info("%s failed while streaming: %s", self.handle.name, refused.message)
        return events.failure(error_body(refused, self.dialect))

    async def _sample(self, request: Request) -> Reply:
        """Plans, samples and records the call."""
        session = self.handle.session
        at = time.monotonic() - self.handle.began
        origin = Origin(dialect=self.dialect, hint=self.hint, body=self.body, asked=request.asked, at=at)
        self.plan = plan = session.plan(request.messages, request.tools, origin)
        self.reply_id = session.reply_id(plan.call)
        self.planned.set()
        try:
            self.turn = await self._turn(plan)
        except EngineError as error:
            self.handle.engine_error = self.handle.engine_error or error
            raise
        if session.closed:
            raise SessionClosed(session.uid)
        return self._reply(plan, self.turn)

    async def _turn(self, plan: Plan) -> Turn:
        session, proxy = self.handle.session, self.handle.proxy
        sampling = replace(proxy.sampling, max_tokens=min(proxy.sampling.max_tokens, plan.room))
        start = time.monotonic()
        try:
            generation = await proxy.engine.generate(
                plan.prompt_ids,
                sampling,
                session=session.uid,
                routing_start=plan.routing_start,
                progress=self.sampled.grow,
            )
        except (asyncio.CancelledError, EngineError) as error:
            cause = CANCELLED if isinstance(error, asyncio.CancelledError) else ENGINE_ERROR
            output, seconds = (self.sampled.ids, self.sampled.logprobs), time.monotonic() - start
            session.abandon(plan, cause, sampling=sampling, output=output, seconds=seconds)
            raise
        return session.add(plan, generation, sampling=sampling, seconds=time.monotonic() - start)

    def _reply(self, plan: Plan, turn: Turn) -> Reply:
        session = self.handle.session
        answer = session.answers[turn.index]
        return Reply(
            id=answer.id,
            message=answer.message,
            truncated=answer.truncated,
            prompt_tokens=len(plan.prompt_ids),
            output_tokens=len(turn.generation.output_ids),
            cached_tokens=session.cached(plan),
            reasoning_tokens=answer.reasoning_tokens,
        )


class _Sampled:
    """What of an answer is sampled so far.

    News each time it has grown by a quarter, so that it is read a few times while it grows, whatever its length.
    """

    def __init__(self) -> None:
        self.ids: Ids = np.zeros(0, np.int32)
        self.logprobs: Floats = np.zeros(0, np.float32)
        self._news = asyncio.Event()
        self._next = 1

    def grow(self, ids: Ids, logprobs: Floats) -> None:
        self.ids, self.logprobs = ids, logprobs
        if len(ids) >= self._next:
            self._next = len(ids) + max(len(ids) // 4, 8)
            self._news.set()

    def end(self) -> None:
        self._news.set()

    async def heard(self, timeout_s: float) -> bool:
        """Whether news came in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        return True


async def _count(handle: Handle, body: Mapping[str, Any]) -> int:
    """The prompt length of a Messages request, tools and system included, as a call would have it."""
    request = await dialects.read(Dialect.MESSAGES, body)
    return len(handle.session.prompt(request.messages, request.tools))


async def _read(request: web.BaseRequest) -> dict[str, Any]:
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    try:
        body = json.loads(await request.read())
    except (web.RequestPayloadError, web.PayloadAccessError) as error:
        raise Refused(400, f"the body cannot be read: {error}") from error
    except HTTPRequestEntityTooLarge as error:
        raise Refused(413, f"request body over {MAX_BODY_BYTES} bytes") from error
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused(400, f"the body is a JSON {type(body).__name__}, an object is wanted")
    return body


def _dialect_of(request: web.BaseRequest) -> Dialect | None:
    path = request.path.rstrip("/")
    if path.endswith("/messages/count_tokens"):
        return Dialect.MESSAGES
    return next((d for d in Dialect if path.endswith(f"/{d}")), None)


def _api_key(request: web.BaseRequest) -> str:
    bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
    return bearer or request.headers.get("x-api-key", "")


def _hint(headers: Mapping[str, str]) -> Drift:
    """What the labels of a request say it is, where a harness sends labels."""
    # The second is set by our own programs that run a harness in its box.
    if '"compact' in headers.get("x-codex-turn-metadata", "") or headers.get("x-lego-request") == "compaction":
        return Drift.COMPACTION
    labels = ("x-openai-subagent", "x-claude-code-agent-id", "x-parent-session-id")
    return Drift.SUBAGENT if any(label in headers for label in labels) else Drift.NONE


def _described(name: str, path: str) -> web.Response:
    """The list of models, or the model that the path names."""
    model = {"id": name, "object": "model", "type": "model", "display_name": name, "owned_by": "lego", "created": 0}
    if path.endswith("/models"):
        return _plain({"object": "list", "data": [model], "has_more": False, "first_id": name, "last_id": name}, 200)
    if path.endswith(f"/models/{name}"):
        return _plain(model, 200)
    return _plain(error_body(Refused(404, f"no such endpoint: {path}"), Dialect.CHAT), 404)


def _plain(body: Mapping[str, Any], status: int) -> web.Response:
    return web.Response(body=json.dumps(body).encode(), status=status, content_type=_JSON)
