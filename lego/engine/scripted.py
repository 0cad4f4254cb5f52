"""An `Engine` without a model: a function answers, and what a real engine would report is made up, validly."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lego.engine.base import Progress, WeightSender
from lego.engine.usage import PoolUsage
from lego.errors import EngineError
from lego.records import Floats, Generation, Ids, Routing, Sampling, VersionSpan


@dataclass(frozen=True, kw_only=True)
class Call:
    """One `generate` as it arrived."""

    prompt_ids: Ids
    sampling: Sampling
    session: str
    routing_start: int


class ScriptedEngine:
    """A `Pool` that answers each prompt with `answer(prompt_ids)`, cut at `max_tokens`.

    It comes in pieces of `chunks` tokens, over and over, `chunk_seconds` before each; without, in one.
    Logprobs depend on the token alone, routing rows on token and position, so that the same context always reports
    the same. `experts` is (layers, experts, experts per token), None for a dense model.
    """

    def __init__(
        self,
        answer: Callable[[Ids], Sequence[int]],
        *,
        experts: tuple[int, int, int] | None = (2, 8, 2),
        stop_ids: Collection[int] | None = None,
        seconds: float = 0.0,
        chunks: Sequence[int] = (),
        chunk_seconds: float = 0.0,
    ) -> None:
        self.calls: list[Call] = []
        self.cancelled: list[Call] = []
        self.updates: list[tuple[Path, int]] = []
        self.version = 0
        self._answer = answer
        self._experts = experts
        self._stop_ids = stop_ids
        self.seconds = seconds
        self._chunks = chunks
        self._chunk_seconds = chunk_seconds
        self._running = 0
        self._pins = 0
        self._free = asyncio.Event()
        self._free.set()

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        *,
        session: str,
        routing_start: int = 0,
        progress: Progress | None = None,
    ) -> Generation:
        """See `Engine.generate`. `finish` is "stop" at a stop id, or without any where nothing was cut."""
        call = Call(prompt_ids=prompt_ids, sampling=sampling, session=session, routing_start=routing_start)
        self.calls.append(call)
        self._running += 1
        try:
            await asyncio.sleep(self.seconds)
            whole = np.asarray(self._answer(prompt_ids), np.int32)
            output_ids = whole[: sampling.max_tokens]
            await self._tell(output_ids, progress)
        except asyncio.CancelledError:
            self.cancelled.append(call)
            raise
        finally:
            self._running -= 1
        if not len(output_ids):
            raise EngineError("the script has no answer to this prompt")
        return Generation(
            prompt_len=len(prompt_ids),
            output_ids=output_ids,
            logprobs=made_up_logprobs(output_ids),
            routing=self._routing(np.concatenate([prompt_ids, output_ids]), routing_start),
            routing_start=routing_start,
            versions=(VersionSpan(version=self.version, start=0, stop=len(output_ids)),),
            finish=self._finish(whole, output_ids),
        )

    async def _tell(self, ids: Ids, progress: Progress | None) -> None:
        sizes, told = itertools.cycle(self._chunks or [len(ids)]), 0
        while told < len(ids):
            await asyncio.sleep(self._chunk_seconds)
            told = min(told + next(sizes), len(ids))
            if progress is not None:
                progress(ids[:told], made_up_logprobs(ids[:told]))

    async def update(self, weights: Path, version: int) -> None:
        """See `Engine.update`; only the version is taken, when nobody pins it."""
        while self._pins:
            await self._free.wait()
        self.updates.append((weights, version))
        self.version = version

    async def update_from(self, source: WeightSender, version: int) -> None:
        """See `Pool.update_from`; it has no way of its own."""
        await self.update(await source.export(version), version)

    @asynccontextmanager
    async def pinned(self) -> "AsyncIterator[ScriptedEngine]":
        """See `Pool.pinned`; updates wait."""
        self._pins += 1
        self._free.clear()
        try:
            yield self
        finally:
            self._pins -= 1
            if not self._pins:
                self._free.set()

    def usage(self) -> PoolUsage:
        """See `Pool.usage`."""
        return PoolUsage(running=self._running)

    def _finish(self, whole: Ids, output_ids: Ids) -> str:
        if self._stop_ids is None:
            return "stop" if len(whole) == len(output_ids) else "length"
        return "stop" if int(output_ids[-1]) in self._stop_ids else "length"

    def _routing(self, ids: Ids, start: int) -> Routing | None:
        return None if self._experts is None else made_up_routing(ids, *self._experts)[start:]


def made_up_logprobs(ids: Ids) -> Floats:
    """A value between -2 and -0.1 for each token."""
    return (-0.1 - (ids % 20) / 10).astype(np.float32)


def made_up_routing(ids: Ids, layers: int, experts: int, per_token: int) -> Routing:
    """Rows for all tokens but the last: `per_token` distinct experts in each layer."""
    first = ids[:-1, None, None] + np.arange(len(ids) - 1)[:, None, None] + 3 * np.arange(layers)[:, None]
    rows = (first + np.arange(per_token)) % experts
    return rows.astype(np.uint8) if experts <= 256 else rows.astype(np.uint16)
