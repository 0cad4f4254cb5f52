"""Several contexts entered at once are left again, whatever happens."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from lego.structured import together


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
