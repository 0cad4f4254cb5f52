"""Several contexts entered at once are left again, whatever happens."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from lego.structured import together, unhurried


def manager(name, log, *, fails=False, delay=0.0):
    @asynccontextmanager
    async def context():
        await asyncio.sleep(delay)
        if fails:
            raise OSError(name)
        log.append(f"in {name}")
        try:
            yield name
        finally:
            await asyncio.sleep(0)
            log.append(f"out {name}")

    return context()


async def test_all_are_entered_side_by_side_and_left():
    log = []
    async with asyncio.timeout(1), together(manager("a", log, delay=0.1), manager("b", log)) as values:
        assert values == ("a", "b")
        assert log == ["in b", "in a"]
    assert sorted(log[2:]) == ["out a", "out b"]


async def test_when_one_cannot_be_entered_the_others_are_left_and_its_error_is_told():
    log = []
    with pytest.raises(ExceptionGroup) as caught:
        async with together(manager("a", log), manager("b", log, fails=True, delay=0.01)):
            pytest.fail("entered")
    assert caught.group_contains(OSError, match="b")
    assert log == ["in a", "out a"]


async def test_an_error_inside_leaves_all():
    log = []
    with pytest.raises(ExceptionGroup) as caught:
        async with together(manager("a", log), manager("b", log)):
            raise KeyError("inside")
    assert caught.group_contains(KeyError)
    assert sorted(log[2:]) == ["out a", "out b"]


async def test_work_goes_on_for_its_grace_when_its_caller_is_cancelled(caplog: pytest.LogCaptureFixture):
    done = []

    async def work(seconds: float, *, fails: bool = False) -> None:
        await asyncio.sleep(seconds)
        if fails:
            raise OSError("broken")
        done.append(seconds)

    for seconds, fails in ((0.1, False), (60.0, False), (0.1, True)):
        caller = asyncio.create_task(unhurried(work(seconds, fails=fails), 0.3))
        await asyncio.sleep(0.02)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
    assert done == [0.1] and "broken" in caplog.text


async def test_a_second_cancel_ends_the_work_at_once():
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60.0)
        finally:
            ended.set()

    caller = asyncio.create_task(unhurried(work(), 30.0))
    for _ in range(2):
        await asyncio.sleep(0.02)
        caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set()
