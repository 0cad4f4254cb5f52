import asyncio
import errno
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox import bubble
from sandbox.base import BoxSpec, Limits, SandboxError
from sandbox.bubble import Bubblewrap
from sandbox.rootfs import python

SMALL = Limits(memory_gib=0.125, pids=24, cpus=0.25, disk_mib=4, deadline_s=60)
ROOT = os.geteuid() == 0


def needs(held: bool, what: str) -> None:
    """Ends a test of a limit that this host cannot hold, as `probe` says and the docs tell."""
    if not held:
        pytest.skip(f"this host does not limit {what} for uid {os.geteuid()}")


async def test_probe_is_quick_and_tells_what_an_ordinary_user_lacks(state: Path):
    begun = time.monotonic()
    found = Bubblewrap(state=state).probe()
    assert time.monotonic() - begun < 5  # well under one second on an idle machine
    assert found.overlay and found.netns and found.pids and found.rootless != ROOT
    assert found.memory == found.cpus == (found.cgroup != "none")
    if not ROOT:
        assert not found.disk
    assert Bubblewrap(state=state).probe() is found


async def test_a_program_above_the_memory_limit_is_killed_and_reported(sandbox: Bubblewrap, spec: BoxSpec):
    needs(sandbox.probe().memory, "memory")
    async with sandbox.open(replace(spec, limits=SMALL)) as box:
        hog = await box.exec([python(), "-I", "-c", "bytearray(b'x') * (300 << 20)"])
        assert (hog.code, hog.oom, hog.timed_out) == (137, True, False)
        child = await box.exec(["sh", "-c", f"{python()} -I -c 'bytearray(b\"x\") * (300 << 20)'; echo shell goes on"])
        assert (child.stdout, child.code, child.oom) == (b"shell goes on\n", 0, True)
        assert not (await box.exec(["sh", "-c", "kill -9 $$"])).oom
        assert not (await box.exec(["true"])).oom


async def test_files_in_memory_count_as_memory(sandbox: Bubblewrap, spec: BoxSpec):
    needs(sandbox.probe().memory, "memory")
    limits = replace(SMALL, disk_mib=500)
    async with sandbox.open(replace(spec, limits=limits)) as box:
        assert (await box.exec(["dd", "if=/dev/zero", "of=/tmp/big", "bs=1M", "count=300"])).oom


FILL = """
import os, signal
count = 0
try:
    while count < 99:
        if os.fork() == 0:
            os.setsid()
            signal.pause()
        count += 1
except OSError:
    pass
print(count)
"""


async def test_a_box_holds_so_many_processes_and_not_more(sandbox: Bubblewrap, spec: BoxSpec):
    async with sandbox.open(replace(spec, limits=SMALL)) as box:
        started = await box.exec([python(), "-I", "-c", FILL])
        assert int(started.stdout) == SMALL.pids - 1
        await box.exec(["true"])  # takes the place of the program that has ended
        left = await box.exec(["sh", "-c", "sleep 300 & wait"])
        assert left.code != 0 and b"fork" in left.stderr
        await box.kill()
        assert int((await box.exec([python(), "-I", "-c", FILL])).stdout) == SMALL.pids - 1


async def test_a_full_box_says_why_a_command_cannot_start(sandbox: Bubblewrap, spec: BoxSpec):
    greedy = """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    while True:
        try:
            if os.fork() == 0:
                signal.pause()
        except OSError:
            time.sleep(0.01)
"""
    async with sandbox.open(replace(spec, limits=SMALL)) as box:
        await box.exec([python(), "-I", "-c", greedy])
        for _ in range(200):
            if (result := await box.exec(["true"])).code != 0:
                break
            await asyncio.sleep(0.05)
        assert result.code == 125 and b"cannot start a process" in result.stderr
        await box.kill()
        assert (await box.exec(["true"])).code == 0


async def test_a_fork_bomb_can_be_killed(sandbox: Bubblewrap, spec: BoxSpec):
    async with sandbox.open(replace(spec, limits=SMALL)) as box:
        for _ in range(3):
            await box.exec(["sh", "-c", "b() { b | b & b; }; b"], timeout_s=0.3)
            await box.kill()
            assert (await box.exec(["echo", "fine"])).stdout == b"fine\n"


async def test_cpu_time_is_held_to_its_share(sandbox: Bubblewrap, spec: BoxSpec):
    needs(sandbox.probe().cpus, "CPU time")
    burn = "import time; e = time.monotonic() + 1.2\nwhile time.monotonic() < e: pass\nprint(time.process_time())"
    async with sandbox.open(replace(spec, limits=SMALL)) as box:
        used = float((await box.exec([python(), "-I", "-c", burn])).stdout)
        assert used < 0.6


async def test_a_full_disk_stops_the_writer_only(sandbox: Bubblewrap, spec: BoxSpec):
    fill = "for n in 1 2 3 4 5 6 7 8; do head -c 1000000 /dev/zero > {}/f$n || exit 28; done"
    async with sandbox.open(replace(spec, limits=SMALL)) as box:
        for folder in ("/tmp", "/home/agent", "/dev/shm"):
            full = await box.exec(["sh", "-c", fill.format(folder)])
            assert full.code == 28 and b"No space" in full.stderr
        one_file = await box.exec(["dd", "if=/dev/zero", "of=/repo/big", "bs=1M", "count=6"])
        assert one_file.code != 0
        await box.exec(["rm", "-f", "/repo/big"])
        if sandbox.probe().disk:
            full = await box.exec(["sh", "-c", fill.format("/repo")])
            assert full.code == 28 and b"No space" in full.stderr
            with pytest.raises(SandboxError, match="No space"):
                await box.put(Path("/repo/more"), bytes(4 << 20))
            many = "i = 0\nwhile True:\n    open(f'/repo/n{i}', 'x'); i += 1"
            assert str(errno.ENOSPC).encode() in (await box.exec([python(), "-I", "-c", many])).stderr


async def test_a_command_ends_at_the_deadline_of_the_box(sandbox: Bubblewrap, spec: BoxSpec):
    async with sandbox.open(replace(spec, limits=replace(SMALL, deadline_s=0.5))) as box:
        result = await box.exec(["sh", "-c", "echo begun; sleep 300"], timeout_s=200)
        assert result.timed_out and result.stdout == b"begun\n" and result.seconds < 5
        with pytest.raises(SandboxError, match=r"deadline of 0\.5 s"):
            await box.exec(["true"])


async def test_a_box_ends_itself_after_its_deadline_when_nobody_ends_it(
    sandbox: Bubblewrap, spec: BoxSpec, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bubble, "GRACE_S", -59.5)
    async with sandbox.open(replace(spec, limits=SMALL)) as box:
        begun = time.monotonic()
        with pytest.raises(SandboxError, match="ended"):
            await box.exec(["sleep", "300"])
        assert time.monotonic() - begun < 5
        assert await box.changes() == ()
        with pytest.raises(SandboxError, match="gone"):
            await box.exec(["true"])


def test_old_kernels_that_count_processes_by_user_get_no_such_limit():
    assert not bubble._counts_per_namespace("5.4.0-150-generic")
    assert bubble._counts_per_namespace("5.14.0") and bubble._counts_per_namespace("6.18.44-fc")
