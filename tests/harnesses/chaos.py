"""What goes wrong between a harness and its model, and what must hold of a session whatever went wrong."""

import asyncio
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

import aiohttp
import numpy as np
from aiohttp import web

from lego.capture.server import Handle
from lego.drill.stage import Drilled

DROPPED_S = 0.4
HOP = {"host", "content-length", "transfer-encoding", "connection", "content-type", "date", "server"}


@dataclass(frozen=True)
class Status:
    """The request is answered with an HTTP error and never reaches the model."""

    code: int
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cut:
    """The connection is gone after so many events of the answer."""

    events: int


@dataclass(frozen=True)
class Held:
    """Nothing of the answer arrives for so long."""

    seconds: float


Fault = Status | Cut | Held


def disturbed(
    *faults: Fault | None, room: int | None = None
) -> Callable[[Handle, socket.socket], AbstractAsyncContextManager[None]]:
    """The proxy behind a line that fails: the first request meets the first fault, and so on; None is a good line.

    With `room`, the context of the session ends so many tokens after its first prompt.
    """
    left = list(faults)

    @asynccontextmanager
    async def serve(handle: Handle, listener: socket.socket) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client:

            async def answer(request: web.Request) -> web.StreamResponse:
                body = await request.read()
                fault = left.pop(0) if left and request.method == "POST" else None
                if isinstance(fault, Status):
                    error = {"message": "scripted failure", "type": "server_error", "code": None, "param": None}
                    told = {"type": "error", "error": error}
                    return web.json_response(told, status=fault.code, headers=fault.headers)
                headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP - {"content-type"}}
                sent = client.request(request.method, handle.url + request.path_qs, data=body, headers=headers)
                if isinstance(fault, Cut) and not json.loads(body).get("stream"):
                    return await _dropped(request, sent)
                async with sent as found:
                    response = await _relayed(request, found, fault)
                if room is not None:
                    size = len(handle.session.turns[0].prompt_ids) + room
                    handle.session.limits = replace(handle.session.limits, context_tokens=size)
                return response

            app = web.Application(client_max_size=1 << 26)
            app.router.add_route("*", "/{path:.*}", answer)
            # A client that goes cancels the handler, and so closes the line to the proxy.
            runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1)
            await runner.setup()
            try:
                await web.SockSite(runner, listener).start()
                yield
            finally:
                await runner.cleanup()

    return serve


async def _dropped(request: web.Request, sent: AbstractAsyncContextManager[object]) -> web.StreamResponse:
    """An answer that would come in one piece is cut while it is sampled."""
    with suppress(TimeoutError):
        async with asyncio.timeout(DROPPED_S), sent:
            raise AssertionError("the answer was there before the line could be cut")
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def _relayed(request: web.Request, found: aiohttp.ClientResponse, fault: Cut | Held | None) -> web.StreamResponse:
    if isinstance(fault, Held):
        await asyncio.sleep(fault.seconds)
    response = web.StreamResponse(status=found.status, headers={"Content-Type": found.headers["Content-Type"]})
    await response.prepare(request)
    seen = b""
    async for chunk in found.content.iter_any():
        await response.write(chunk)
        seen += chunk
        if isinstance(fault, Cut) and seen.count(b"data: ") >= fault.events:
            assert request.transport is not None
            request.transport.abort()
            return response
    assert not isinstance(fault, Cut), f"the answer ended before event {fault.events}"
    await response.write_eof()
    return response


def check(run: Drilled) -> None:
    """Every token that was sampled is trained once, in the context it was sampled in, or excluded for a cause."""
    session, fidelity = run.session, run.session.fidelity()
    causes = session.excluded()
    assert not fidelity.faults
    assert sum(run.engine.sampled) == fidelity.sampled == fidelity.trained + sum(fidelity.excluded.values())
    trained = 0
    for segment in session.segments():
        trained += int(segment.mask_T.sum())
    assert trained == fidelity.trained
    for turn in session.turns:
        if turn.parent is not None:
            assert turn.parent < turn.index
            before = session.turns[turn.parent]
            whole = np.concatenate([before.prompt_ids, before.generation.output_ids])
            assert np.array_equal(turn.prompt_ids[: len(whole)], whole)
    kept = Counter(session.plan_of(turn.index).key for turn in session.turns if turn.index not in causes)
    assert not [key for key, count in kept.items() if count > 1], "twins are trained"
