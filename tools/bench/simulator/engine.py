"""A scripted engine with capacity: answers share its speed, wait for a slot, and stand still while weights change.

A decode step takes `step_s + per_answer_s × n` seconds with n answers in a replica, the usual affine cost: reading the
weights once, and each answer's own keys and values. All answers of a replica advance a token a step, so an answer's
speed falls with load while the replica's total rises towards `1 / per_answer_s`. Replicas share answers evenly.
Prefill and cache hits are not modelled.
"""

import asyncio
import heapq
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What engines can do; the defaults are one mid-sized replica."""

    replicas: int = 1
    slots: int = 256
    """Answers that a replica decodes at a time; more wait, first come first served."""
    step_s: float = 0.02
    """Seconds of a decode step beside what each answer adds."""
    per_answer_s: float = 0.00015
    """Seconds that each answer adds to a decode step."""

    def speed(self, running: int) -> float:
        """Tokens a second of each answer when so many run."""
        return 1 / (self.step_s + self.per_answer_s * running / self.replicas)


@dataclass(frozen=True)
class Span:
    """Versions of the weights that made an answer's first and last token."""

    first: int
    last: int


@dataclass(eq=False)
class _Answer:
    """A call: its tokens, who waits for it, the version it started under, and whether it has a slot."""

    tokens: float
    done: asyncio.Future[Span]
    first: int = -1
    alive: bool = False


class SharedEngine:
    """The engines of a run, seen as one; must be made and used inside one event loop.

    `tokens` counts what was sampled.
    """

    def __init__(self, capacity: Capacity) -> None:
        self.version, self.tokens = 0, 0.0
        self._capacity, self._loop = capacity, asyncio.get_running_loop()
        self._running: list[tuple[float, int, _Answer]] = []  # a heap, by what `_served` is at the answer's end
        self._waiting: deque[_Answer] = deque()
        self._alive = self._number = 0
        self._served, self._speed, self._since = 0.0, 0.0, self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._shut = self._frozen = False
        self._empty = asyncio.Event()

    async def answer(self, tokens: float) -> Span:
        """Samples so many tokens; a cancelled call frees its slot."""
        answer = _Answer(tokens, self._loop.create_future())
        self._waiting.append(answer)
        self._turn()
        try:
            return await answer.done
        except asyncio.CancelledError:
            self._gone(answer)
            raise

    async def update(self, version: int, seconds: float, *, keep: bool) -> None:
        """Loads new weights in so many seconds.

        With `keep` running answers stand still and go on under the new weights (partial rollout); without, those that
        run end first, and no other starts until the weights are loaded.
        """
        self._shut = True
        if not keep:
            await self._drained()
        self._move()
        self._frozen = True
        self._turn()
        await asyncio.sleep(seconds)
        self._move()
        self.version, self._shut, self._frozen = version, False, False
        self._turn()

    async def _drained(self) -> None:
        self._empty.clear()
        self._turn()
        await self._empty.wait()

    def _move(self) -> None:
        """Accounts for the time since the last change."""
        now = self._loop.time()
        gained = self._speed * (now - self._since)
        self._served += gained
        self.tokens += gained * self._alive
        self._since = now

    def _turn(self) -> None:
        """Ends what is done, starts what waits, and sets the timer of the next end."""
        self._move()
        self._end()
        self._start()
        if self._alive == 0:
            self._empty.set()
        self._speed = self._capacity.speed(self._alive) if self._alive and not self._frozen else 0.0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._speed:
            left = max(self._running[0][0] - self._served, 0.0)
            self._timer = self._loop.call_later(left / self._speed, self._turn)

    def _end(self) -> None:
        """Takes answers from the front that have all their tokens, or whose caller went."""
        while self._running and (self._running[0][0] <= self._served + 1e-6 or self._running[0][2].done.done()):
            answer = heapq.heappop(self._running)[2]
            if answer.alive:
                answer.alive = False
                self._alive -= 1
            if not answer.done.done():
                answer.done.set_result(Span(answer.first, self.version))

    def _gone(self, answer: _Answer) -> None:
        """Frees the slot of an answer whose caller went; it stays in its queue and is passed over there."""
        self._move()
        if answer.alive:
            answer.alive = False
            self._alive -= 1
        self._turn()

    def _start(self) -> None:
        while self._waiting and not self._shut and self._alive < self._capacity.slots * self._capacity.replicas:
            answer = self._waiting.popleft()
            if answer.done.done():
                continue
            answer.first, answer.alive = self.version, True
            self._number += 1
            heapq.heappush(self._running, (self._served + answer.tokens, self._number, answer))
            self._alive += 1
