"""Structured concurrency that asyncio lacks: entering several contexts at once, and work that a cancel lets end."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)


@asynccontextmanager
async def together(*managers: AbstractAsyncContextManager[Any]) -> AsyncIterator[tuple[Any, ...]]:
    """Enters all managers side by side, each in its own task, and leaves them side by side.

    If one fails to enter, the others are cancelled or left again, and its error is raised.
    """
    leave = asyncio.Event()
    ready = [asyncio.get_running_loop().create_future() for _ in managers]

    async def hold(manager: AbstractAsyncContextManager[Any], entered: asyncio.Future[Any]) -> None:
        async with manager as value:
            entered.set_result(value)
            await leave.wait()

    async with asyncio.TaskGroup() as group:
        for manager, entered in zip(managers, ready, strict=True):
            group.create_task(hold(manager, entered))
        try:
            yield tuple([await entered for entered in ready])
        finally:
            leave.set()


async def unhurried(work: Coroutine[Any, Any, T], grace_s: float) -> T:
    """What `work` returns. A caller that is cancelled meanwhile waits up to `grace_s` more for it, then cancels it.

    What it raises then is logged: the caller hears that it was cancelled.
    """
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        try:
            await asyncio.wait((task,), timeout=grace_s)
        finally:
            task.cancel()
            found = (await asyncio.gather(task, return_exceptions=True))[0]
        if isinstance(found, Exception):
            log.error("failed after its caller was cancelled: %r", found)
        raise
