"""A warm pool: opens boxes ahead of the trials that will want them, so that a trial does not wait for its box.

It is itself a `Sandbox`, over any other one. Every box ahead is kept by a task of its own, which opens and closes it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from sandbox.base import Box, BoxSpec, Capabilities, Image, Progress, Sandbox, SandboxError, no_progress

log = logging.getLogger(__name__)

ALIVE_S = 5.0
"""A box that takes longer to answer is taken for dead."""
ALIVE_PORT = 65535


@dataclass(eq=False)
class _Ahead:
    """One box that nobody has asked for yet, and how its keeper and its user tell each other what happens."""

    spec: BoxSpec
    box: Box | None = None
    error: SandboxError | None = None
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    claimed: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def warm(sandbox: Sandbox, *, size: int = 4, spare_s: float = 300.0) -> AsyncIterator["Pool"]:
    """A pool of at most `size` waiting boxes, each kept for at most `spare_s`; closes all that wait when it ends.

    Boxes are opened ahead with a deadline that is `spare_s` longer, so that whoever gets one has all the time that
    its spec says.
    """
    if size < 1 or not spare_s > 0:
        raise ValueError(f"size={size}, spare_s={spare_s}: want at least one box, and more than 0 s")
    try:
        async with asyncio.TaskGroup() as group:
            pool = Pool(sandbox, size, spare_s, group)
            try:
                yield pool
            finally:
                pool.stop()
    except BaseExceptionGroup as errors:
        if len(errors.exceptions) == 1:  # the error of the body comes out as it went in
            raise errors.exceptions[0] from None
        raise


class Pool:
    """A `Sandbox` whose `open` is quick for boxes that were expected."""

    def __init__(self, sandbox: Sandbox, size: int, spare_s: float, group: asyncio.TaskGroup) -> None:
        self._sandbox, self._size, self._spare_s, self._group = sandbox, size, spare_s, group
        self._expected: deque[BoxSpec] = deque()
        self._waiting: list[_Ahead] = []
        self._keepers: set[asyncio.Task[None]] = set()
        self._stopped = False
        self.given = 0
        """Boxes that were opened ahead and then used."""

    @property
    def waiting(self) -> int:
        """Boxes that are open, or being opened, for nobody yet."""
        return len(self._waiting)

    def expect(self, spec: BoxSpec, count: int = 1) -> None:
        """Says that so many boxes will be asked for soon. More than the pool holds are opened as others are taken."""
        self._expected.extend([spec] * count)
        self._fill()

    def probe(self, image: Image | None = None) -> Capabilities:
        """As the sandbox below."""
        return self._sandbox.probe(image)

    async def prepare(self, images: Iterable[Image], progress: Progress = no_progress) -> None:
        """As the sandbox below."""
        await self._sandbox.prepare(images, progress)

    async def reap(self) -> int:
        """As the sandbox below."""
        return await self._sandbox.reap()

    @asynccontextmanager
    async def open(self, spec: BoxSpec) -> AsyncIterator[Box]:
        """A box that nobody used before: one opened ahead for an equal spec, if it answers, or else a new one."""
        while (ahead := self._pop(spec)) is not None:
            async with _lent(ahead) as box:
                if box is not None:
                    self.given += 1
                    yield box
                    return
        if spec in self._expected:
            self._expected.remove(spec)
        async with self._sandbox.open(spec) as box:
            yield box

    def stop(self) -> None:
        """Opens no more, and closes what is open."""
        self._stopped = True
        for keeper in self._keepers:
            keeper.cancel()

    def _fill(self) -> None:
        while self._expected and len(self._waiting) < self._size and not self._stopped:
            ahead = _Ahead(self._expected.popleft())
            self._waiting.append(ahead)
            keeper = self._group.create_task(self._keep(ahead))
            self._keepers.add(keeper)
            keeper.add_done_callback(self._keepers.discard)

    def _pop(self, spec: BoxSpec) -> _Ahead | None:
        """Takes the box that has waited longest out of the waiting ones."""
        ahead = next((ahead for ahead in self._waiting if ahead.spec == spec), None)
        if ahead is not None:
            ahead.claimed.set()
            self._leave(ahead)
        return ahead

    def _leave(self, ahead: _Ahead) -> None:
        if ahead in self._waiting:
            self._waiting.remove(ahead)
        self._fill()

    async def _keep(self, ahead: _Ahead) -> None:
        """Holds one box open until its user is done with it, or nobody wanted it for too long."""
        try:
            async with self._sandbox.open(_with_time_to_wait(ahead.spec, self._spare_s)) as ahead.box:
                ahead.opened.set()
                await self._until_released(ahead)
        except SandboxError as error:
            log.warning("a box opened ahead failed: %s", error)
            ahead.error = error
        except ValueError as error:  # whoever asks for such a box gets the error
            log.warning("a box was expected that cannot be: %s", error)
        except BaseException:  # the pool is ending, or this is a bug and ends it
            self._stopped = True
            raise
        finally:
            ahead.opened.set()
            ahead.closed.set()
            self._leave(ahead)

    async def _until_released(self, ahead: _Ahead) -> None:
        try:
            async with asyncio.timeout(self._spare_s):
                await ahead.claimed.wait()
        except TimeoutError:
            if not ahead.claimed.is_set():
                self._waiting.remove(ahead)
                self._expected.append(ahead.spec)
                return
        await ahead.released.wait()


@asynccontextmanager
async def _lent(ahead: _Ahead) -> AsyncIterator[Box | None]:
    """The box, if it lives; at the end has the keeper close it, and waits for that, as whoever closes a box does."""
    box = None
    try:
        box = await _living(ahead)
        yield box
    finally:
        ahead.released.set()
        await ahead.closed.wait()
    if box is not None and ahead.error is not None:
        raise ahead.error


async def _living(ahead: _Ahead) -> Box | None:
    """The box, if it came up and a listener can be made in it, in time.

    A command would tell more, such as of a frozen container, but for an engine costs nearly as much as a new box.
    """
    await ahead.opened.wait()
    if ahead.box is None or ahead.closed.is_set():
        return None
    try:
        async with asyncio.timeout(ALIVE_S):
            (await ahead.box.listen(ALIVE_PORT)).close()
    except (SandboxError, TimeoutError) as error:
        log.warning("a box opened ahead is dead: %s", error)
        return None
    return ahead.box


def _with_time_to_wait(spec: BoxSpec, spare_s: float) -> BoxSpec:
    return replace(spec, limits=replace(spec.limits, deadline_s=spec.limits.deadline_s + spare_s))
