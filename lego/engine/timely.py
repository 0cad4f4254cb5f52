"""An engine whose calls end in time, so that one that hangs is told apart from an agent that is slow."""

import asyncio
from pathlib import Path

from lego.engine.base import Engine, Progress
from lego.errors import EngineError
from lego.records import Generation, Ids, Sampling


class TimelyEngine:
    """An `Engine` around another one; updates have the engine's own limit."""

    def __init__(self, engine: Engine, call_s: float) -> None:
        self._engine, self._call_s = engine, call_s

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        *,
        session: str,
        routing_start: int = 0,
        progress: Progress | None = None,
    ) -> Generation:
        """See `Engine.generate`; EngineError for a call that takes too long, which is aborted in the engine."""
        try:
            async with asyncio.timeout(self._call_s) as limit:
                return await self._engine.generate(
                    prompt_ids, sampling, session=session, routing_start=routing_start, progress=progress
                )
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise EngineError(f"a model call took longer than budget.call_s {self._call_s:g}") from error

    async def update(self, weights: Path, version: int) -> None:
        """See `Engine.update`."""
        await self._engine.update(weights, version)
