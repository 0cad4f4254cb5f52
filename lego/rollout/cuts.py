"""When trials are cut short: a moment in the event loop's time that may come sooner than first told."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long things may take before they are cut; the default waits for each to end by itself."""

    group_s: float = math.inf
    """A group's trials, from the start of the first."""
    step_s: float = math.inf
    """A training step's wait for its groups, from the moment it asks for them."""

    def group_cut(self, start: float) -> "Cut":
        """The cut of a group whose first trial starts at `start`."""
        return Cut(at=start + self.group_s, cause=_over("group", self.group_s))

    @property
    def step_cause(self) -> str:
        """What is said of a trial that the step no longer waits for."""
        return _over("step", self.step_s)


FOREVER = Patience()
"""Waits for each trial to end by itself."""


class Cut:
    """When the trials of a group are cut short, and why; `soon` moves it while they run.

    A trial runs inside `limit` and ends as `cancelled` when that has expired. It costs its own sample, nothing else.
    """

    def __init__(self, *, at: float = math.inf, cause: str = "") -> None:
        self.at, self.cause = at, cause
        self._limits: set[asyncio.Timeout] = set()
        # One timer for all: thousands of trials with one each would fill the event loop's heap with cancelled ones.
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[asyncio.Timeout]:
        """A timeout that follows the cut: TimeoutError, and `expired()`, for what was cut inside."""
        async with asyncio.timeout(None) as limit:
            self._limits.add(limit)
            if self._timer is None:
                self._set_timer()
            try:
                yield limit
            finally:
                self._limits.discard(limit)
                if not self._limits:
                    self._stop_timer()

    def soon(self, at: float, cause: str) -> None:
        """Cuts at `at` for `cause`, if that is sooner than told; what runs hears of it."""
        if at < self.at:
            self.at, self.cause = at, cause
            if self._limits:
                self._set_timer()

    def _set_timer(self) -> None:
        self._stop_timer()
        if not math.isinf(self.at):
            self._timer = asyncio.get_running_loop().call_at(self.at, self._expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(self.at)


def _over(what: str, seconds: float) -> str:
    return f"the trials of its {what} took longer than budget.{what}_s {seconds:g}"
