"""Which calls wait before an engine whose cache is nearly full: a pure rule, and the line they wait in.

An engine that takes more than its cache holds throws running answers out and computes them again. Waiting here is
cheaper. A reading of the cache is a moment old, so the tokens that came and went since are counted with it.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from lego.engine.usage import Reading
from lego.records import Ids


@dataclass(frozen=True, kw_only=True)
class Admission:
    """When calls wait before an engine; without effect where the engine tells no cache usage or its cache fits all."""

    high_watermark: float = 0.9
    """Share of the cache in use from which calls wait."""
    hit_threshold: float = 0.8
    """Share of a prompt that the engine has seen of its session, from which the call need not wait."""
    idle_grace_s: float = 2.0
    """Time without a call of ours after which an engine is given one, whatever its last reading says."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the fields."""
        for name in ("high_watermark", "hit_threshold"):
            if not 0 < getattr(self, name) <= 1:
                yield f"engine.admission.{name}: {getattr(self, name)}, wanted over 0, up to 1"
        if self.idle_grace_s < 0:
            yield f"engine.admission.idle_grace_s: {self.idle_grace_s}, wanted 0 or more"


@dataclass(frozen=True, kw_only=True)
class Load:
    """How full an engine is."""

    reading: Reading
    since: int = 0
    """Tokens of calls that came since the reading, less those of calls that went."""
    running: int = 0
    idle_s: float = 0.0
    """Time since the last call of ours ended; counts only while none runs."""

    @property
    def usage(self) -> float:
        """Share of the cache in use now, as well as it is known."""
        held = self.since / self.reading.cache_tokens if self.reading.cache_tokens else 0.0
        return max((self.reading.kv_usage or 0.0) + held, 0.0)


def helps(reading: Reading, most_tokens: int) -> bool:
    """Whether the cache can be too small at all; `most_tokens` is what the engine ever has to hold at once."""
    known = reading.kv_usage is not None
    return known and (reading.cache_tokens is None or most_tokens > reading.cache_tokens)


def admits(rule: Admission, load: Load, hit_share: float) -> bool:
    """Whether a call may start now; `hit_share` of its prompt is known to the engine."""
    if load.running == 0 and load.idle_s >= rule.idle_grace_s:
        return True
    return load.usage < rule.high_watermark or hit_share >= rule.hit_threshold


@dataclass(eq=False, kw_only=True)
class Want:
    """A call before its engine."""

    session: str
    prompt_ids: Ids
    hit_share: float = 0.0

    def repeats(self, other: "Want") -> bool:
        """Whether this is another attempt at the same call."""
        same = self.session == other.session and len(self.prompt_ids) == len(other.prompt_ids)
        return same and bool((self.prompt_ids == other.prompt_ids).all())


class Gate:
    """The line before one engine, first come first served but for calls that are cheap.

    Another attempt at a call that waits takes its place; the older one, which hardly anybody waits for, goes to the
    end. What admits is told from outside: readings by `read`, ends of calls by `leave`.
    """

    def __init__(self, rule: Admission, most_tokens: int) -> None:
        self._rule, self._most_tokens = rule, most_tokens
        self._reading, self._since = Reading(), 0
        self._line: deque[tuple[Want, asyncio.Future[bool]]] = deque()
        self._idle_from = -float("inf")
        self.running = 0

    @property
    def waiting(self) -> int:
        """Calls in the line."""
        return len(self._line)

    @property
    def helps(self) -> bool:
        """Whether calls may have to wait at all."""
        return helps(self._reading, self._most_tokens)

    async def enter(self, want: Want) -> bool:
        """Waits until the call may start, which is then counted until `leave`; False if the engine went instead."""
        if not self._line and self._admits(want):
            self._start(want)
            return True
        place = (want, asyncio.get_running_loop().create_future())
        self._queue(place)
        self._move()
        try:
            return await place[1]
        except asyncio.CancelledError:
            if place[1].done() and not place[1].cancelled() and place[1].result():
                self.leave(len(want.prompt_ids))
            elif place in self._line:
                self._line.remove(place)
            raise

    def leave(self, tokens: int) -> None:
        """A call with a prompt of so many tokens ended."""
        self.running -= 1
        self._since -= tokens
        if self.running == 0:
            self._idle_from = asyncio.get_running_loop().time()
        self._move()

    def read(self, reading: Reading) -> None:
        """A new reading, which counts everything up to now."""
        self._reading, self._since = reading, 0
        self._move()

    def close(self) -> None:
        """The engine went: all who wait are told, and a later one starts with nothing read."""
        for _, told in self._line:
            if not told.done():
                told.set_result(False)
        self._line.clear()
        self._reading, self._since = Reading(), 0

    def _queue(self, place: tuple[Want, "asyncio.Future[bool]"]) -> None:
        older = next((i for i, (other, _) in enumerate(self._line) if place[0].repeats(other)), None)
        if older is None:
            self._line.append(place)
        else:
            self._line.append(self._line[older])
            self._line[older] = place

    def _move(self) -> None:
        """Lets in whoever may start, from the front; those behind one that must wait only if they are cheap."""
        stuck = False
        for place in tuple(self._line):
            want, told = place
            if told.cancelled():  # its caller has yet to hear of it
                self._line.remove(place)
                continue
            cheap = want.hit_share >= self._rule.hit_threshold
            if (cheap or not stuck) and self._admits(want):
                self._line.remove(place)
                self._start(want)
                told.set_result(True)
            else:
                stuck = True

    def _start(self, want: Want) -> None:
        self.running += 1
        self._since += len(want.prompt_ids)

    def _admits(self, want: Want) -> bool:
        if not self.helps:
            return True
        idle_s = asyncio.get_running_loop().time() - self._idle_from
        load = Load(reading=self._reading, since=self._since, running=self.running, idle_s=idle_s)
        return admits(self._rule, load, want.hit_share)
