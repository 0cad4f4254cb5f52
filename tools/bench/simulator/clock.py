"""An asyncio event loop whose clock jumps: when nothing is ready, it is at once the time of the next timer.

For code that only waits for timers and for other tasks. Sockets, signals, threads and child processes are not heard
of: the loop asks the system for nothing, so that the same program always runs in the same order.
"""

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")


class Stuck(RuntimeError):
    """Every task waits for another one, and no timer is set: on a real clock this would hang for ever."""


class _Jump(selectors.SelectSelector):
    """Waits by moving `now`, in seconds."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stuck(f"at {self.now:.3f} s of virtual time all tasks wait and no timer is set")
        self.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """A selector event loop that starts at time 0 and never waits."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)
        # Sums of floats miss their mark by a rounding error; a timer that near is due.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jump.now

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As in the base class; a timer at infinity is none, so that a deadline that never comes hides no `Stuck`."""
        if when == math.inf:
            return asyncio.TimerHandle(when, callback, args, self, context)
        return super().call_at(when, callback, *args, context=context)


def run_virtual(main: Coroutine[object, object, T]) -> T:
    """What `main` returns, on a clock of its own. `Stuck` when it can never end."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
