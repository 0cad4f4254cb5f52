"""Waiting for work that must not be left half-done."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def unbroken(work: Awaitable[T]) -> T:
    """Waits for work that must be seen to its end; a cancellation that comes meanwhile is passed on only then."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        task.exception()  # nobody else will look at it
        raise asyncio.CancelledError
    return task.result()
