import asyncio
from pathlib import Path

import pytest

from lego.child import Child

ENV = {"LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin"}


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def pid_in(path: Path) -> int:
    async with asyncio.timeout(10):
        while not (path.exists() and path.read_text().strip()):  # noqa: ASYNC110 - written by another process
            await asyncio.sleep(0.02)
    return int(path.read_text())


async def test_a_finished_child_tells_its_status_and_last_lines(tmp_path: Path):
    child = Child(["sh", "-c", "seq 100; exit 3"], env=ENV, log=tmp_path / "new" / "log")
    assert await child.wait() == 3
    assert child.tail(2) == "99\n100"


async def test_a_child_has_the_given_environment_and_nothing_else(tmp_path: Path):
    child = Child(["env"], env=ENV | {"A": "b"}, log=tmp_path / "log")
    await child.wait()
    assert sorted(child.tail().splitlines()) == ["A=b", "LC_ALL=C.UTF-8", "PATH=/usr/bin:/bin"]


async def test_leaving_the_context_ends_the_child_and_what_it_started(tmp_path: Path):
    code = f"setsid sleep 600 & echo $! > {tmp_path}/pid; sleep 600"
    async with Child(["sh", "-c", code], env=ENV, log=tmp_path / "log", grace_s=0.5) as child:
        pid = await pid_in(tmp_path / "pid")
        assert child.status() is None and alive(pid)
    assert child.status() == 128 + 15 and not alive(pid)


async def test_a_cancel_while_stopping_stops_waiting_but_not_the_end(tmp_path: Path):
    code = f"trap '' TERM; echo $$ > {tmp_path}/pid; while :; do sleep 0.1; done"
    child = Child(["sh", "-c", code], env=ENV, log=tmp_path / "log", grace_s=0.5)
    pid = await pid_in(tmp_path / "pid")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await child.stop()
    assert alive(pid)
    assert await child.wait() == 128 + 9
    assert not alive(pid)
