"""The engine seam: token ids in, what was sampled out, and new weights between."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from lego.engine.usage import PoolUsage
from lego.records import Floats, Generation, Ids, Sampling

Progress = Callable[[Ids, Floats], None]
"""Hears all output ids and logprobs so far, each time more have come."""


class WeightSender(Protocol):
    """Who has new weights: the trainer."""

    async def send(self, url: str, life: str, version: int) -> None:
        """Brings them to one server, in one of its lives; EngineError if they did not arrive whole."""
        ...

    async def export(self, version: int) -> Path:
        """Writes them to a file."""
        ...


class Engine(Protocol):
    """An inference engine that holds one policy."""

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        *,
        session: str,
        routing_start: int = 0,
        progress: Progress | None = None,
    ) -> Generation:
        """Samples an answer to exactly these ids; routing rows before `routing_start` are left out.

        Cancelling the call aborts the request in the engine. Raises EngineError.
        """
        ...

    async def update(self, weights: Path, version: int) -> None:
        """Loads a safetensors file of HF-named weights as `version`: pause, load, finish, reset cache, resume."""
        ...


class Pool(Engine, Protocol):
    """An engine that a whole run shares: one or many servers, of which one can be kept on its weights."""

    @property
    def version(self) -> int:
        """The newest weights, 0 before any update."""
        ...

    async def update_from(self, source: WeightSender, version: int) -> None:
        """As `update`, but sent straight to each server; the file comes after, for those that are to have it later."""
        ...

    def pinned(self) -> AbstractAsyncContextManager[Engine]:
        """An `Engine` whose weights stay the newest of now while it is entered.

        Updates of others go on; where there are no others an update waits for the end.
        """
        ...

    def usage(self) -> PoolUsage:
        """Numbers for metrics; asks nobody."""
        ...
