"""Engines that answer as one: calls stay with their session's engine, survive its death, and get new weights.

A replica is in one of three states: it serves the newest weights; it serves older ones, because it is pinned or what is
sent has not come to it yet; it does not serve, until it is back with the newest. No replica ever serves weights of
which only a part has arrived.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from lego.engine.admission import Admission, Gate, Want
from lego.engine.base import Progress, WeightSender
from lego.engine.placing import Places
from lego.engine.replica import Common, Replica, Restarts, Start, Weights
from lego.engine.splice import Told
from lego.engine.transfer import check as check_weights_file
from lego.engine.usage import LastUpdate, PoolUsage
from lego.engine.vllm_client import Unreachable, VllmEngine
from lego.errors import EngineError
from lego.records import Floats, Generation, Ids, Sampling
from sandbox.base import Progress as Shown
from sandbox.base import no_progress

log = logging.getLogger(__name__)

MOST_MOVES = 6
"""How often one call may lose its engine."""
MOVE_PAUSE_S = 0.2
"""Pause before a call goes back to the only engine there is; twice it the next time, and so on."""


@dataclass(frozen=True, kw_only=True)
class _Ask:
    """A call as it came."""

    prompt_ids: Ids
    sampling: Sampling
    session: str
    routing_start: int
    progress: Progress | None


class EnginePool:
    """An `Engine` over several servers, started and watched while `open` is entered."""

    def __init__(self, starts: Sequence[Start], *, admission: Admission, most_tokens: int, restarts: Restarts) -> None:
        """`most_tokens` is what one server ever has to hold at once. Needs a running event loop."""
        self._common = Common()
        self._replicas = [
            Replica(i, start, Gate(admission, most_tokens), restarts, self._common) for i, start in enumerate(starts)
        ]
        self._places = Places()
        self._updates = asyncio.Lock()
        self._homeless = 0
        self._moved_calls = 0
        self._last_update: LastUpdate | None = None

    @asynccontextmanager
    async def open(self, progress: Shown = no_progress) -> "AsyncIterator[EnginePool]":
        """Starts all servers side by side; EngineError, and none is left, if one does not come up."""
        try:
            async with asyncio.TaskGroup() as group:
                lives = [group.create_task(replica.live()) for replica in self._replicas]
                try:
                    await self._all_up(progress)
                    yield self
                finally:
                    for life in lives:
                        life.cancel()
        except BaseExceptionGroup as errors:
            first, *more = errors.exceptions
            if more:
                raise
            raise first from None  # as it would have been without the group

    async def _all_up(self, progress: Shown) -> None:
        wanted = [replica.up for replica in self._replicas]
        for ready, up in enumerate(asyncio.as_completed(wanted), 1):
            await up
            log.info("engines ready %d of %d", ready, len(wanted))
            progress(ready, len(wanted), "engines ready")

    @property
    def version(self) -> int:
        """The newest weights that an update brought, 0 before any."""
        return self._common.version

    def usage(self) -> PoolUsage:
        """The pool in numbers, without asking anybody."""
        replicas = self._replicas
        readings = [r.reading.kv_usage for r in replicas if r.serves and r.reading.kv_usage is not None]
        queries = [r.queries.total for r in replicas if r.queries.total is not None]
        hits = [r.hits.total for r in replicas if r.hits.total is not None]
        return PoolUsage(
            replicas=len(replicas),
            alive=sum(r.serves for r in replicas),
            running=sum(r.gate.running for r in replicas),
            waiting=self._homeless + sum(r.gate.waiting for r in replicas),
            kv_usage=max(readings, default=None),
            prefix_hit_rate=sum(hits) / sum(queries) if sum(queries) else None,
            prefix_hits=sum(hits) if hits else None,
            restarts=sum(r.restarts for r in replicas),
            moved_sessions=self._places.moved,
            moved_calls=self._moved_calls,
            last_update=self._last_update,
        )

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        *,
        session: str,
        routing_start: int = 0,
        progress: Progress | None = None,
    ) -> Generation:
        """See `Engine.generate`. A call whose engine dies goes on with another one; what was told stays as told.

        It waits for an engine as long as its caller does; EngineError when none can come back.
        """
        ask = _Ask(
            prompt_ids=prompt_ids, sampling=sampling, session=session, routing_start=routing_start, progress=progress
        )
        return await self._generate(ask, None)

    async def update(self, weights: Path, version: int) -> None:
        """See `Engine.update`, on all replicas that are not pinned, side by side; returns when one serves them.

        One that fails is taken out and started again with the new weights. EngineError when none is left. While every
        replica is pinned or down, it waits.
        """
        file = await asyncio.to_thread(check_weights_file, weights, version)
        await self._update(partial(self._load, Weights(file=file, version=version)))

    async def update_from(self, source: WeightSender, version: int) -> None:
        """See `Pool.update_from`: one replica after the other, while the rest samples; failures are as for `update`."""
        await self._update(partial(self._receive, source, version))

    async def _update(self, change: Callable[[Sequence[Replica]], Awaitable[list[float]]]) -> None:
        """Changes the weights of those that can be changed as soon as there is one, and waits until one has them."""
        began = asyncio.get_running_loop().time()
        async with self._updates:
            while True:
                async with self._common.loading:
                    chosen = [r for r in self._replicas if r.serves and not r.pins]
                    if chosen:
                        pauses = await change(chosen)
                        break
                await self._next_change()
            while not any(_may_serve(r, None) for r in self._replicas):
                await self._next_change()
        assert self._common.newest is not None
        seconds, size = asyncio.get_running_loop().time() - began, self._common.newest.file.stat().st_size
        self._last_update = LastUpdate(seconds=seconds, bytes=size, pause_seconds=max(pauses, default=seconds))

    async def _load(self, weights: Weights, chosen: Sequence[Replica]) -> list[float]:
        """The pauses of those that took the weights from the file."""
        pauses: list[float] = []
        try:
            async with asyncio.TaskGroup() as group:
                for replica in chosen:
                    group.create_task(_taken(replica, replica.load(weights), pauses))
        except asyncio.CancelledError:
            if pauses:  # who has the new weights keeps them, the others get them
                self._adopt(weights)
            raise
        self._adopt(weights)
        return pauses

    async def _receive(self, source: WeightSender, version: int, chosen: Sequence[Replica]) -> list[float]:
        """The pauses of those that the weights were sent to; then the file is there for the others."""
        pauses: list[float] = []
        try:
            for replica in chosen:
                await _taken(replica, replica.receive(source, version), pauses)
            file = await source.export(version)
        except BaseException:
            for replica in chosen:  # nobody else can get weights that no file holds
                await replica.drop(version)
            raise
        self._adopt(Weights(file=file, version=version))
        return pauses

    def _adopt(self, weights: Weights) -> None:
        self._common.newest = weights
        for replica in self._replicas:
            replica.behind = replica.serves and replica.engine is not None and replica.engine.version != weights.version
        self._common.bell.ring()

    @asynccontextmanager
    async def pinned(self) -> "AsyncIterator[Pinned]":
        """An `Engine` of the newest weights, which keeps them while it is entered; updates go past its replica.

        With one replica an update waits for the pin's end.
        """
        pin = Pinned(self, await self._pin(None))
        try:
            yield pin
        finally:
            pin.replica.pins -= 1
            self._common.bell.ring()

    async def _pin(self, version: int | None) -> Replica:
        """A pinned replica that serves this version (None: the newest); waits while it can still come."""
        while True:
            async with self._common.loading:
                wanted = self.version if version is None else version
                fit = [r for r in self._replicas if r.serves and r.engine and r.engine.version == wanted]
                if fit:
                    best = min(fit, key=lambda r: (-r.pins, r.calls, r.index))
                    best.pins += 1
                    return best
            self._refuse_if_lost()
            if wanted != self.version:
                raise EngineError(f"the engine that was pinned to version {wanted} is gone, and its weights with it")
            await self._common.bell.wait()

    async def _generate(self, ask: _Ask, pin: "Pinned | None") -> Generation:
        heard, causes = _Heard(ask, Told()), list[str]()
        while len(causes) <= MOST_MOVES:
            try:
                replica = await self._replica_for(ask.session, pin, heard.lost)
                rest = await self._tried(replica, pin, heard)
            except Unreachable as error:
                causes.append(str(error))
                heard = heard.next(error)
                await self._before_next(ask.session, pin, heard, causes)
            except EngineError as error:
                if not causes:
                    raise
                raise EngineError(f"{causes[0]}; then: {error}") from error
            else:
                if rest is not None:
                    return heard.told.joined(rest)
        raise EngineError(f"{causes[0]}; tried {len(causes)} times, at last: {causes[-1]}")

    async def _replica_for(self, session: str, pin: "Pinned | None", lost: Replica | None) -> Replica:
        """Where a call goes; waits while nobody serves, and avoids the one that just failed it if there are others."""
        self._homeless += 1
        try:
            if pin is not None:
                return await pin.held()
            while not (loads := {r.index: r.calls for r in self._replicas if _may_serve(r, None)}):
                await self._next_change()
        finally:
            self._homeless -= 1
        if len(loads) > 1:
            loads.pop(-1 if lost is None else lost.index, None)
        return self._replicas[self._places.choose(session, loads)]

    async def _tried(self, replica: Replica, pin: "Pinned | None", heard: "_Heard") -> Generation | None:
        """What this replica sampled after what is told; None if it went before the call's turn came."""
        ask, prompt_ids = heard.ask, heard.told.prompt(heard.ask.prompt_ids)
        hit = self._places.hit_share(ask.session, replica.index, replica.cache, prompt_ids) if replica.gate.helps else 0
        if not await replica.gate.enter(Want(session=ask.session, prompt_ids=prompt_ids, hit_share=hit)):
            return None
        try:
            engine = replica.engine
            if engine is None or not _may_serve(replica, pin):
                return None
            heard.begin(replica, engine)
            if pin is None:
                self._places.put(ask.session, replica.index, replica.cache, prompt_ids)
            return await engine.generate(
                prompt_ids,
                heard.told.rest(ask.sampling),
                session=ask.session,
                routing_start=ask.routing_start,
                progress=None if ask.progress is None else heard,
            )
        finally:
            replica.gate.leave(len(prompt_ids))

    async def _before_next(self, session: str, pin: "Pinned | None", heard: "_Heard", causes: Sequence[str]) -> None:
        """Counts a call that moves, and gives the only engine it can have time to be found dead, or to recover."""
        self._moved_calls += 1
        cause = causes[-1].partition("\n")[0]  # the engine's last words are told once, by its replica
        log.info("a call of session %s lost its engine at token %d: %s", session, len(heard.told.ids), cause)
        if pin is not None or not any(r is not heard.lost and _may_serve(r, None) for r in self._replicas):
            await asyncio.sleep(MOVE_PAUSE_S * 2 ** (len(causes) - 1))

    async def _next_change(self) -> None:
        """Waits for a replica to come, go or be let go of; EngineError where none can come any more."""
        self._refuse_if_lost()
        await self._common.bell.wait()

    def _refuse_if_lost(self) -> None:
        causes = [r.lost for r in self._replicas if r.lost is not None]
        if len(causes) == len(self._replicas):
            raise EngineError(causes[0])


def _may_serve(replica: Replica, pin: "Pinned | None") -> bool:
    if not replica.serves or replica.engine is None:
        return False
    return not replica.behind if pin is None else pin.replica is replica and replica.engine.version == pin.version


async def _taken(replica: Replica, taken: Awaitable[float], pauses: list[float]) -> None:
    """Adds a replica's pause; one that fails is dead, and comes back with the newest weights."""
    try:
        pauses.append(await taken)
    except EngineError as error:
        log.warning("%s failed to take new weights: %s", replica.name, error)


class Pinned:
    """An `Engine` of one version of the weights. Made by `EnginePool.pinned`."""

    def __init__(self, pool: EnginePool, replica: Replica) -> None:
        assert replica.engine is not None and replica.engine.version is not None
        self.version, self.replica = replica.engine.version, replica
        self._pool = pool
        self._moving = asyncio.Lock()

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        *,
        session: str,
        routing_start: int = 0,
        progress: Progress | None = None,
    ) -> Generation:
        """See `EnginePool.generate`; EngineError too when no engine with this version of the weights is left."""
        ask = _Ask(
            prompt_ids=prompt_ids, sampling=sampling, session=session, routing_start=routing_start, progress=progress
        )
        return await self._pool._generate(ask, self)

    async def update(self, weights: Path, version: int) -> None:
        """Never: RuntimeError."""
        raise RuntimeError(f"an engine pinned to version {self.version} was told to load {version}")

    async def held(self) -> Replica:
        """The pinned replica, another one with the same weights if it died; waits for one that is coming back."""
        async with self._moving:
            if not _may_serve(self.replica, self):
                replica = await self._pool._pin(self.version)
                self.replica.pins -= 1
                self.replica = replica
            return self.replica


class _Heard:
    """What one engine says of an answer, passed on behind what was told before."""

    def __init__(self, ask: _Ask, told: Told, lost: Replica | None = None) -> None:
        self.ask, self.told, self.lost = ask, told, lost
        self._ids, self._logprobs = told.ids[:0], told.logprobs[:0]
        self._at: tuple[Replica, VllmEngine, int | None, int] | None = None

    def begin(self, replica: Replica, engine: VllmEngine) -> None:
        """The engine that answers; EngineError if what was told before cannot go on there."""
        self._at = replica, engine, engine.version, engine.loads
        spans = self.told.versions
        if spans and engine.routing and engine.version != spans[-1].version:
            raise EngineError(
                f"an answer whose engine died after {len(self.told.ids)} tokens of version {spans[-1].version} cannot "
                "go on with other weights: its experts would be theirs"
            )

    def __call__(self, ids: Ids, logprobs: Floats) -> None:
        self._ids, self._logprobs = ids, logprobs
        if self.ask.progress is not None:
            self.ask.progress(np.concatenate([self.told.ids, ids]), np.concatenate([self.told.logprobs, logprobs]))

    def next(self, error: EngineError) -> "_Heard":
        """The same answer for another engine; raises this one's error where nobody can go on from what is told."""
        assert self._at is not None, "an engine that was never asked cannot be unreachable"
        replica, engine, version, loads = self._at
        if not len(self._ids):
            return _Heard(self.ask, self.told, replica)
        if version is None or engine.loads != loads:
            raise error  # its weights changed in the middle of the answer, and only its end would have said where
        told = self.told.and_then(self._ids, self._logprobs, version)
        if told.complete(self.ask.sampling, engine.model.stop_ids):
            raise error
        return _Heard(self.ask, told, replica)
