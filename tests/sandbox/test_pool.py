"""Boxes opened ahead: quick to get, never a dead one, and none left when the pool ends."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from sandbox.base import Box, BoxSpec, Limits, Sandbox, SandboxError
from sandbox.bubble import Bubblewrap
from sandbox.pool import Pool, warm
from tests.sandbox.conftest import Backend, processes, remains


@dataclass
class Watched:
    """A real sandbox that counts its boxes and can be told to fail."""

    sandbox: Bubblewrap
    opened: int = 0
    alive: int = 0
    most: int = 0
    failures: list[Exception] = field(default_factory=list)
    deadlines: list[float] = field(default_factory=list)

    @asynccontextmanager
    async def open(self, spec: BoxSpec) -> AsyncIterator[Box]:
        self.deadlines.append(spec.limits.deadline_s)
        if self.failures:
            raise self.failures.pop()
        async with self.sandbox.open(spec) as box:
            self.opened, self.alive = self.opened + 1, self.alive + 1
            self.most = max(self.most, self.alive)
            try:
                yield box
            finally:
                self.alive -= 1


@pytest.fixture
def watched(bubblewrap: Bubblewrap) -> Watched:
    return Watched(bubblewrap)


async def until(held: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not held():  # noqa: ASYNC110 - what it waits for happens in other processes too
            await asyncio.sleep(0.005)


async def test_an_expected_box_is_there_before_it_is_asked_for(sandbox: Sandbox, spec: BoxSpec, backend: Backend):
    async with warm(sandbox, size=2) as pool:
        pool.expect(spec, 3)
        for _ in range(4):
            async with pool.open(spec) as box:
                assert (await box.exec(["sh", "-c", "cat README; echo used > README"])).stdout == b"read me\n"
        assert (pool.given, pool.waiting) == (3, 0)
        assert backend.remains() == []


async def test_never_more_than_its_size_are_waiting(watched: Watched, plain: BoxSpec):
    async with warm(watched, size=3) as pool:
        pool.expect(plain, 5)
        await until(lambda: watched.alive == 3)
        await asyncio.sleep(0.1)
        assert (watched.opened, pool.waiting) == (3, 3)
        async with pool.open(plain):
            await until(lambda: watched.opened == 4)
            assert pool.waiting == 3 and watched.most == 4


async def test_a_box_of_another_spec_is_not_given_out(watched: Watched, plain: BoxSpec):
    other = replace(plain, limits=Limits(pids=7))
    async with warm(watched, size=1) as pool:
        pool.expect(plain)
        async with pool.open(other):
            assert (pool.given, pool.waiting) == (0, 1)
        async with pool.open(replace(plain)):
            assert (pool.given, pool.waiting) == (1, 0)


async def test_whoever_gets_a_box_has_the_whole_deadline(watched: Watched, plain: BoxSpec):
    short = replace(plain, limits=replace(plain.limits, deadline_s=40.0))
    async with warm(watched, size=1, spare_s=0.3) as pool:
        pool.expect(short)
        await until(lambda: watched.opened == 1)
        await until(lambda: watched.opened == 2)  # the first has waited too long
        async with pool.open(short):
            assert pool.given == 1
        async with pool.open(short):
            pass
    assert watched.deadlines == [40.3, 40.3, 40.0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_dead_box_is_not_given_out(
    watched: Watched, plain: BoxSpec, state: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
):
    monkeypatch.setattr("sandbox.pool.ALIVE_S", 0.5)
    async with warm(watched, size=1) as pool:
        pool.expect(plain)
        await until(lambda: watched.alive == 1)
        for pid in first_processes(state):
            os.kill(pid, number)
        async with pool.open(plain) as box:
            assert (await box.exec(["echo", "fresh"])).stdout == b"fresh\n"
        assert (pool.given, watched.opened) == (0, 2)


def first_processes(state: Path) -> list[int]:
    """The first processes of boxes of this state folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
            words = Path("/proc", str(parent), "cmdline").read_bytes() if parent else b""
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if b"bwrap" in words and str(state).encode() in words:
            found.append(int(path.parent.name))
    return found


async def test_a_box_that_failed_to_open_ahead_is_nobodys_error(watched: Watched, plain: BoxSpec):
    watched.failures = [SandboxError("no luck"), ValueError("base=none")]
    async with warm(watched, size=2) as pool:
        pool.expect(plain, 2)
        await until(lambda: not watched.failures)
        async with pool.open(plain) as box:
            assert (await box.exec(["true"])).code == 0
    assert pool.given == 0 and watched.opened == 1


async def test_a_spec_that_cannot_be_is_the_error_of_who_opens_it(bubblewrap: Bubblewrap, plain: BoxSpec):
    wrong = replace(plain, base=plain.base / "none")
    async with warm(bubblewrap) as pool:
        pool.expect(wrong)
        with pytest.raises(ValueError, match="not a folder"):
            async with pool.open(wrong):
                pass
        async with pool.open(plain) as box:
            assert (await box.exec(["true"])).code == 0


async def test_a_bug_in_a_sandbox_ends_the_pool(watched: Watched, plain: BoxSpec):
    watched.failures = [RuntimeError("bug")]
    with pytest.raises(RuntimeError, match="bug"):
        async with warm(watched, size=1) as pool:
            pool.expect(plain, 3)
            await asyncio.sleep(20)


async def test_the_end_of_a_pool_closes_what_waits_also_on_errors_and_when_cancelled(
    watched: Watched, plain: BoxSpec, state: Path
):
    async def body(end: Callable[[Pool], object]) -> None:
        async with warm(watched, size=3) as pool:
            pool.expect(plain, 9)
            await until(lambda: watched.alive >= 1)
            async with pool.open(plain):
                end(pool)
                await asyncio.sleep(20)

    def fail(pool: Pool) -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        await body(fail)
    assert remains(state) == [] and watched.alive == 0
    for delay_ms in (0, 5, 20, 60):
        task = asyncio.create_task(body(lambda pool: None))
        await asyncio.sleep(delay_ms / 1000)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert remains(state) == [] and watched.alive == 0 and processes(state) == []


async def test_an_error_in_a_borrowed_box_closes_only_this_box(watched: Watched, plain: BoxSpec):
    async with warm(watched, size=2) as pool:
        pool.expect(plain, 2)
        with pytest.raises(SandboxError, match="mine"):
            async with pool.open(plain):
                raise SandboxError("mine")
        await until(lambda: watched.alive == 1)
        async with pool.open(plain) as box:
            assert (await box.exec(["true"])).code == 0
        assert pool.given == 2


async def test_a_pool_is_a_sandbox(bubblewrap: Bubblewrap, plain: BoxSpec):
    async with warm(bubblewrap) as pool, warm(pool) as outer:
        assert outer.probe() is bubblewrap.probe()
        await outer.prepare([])
        assert await outer.reap() == 0
        async with outer.open(plain) as box:
            assert (await box.exec(["true"])).code == 0


def test_a_pool_for_no_boxes_is_refused(bubblewrap: Bubblewrap):
    async def use() -> None:
        async with warm(bubblewrap, size=0):
            pass

    with pytest.raises(ValueError, match="size=0"):
        asyncio.run(use())
