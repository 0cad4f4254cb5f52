"""One engine of a pool: started, given the newest weights, watched, and started again when it dies."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path

from lego.engine.admission import Gate
from lego.engine.base import WeightSender
from lego.engine.usage import Growth, Reading
from lego.engine.vllm_client import VllmEngine
from lego.errors import EngineError

log = logging.getLogger(__name__)

LOOK_S = 0.2
"""How often a server's process is looked at."""
HEALTH_EVERY_S = 2.0
"""How often a server is asked for its health and its metrics."""
PATIENCE_STEP_S = 1.0
"""Pause before the second restart in a row; twice it before the third, and so on."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """How a replica's server comes up."""

    open: Callable[[], AbstractAsyncContextManager[VllmEngine]]
    """Starts or reaches it, and ends it on leaving; EngineError if it does not come up."""
    fresh: bool = True
    """Whether that loads the policy's own weights; a server that runs elsewhere has whatever it had."""


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """How often a server may die before it is given up."""

    most: int
    window_s: float
    unhealthy_s: float
    """Time without an answer to /health after which a server counts as dead."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What the newest update brought."""

    file: Path
    version: int


class Bell:
    """Wakes all who wait for something to change, to look again."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Wakes them."""
        self._rung.set()
        self._rung = asyncio.Event()

    async def wait(self) -> None:
        """Until the next ring."""
        await self._rung.wait()


@dataclass(eq=False, kw_only=True)
class Common:
    """What the replicas of a pool share."""

    newest: Weights | None = None
    """None: the policy's own weights, version 0."""
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while weights change anywhere, so that no replica comes up or is pinned in the middle of an update."""
    bell: Bell = field(default_factory=Bell)
    """Rung when a replica came, went or changed weights, or a pin ended."""

    @property
    def version(self) -> int:
        """The newest weights."""
        return 0 if self.newest is None else self.newest.version


class Replica:
    """A server in its place of the pool, through all its lives."""

    def __init__(self, index: int, start: Start, gate: Gate, limits: Restarts, common: Common) -> None:
        self.name, self.index, self.gate = f"engine {index}", index, gate
        self.engine: VllmEngine | None = None
        self.up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when it served for the first time; its error, if it could not be started."""
        self.lost: str | None = None
        """Why it is given up."""
        self.pins = 0
        """How many want it to keep its weights."""
        self.behind = False
        """Whether an update went past it, since it was pinned."""
        self.cache = 0
        """How often its prefix cache was emptied."""
        self.restarts = 0
        self.reading = Reading()
        self.queries, self.hits = Growth(), Growth()
        self._start, self._limits, self._common = start, limits, common
        self._deaths: list[tuple[float, str]] = []
        self._served = False
        """Whether it came to serve in its last life."""

    @property
    def serves(self) -> bool:
        """Whether a call may go to it, as far as is known."""
        return self.engine is not None and self.engine.broken is None and self.engine.obituary() is None

    @property
    def calls(self) -> int:
        """Calls that run or wait here."""
        return self.gate.running + self.gate.waiting

    async def live(self) -> None:
        """Keeps a server running until cancelled, or until it cannot be brought back; a first start has one try."""
        while self.lost is None:
            error = await self._life()
            if not self.up.done():
                self.up.set_exception(error)
                self.up.exception()  # several may fail, and only the first is waited for
                return
            await self._died(str(error))

    async def load(self, weights: Weights) -> float:
        """Gives it these weights and returns the seconds that it sampled nothing; after an EngineError it is dead."""
        assert self.engine is not None
        pause_s = await self.engine.load(weights.file, weights.version)
        self._renewed()
        return pause_s

    async def receive(self, source: WeightSender, version: int) -> float:
        """As `load`, of weights that their source sends."""
        if self.engine is None:
            raise EngineError("it ended before its turn came")
        pause_s = await self.engine.receive(source, version)
        self._renewed()
        return pause_s

    async def drop(self, version: int) -> None:
        """Has it start again if it holds this version, which is not to stay."""
        if self.engine is not None and self.engine.version == version:
            await self.engine.break_off(f"the update to version {version} was not finished")

    def _renewed(self) -> None:
        """It has the newest weights, and an empty cache."""
        self.cache += 1
        self.behind = False

    async def _life(self) -> EngineError:
        """One server from its start to its end, which is told."""
        try:
            async with self._start.open() as engine:
                error = await self._used(engine)
                await engine.break_off(str(error))
                return error
        except EngineError as error:
            return error

    async def _used(self, engine: VllmEngine) -> EngineError:
        """A running server until it ends."""
        try:
            await self._bring_up(engine)
            return EngineError(await self._watch(engine))
        except EngineError as error:
            return error
        finally:
            self.engine = None
            self.gate.close()
            self._common.bell.ring()

    async def _bring_up(self, engine: VllmEngine) -> None:
        """Gives a server the newest weights and only then lets it serve."""
        async with self._common.loading:
            newest = self._common.newest
            if newest is not None:
                await engine.load(newest.file, newest.version)
            elif self._start.fresh or not self.cache:
                await self._first_label(engine)
            else:
                raise EngineError("it may hold any weights, and cannot be given the policy's own again")
            try:
                async with asyncio.timeout(self._limits.unhealthy_s):  # nobody else can load or pin meanwhile
                    await engine.check_logprobs()
            except TimeoutError as error:
                raise EngineError(f"no first token within {self._limits.unhealthy_s:g} s") from error
            self.engine, self.behind, self._served = engine, False, True
            self.cache += 1
        if not self.up.done():
            self.up.set_result(None)
        log.info("%s serves version=%d", self.name, self._common.version)
        self._common.bell.ring()

    async def _first_label(self, engine: VllmEngine) -> None:
        """Calls the weights of a server that just came up version 0; one that is not ours may hold others."""
        label = None if self._start.fresh else await engine.weight_label()
        if label not in (None, "default", "0"):
            log.warning("%s holds weights labelled %s, taken for the policy's own until an update", self.name, label)
        await engine.label(0)

    async def _watch(self, engine: VllmEngine) -> str:
        """Waits for the server's end and returns the cause; meanwhile reads its numbers."""
        loop = asyncio.get_running_loop()
        next_look = well = loop.time()
        while (cause := engine.broken or engine.obituary()) is None:
            if self.behind and not self.pins:
                await self._catch_up()
            if loop.time() >= next_look:
                if await engine.healthy():
                    well = loop.time()
                    await self._read(engine)
                elif loop.time() - well > self._limits.unhealthy_s:
                    return f"no answer to /health for {self._limits.unhealthy_s:g} s"
                next_look = loop.time() + HEALTH_EVERY_S
            await asyncio.sleep(LOOK_S)
        return cause

    async def _catch_up(self) -> None:
        async with self._common.loading:
            newest = self._common.newest
            if self.behind and not self.pins and self.serves and newest is not None:
                await self.load(newest)
                log.info("%s caught up version=%d", self.name, newest.version)
        self._common.bell.ring()

    async def _read(self, engine: VllmEngine) -> None:
        """A new reading; a server without metrics has none, which switches admission off."""
        try:
            self.reading = await engine.read_metrics()
        except EngineError as error:
            log.debug("%s: %s", self.name, error)
            self.reading = Reading()
        self.queries.read(self.reading.prefix_queries)
        self.hits.read(self.reading.prefix_hits)
        self.gate.read(self.reading)

    async def _died(self, cause: str) -> None:
        """Counts a death; gives the replica up after too many, which is told by the first one.

        Deaths grow old only for one that served since: others may take longer to start than the window is.
        """
        now, limits = asyncio.get_running_loop().time(), self._limits
        recent = [(at, why) for at, why in self._deaths if now - at < limits.window_s or not self._served]
        self._deaths, self._served = [*recent, (now, cause)], False
        deaths = len(self._deaths)
        if deaths > limits.most:
            more = (
                f"; {self.name} then failed {deaths - 1} times more within {limits.window_s:g} s" if deaths > 1 else ""
            )
            self.lost = self._deaths[0][1] + more
            log.error("%s is given up: %s", self.name, self.lost)
            self._common.bell.ring()
            return
        log.warning("%s ended and is started again (%d of %d): %s", self.name, deaths, limits.most, cause)
        await asyncio.sleep(PATIENCE_STEP_S * (2 ** (deaths - 1) - 1))
        self.restarts += 1
