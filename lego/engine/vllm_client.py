"""The client of one vLLM server: token ids in, checked answers out, and weight updates in the one right order."""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import aiohttp
import numpy as np

from lego.engine.answer import Answer, Asked, request_body
from lego.engine.base import Progress, WeightSender
from lego.engine.folder import ModelFolder
from lego.engine.transfer import check as check_weights_file
from lego.engine.usage import Reading, read_metrics
from lego.errors import EngineError
from lego.records import Generation, Ids, Sampling

log = logging.getLogger(__name__)

# Idle connections: less than the server keeps them (vllm.SERVER_KEEP_ALIVE_S).
KEEP_ALIVE_S = 30
RESET_TRIES = 6
GENERATE = "/inference/v1/generate"
# Ours are below 60 MiB: 100,000 tokens of 48 layers and 8 experts, in base64.
MAX_EVENT_BYTES = 512 << 20
NO_LIMIT = aiohttp.ClientTimeout(total=None, sock_connect=30)
# A killed server takes some six seconds to take its engine with it.
LAST_WORDS_S = 15.0
HEALTH_LIMIT = aiohttp.ClientTimeout(total=5)


class Unreachable(EngineError):
    """The server broke off, or cannot be reached: another one, or this one started again, may well answer."""


class VllmEngine:
    """An `Engine` over a running server. Made by `VllmServer.open`, or by hand for a server that runs elsewhere."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        model: ModelFolder,
        *,
        url: str = "",
        routing: bool,
        pause: Literal["keep", "wait"] = "keep",
        update_timeout_s: float = 300.0,
        obituary: Callable[[], str | None] = lambda: None,
        last_words_s: float = LAST_WORDS_S,
    ) -> None:
        """`pause` says what an update does to answers under way; `obituary` tells how the server died, if it did.

        After a failure it is waited for `last_words_s`.
        """
        self.model = model
        self.pid: int | None = None
        """The root of the server's processes, if they are ours."""
        self.url, self.life = url, uuid.uuid4().hex
        """Where others reach the server, and a name for this life of it."""
        self.routing = routing
        self.obituary = obituary
        self.version: int | None = None
        """The weights that calls sample from; None before `label` and while others are loaded."""
        self.loads = 0
        """Updates begun."""
        self._last_words_s = last_words_s
        self._http = http
        self._pause = pause
        self._update_timeout = aiohttp.ClientTimeout(total=update_timeout_s)
        self._updating = asyncio.Lock()
        self.broken: str | None = None
        """Why no call can succeed any more."""
        self._reading: set[aiohttp.ClientResponse] = set()

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        *,
        session: str,
        routing_start: int = 0,
        progress: Progress | None = None,
    ) -> Generation:
        """See `Engine.generate`."""
        self._check_usable()
        stop_ids = self.model.stop_ids
        start = routing_start if self.routing else None
        asked = Asked(
            model=self.model, prompt_len=len(prompt_ids), sampling=sampling, stop_ids=stop_ids, routing_start=start
        )
        answer = Answer(asked)
        body = request_body(prompt_ids, sampling, stop_ids, routing_start)
        async with self._opened("POST", GENERATE, json=body, headers={"X-Session-ID": session}) as response:
            async for event in events(response.content.iter_any()):
                if answer.add(await self._chunk(event)) and progress is not None:
                    progress(answer.ids, answer.logprobs)
        return answer.generation()

    async def _chunk(self, event: bytearray) -> dict[str, Any]:
        """An event of a streamed answer, whose status was 200 before anything could go wrong."""
        chunk = _json(GENERATE, event)
        if "error" in chunk:
            error = chunk["error"]
            failure = _failure(error.get("code") if isinstance(error, dict) else None)
            raise failure(await self._why(f"{GENERATE}: {error}"))
        return chunk

    async def update(self, weights: Path, version: int) -> None:
        """See `Engine.update`. After a failure the weights are in doubt: every later call raises."""
        await self.load(weights, version)

    async def load(self, weights: Path, version: int) -> float:
        """Updates, and returns the seconds that nothing was sampled."""
        weights = check_weights_file(weights, version)
        return await self._change(partial(self._read, weights, version), version)

    async def receive(self, source: WeightSender, version: int) -> float:
        """As `load`, of weights that their source sends."""
        return await self._change(partial(source.send, self.url, self.life, version), version)

    async def _change(self, bring: Callable[[], Awaitable[None]], version: int) -> float:
        async with self._updating:
            self._check_usable()
            self.version, self.loads = None, self.loads + 1
            began = time.monotonic()
            try:
                paused = await self._update(bring, version)
            except BaseException as error:
                await self.break_off(f"update to version {version} failed: {error or type(error).__name__}")
                raise
            self.version = version
            log.info("weights version=%d url=%s seconds=%.3f", version, self.url, time.monotonic() - began)
            return paused

    async def label(self, version: int) -> None:
        """Names the weights the server has now; for a server that just loaded them."""
        await self._step("/update_weight_version", {"new_version": str(version)})
        self.version = version

    async def weight_label(self) -> object:
        """What the server itself calls its weights."""
        return (await self._request("GET", "/weight_info")).get("weight_version")

    async def check_logprobs(self) -> None:
        """EngineError unless logprobs are of the distribution sampled from: with one token to choose from, 0.

        Not seen: raw logprobs of a model that is certain of what follows token 0.
        """
        got = await self.generate(np.zeros(1, np.int32), Sampling(top_k=1, max_tokens=1), session="check")
        if got.logprobs[0] < -1e-4:
            raise EngineError(
                f"engine reports logprob {got.logprobs[0]:.3f} of the one token it can choose, not of the distribution "
                "it samples from: start vLLM with --logprobs-mode processed_logprobs"
            )

    async def _read(self, weights: Path, version: int) -> None:
        """Lets the server read a file, from start to finish."""
        await self._step("/start_weight_update")
        await self._step("/update_weights", {"update_info": {"path": str(weights), "version": version}})
        await self._step("/finish_weight_update", {"weight_version": str(version)})

    async def _update(self, bring: Callable[[], Awaitable[None]], version: int) -> float:
        await self._step(f"/pause?mode={self._pause}")
        paused = time.monotonic()
        await bring()
        await self._reset_prefix_cache()
        await self._step("/resume")
        paused = time.monotonic() - paused
        seen = await self.weight_label()
        if seen != str(version):
            raise EngineError(f"/weight_info: engine says version {seen!r} after the update to {version}")
        return paused

    async def _reset_prefix_cache(self) -> None:
        """Drops keys and values of the old weights; running requests compute theirs again."""
        for attempt in range(RESET_TRIES):
            answer = await self._step("/reset_prefix_cache?reset_running_requests=true&reset_external=true")
            if answer.get("success") is True:
                return
            await asyncio.sleep(0.05 * 2**attempt)
        raise EngineError(f"/reset_prefix_cache: refused {RESET_TRIES} times, {await self._holders()}: {answer}")

    async def _holders(self) -> str:
        """Who may hold blocks of the cache."""
        try:
            reading = await self.read_metrics()
        except EngineError:
            reading = Reading()
        if reading.running is None:
            return "blocks are still held"
        return f"blocks are still held by {reading.running} answers under way and {reading.waiting} waiting"

    async def read_metrics(self) -> Reading:
        """What the server's /metrics tell; EngineError without them or if they cannot be read."""
        async with self._opened("GET", "/metrics", limit=HEALTH_LIMIT) as response:
            text = await response.text()
        try:
            return read_metrics(text)
        except ValueError as error:
            raise EngineError(str(error)) from error

    async def _step(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return await self._request("POST", path, json=body)

    async def _request(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """The JSON object of a 200 answer; EngineError with the path for all else."""
        async with self._opened(method, path, limit=self._update_timeout, **options) as response:
            return _json(path, await response.read())

    @asynccontextmanager
    async def _opened(
        self, method: str, path: str, limit: aiohttp.ClientTimeout = NO_LIMIT, **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A 200 answer while it is read; EngineError with the path if it breaks off or is another."""
        self._check_usable()  # a closed session would raise what is no EngineError
        try:
            async with self._http.request(method, path, timeout=limit, **options) as response:
                if response.status != 200:
                    said = f"{path}: status {response.status}: {(await response.text())[:500]}"
                    raise _failure(response.status)(await self._why(said))
                self._reading.add(response)
                try:
                    yield response
                finally:
                    self._reading.discard(response)
        except TimeoutError as error:
            raise Unreachable(f"{path}: no answer in time") from error
        except aiohttp.ClientError as error:
            raise Unreachable(await self._why(f"{path}: {type(error).__name__}: {error}")) from error

    async def _why(self, seen: str) -> str:
        """The cause behind a failure, which a dying server takes a while to show."""
        latest = time.monotonic() + self._last_words_s
        while (reason := self.broken or self.obituary()) is None:
            if self._http.closed or time.monotonic() > latest or await self.healthy():
                return seen
            await asyncio.sleep(0.1)
        return f"{seen}; {reason}"

    async def healthy(self) -> bool:
        """Whether the server answers and its engine lives."""
        if self._http.closed:
            return False
        try:
            async with self._http.get("/health", timeout=HEALTH_LIMIT) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _check_usable(self) -> None:
        if self.broken is not None:
            raise Unreachable(self.broken)

    async def break_off(self, reason: str) -> None:
        """Ends all calls, which a paused or hanging server would hold for ever; every later one raises `reason`."""
        self.broken = self.broken or reason
        for response in self._reading:
            response.close()  # the session's own closing would leave their readers waiting
        await self._http.close()


def _failure(status: object) -> type[EngineError]:
    """The error for an HTTP status or its like in a stream: refused is refused everywhere, broken is not."""
    return Unreachable if isinstance(status, int) and status >= 500 else EngineError


def connect(url: str) -> aiohttp.ClientSession:
    """A client of one server, without a limit on connections; for `VllmEngine`."""
    return aiohttp.ClientSession(
        base_url=url, connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S), trust_env=False
    )


async def events(pieces: AsyncIterable[bytes]) -> AsyncIterator[bytearray]:
    """The data of server-sent events of one line each, up to [DONE]."""
    rest, done = bytearray(), False
    async for piece in pieces:
        at = max(len(rest) - 1, 0)
        rest += piece
        while (end := rest.find(b"\n\n", at)) >= 0:
            data, at = rest[len(b"data: ") : end], 0
            del rest[: end + 2]
            if data == b"[DONE]":
                done = True
            else:
                yield data
        if len(rest) > MAX_EVENT_BYTES:
            raise EngineError(f"engine's answer has an event of over {MAX_EVENT_BYTES} bytes")
    if not done:
        raise aiohttp.ClientPayloadError(f"the stream ended before [DONE]; its last bytes: {bytes(rest[-200:])!r}")


def _json(path: str, text: bytes | bytearray) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise EngineError(f"{path}: answer is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise EngineError(f"{path}: answer is a JSON {type(found).__name__}, not an object")
    return found
