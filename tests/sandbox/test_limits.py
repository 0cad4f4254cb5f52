import asyncio
import errno
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox import bubble
from sandbox.base import Box, BoxSpec, ExecResult, Limits, Sandbox, SandboxError
from sandbox.bubble import Bubblewrap
from sandbox.cgroup import Cgroup
from sandbox.interpreter import python as host_python
from sandbox.livebox import BubbleBox
from tests.sandbox.conftest import process_count

SMALL = Limits(memory_gib=0.125, pids=24, cpus=0.25, disk_mib=4, deadline_s=60)
ROOT = os.geteuid() == 0


def needs(held: bool, what: str) -> None:
    """Ends a test of a limit that this host cannot hold, as `probe` says and the docs tell."""
    if not held:
        pytest.skip(f"this host does not limit {what} for uid {os.geteuid()}")


async def test_a_program_above_the_memory_limit_is_killed_and_reported(sandbox: Sandbox, spec: BoxSpec, python: str):
    needs(sandbox.probe().memory, "memory")
    async with sandbox.open(replace(spec, limits=SMALL)) as box:
        hog = await box.exec([python, "-I", "-c", "bytearray(b'x') * (300 << 20)"])
        assert (hog.code, hog.oom, hog.timed_out) == (137, True, False)
        child = await box.exec(["sh", "-c", f"{python} -I -c 'bytearray(b\"x\") * (300 << 20)'; echo shell goes on"])
        assert (child.stdout, child.code, child.oom) == (b"shell goes on\n", 0, True)
        assert not (await box.exec(["sh", "-c", "kill -9 $$"])).oom
        assert not (await box.exec(["true"])).oom


async def test_files_in_memory_count_as_memory(sandbox: Sandbox, spec: BoxSpec):
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


async def test_a_box_holds_so_many_processes_and_not_more(sandbox: Sandbox, spec: BoxSpec, python: str):
    async with sandbox.open(replace(spec, limits=SMALL)) as box:
        for _ in range(2):
            started = int((await box.exec([python, "-I", "-c", FILL])).stdout)
            # An engine has a process or two of its own in a container.
            assert SMALL.pids - 4 <= started < SMALL.pids
            await box.kill()


async def test_a_bubblewrap_box_holds_exactly_so_many(bubblewrap: Bubblewrap, plain: BoxSpec):
    async with bubblewrap.open(replace(plain, limits=SMALL)) as box:
        started = await box.exec([host_python(), "-I", "-c", FILL])
        assert int(started.stdout) == SMALL.pids - 1
        await box.exec(["true"])  # takes the place of the program that has ended
        left = await box.exec(["sh", "-c", "sleep 300 & wait"])
        assert left.code != 0 and b"fork" in left.stderr


GREEDY = """
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


async def test_a_full_box_says_why_a_command_cannot_start(bubblewrap: Bubblewrap, plain: BoxSpec):
    async with bubblewrap.open(replace(plain, limits=SMALL)) as box:
        await box.exec([host_python(), "-I", "-c", GREEDY])
        result = await refused(box)
        assert result and result.code == 125 and b"cannot start a process" in result.stderr
        await box.kill()
        assert (await box.exec(["true"])).code == 0


async def test_a_full_box_is_emptied_by_kill_and_goes_on(sandbox: Sandbox, spec: BoxSpec, python: str):
    async with sandbox.open(replace(spec, limits=SMALL)) as box:
        quiet = await process_count(box)
        await box.exec([python, "-I", "-c", GREEDY])
        await filled(box)
        begun = time.monotonic()
        await box.kill()
        assert time.monotonic() - begun < 5
        assert await process_count(box) == quiet


async def filled(box: Box) -> None:
    """Waits until a box holds all that it may: it refuses a command, or shows so many (an engine's own may come in)."""
    for _ in range(200):
        try:
            result = await box.exec(["sh", "-c", "echo /proc/[0-9]*"], timeout_s=5)
        except SandboxError:
            return
        if result.code != 0 or len(result.stdout.split()) >= SMALL.pids:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the box did not fill up")


async def refused(box: Box) -> ExecResult | None:
    """How the first command that a full box cannot start ends; None for an error of the place."""
    for _ in range(200):
        try:
            result = await box.exec(["true"], timeout_s=5)
        except SandboxError:
            return None
        if result.code != 0:
            return result
        await asyncio.sleep(0.05)
    raise AssertionError("the box did not fill up")


async def test_a_fork_bomb_can_be_killed(sandbox: Sandbox, spec: BoxSpec):
    async with sandbox.open(replace(spec, limits=SMALL)) as box:
        for _ in range(3):
            await box.exec(["sh", "-c", "b() { b | b & b; }; b"], timeout_s=0.3)
            await box.kill()
            assert (await box.exec(["echo", "fine"])).stdout == b"fine\n"


TRAPS = 'trap "" TERM INT HUP; while :; do :; done'


async def test_every_kind_of_misbehaviour_is_over_in_five_seconds(sandbox: Sandbox, spec: BoxSpec, python: str):
    disk = "i=0; while :; do head -c 1000000 /dev/zero > /repo/f$i; i=$((i+1)); done"
    printer = "while :; do head -c 1000000 /dev/zero; sleep 0.1; done"
    daemons = "for i in 1 2 3 4; do (setsid sh -c 'while :; do sleep 1; done' &); done; sleep 300"
    bomb = "b() { b | b & b; }; b"
    async with sandbox.open(replace(spec, limits=SMALL)) as box:
        quiet = await process_count(box)
        for script in (disk, printer, daemons, bomb, TRAPS, f"(setsid sh -c '{TRAPS}' &) ; {TRAPS}"):
            begun = time.monotonic()
            result = await box.exec(["sh", "-c", script], timeout_s=0.6)
            await box.kill()
            assert time.monotonic() - begun < 5.6, script
            assert result.timed_out or script in (bomb, disk), (script, result)
            assert await process_count(box) == quiet, script


async def test_cpu_time_is_held_to_its_share(sandbox: Sandbox, spec: BoxSpec, python: str):
    needs(sandbox.probe().cpus, "CPU time")
    burn = "import time; e = time.monotonic() + 1.2\nwhile time.monotonic() < e: pass\nprint(time.process_time())"
    async with sandbox.open(replace(spec, limits=SMALL)) as box:
        used = float((await box.exec([python, "-I", "-c", burn])).stdout)
        assert used < 0.6


async def test_a_full_disk_stops_the_writer_only(sandbox: Sandbox, spec: BoxSpec, python: str):
    fill = "for n in 1 2 3 4 5 6 7 8; do head -c 1000000 /dev/zero > {}/f$n || exit 28; done"
    async with sandbox.open(replace(spec, limits=SMALL)) as box:
        for folder in ("/tmp", "/home/agent", "/dev/shm", "/var/tmp"):
            full = await box.exec(["sh", "-c", fill.format(folder)])
            assert full.code == 28 and (b"No space" in full.stderr or b"ead-only" in full.stderr)
        one_file = await box.exec(["dd", "if=/dev/zero", "of=/repo/big", "bs=1M", "count=6"])
        assert one_file.code != 0
        await box.exec(["rm", "-f", "/repo/big"])
        if sandbox.probe().disk:
            full = await box.exec(["sh", "-c", fill.format("/repo")])
            assert full.code == 28 and b"No space" in full.stderr
            with pytest.raises(SandboxError, match="No space"):
                await box.put(Path("/repo/more"), bytes(4 << 20))
            many = "i = 0\nwhile True:\n    open(f'/repo/n{i}', 'x'); i += 1"
            assert str(errno.ENOSPC).encode() in (await box.exec([python, "-I", "-c", many])).stderr


async def test_a_command_ends_at_the_deadline_of_the_box(sandbox: Sandbox, spec: BoxSpec):
    async with sandbox.open(replace(spec, limits=replace(SMALL, deadline_s=0.5))) as box:
        result = await box.exec(["sh", "-c", "echo begun; sleep 300"], timeout_s=200)
        assert result.timed_out and result.stdout == b"begun\n" and result.seconds < 5
        with pytest.raises(SandboxError, match=r"deadline of 0\.5 s"):
            await box.exec(["true"])


async def test_a_box_ends_itself_after_its_deadline_when_nobody_ends_it(
    bubblewrap: Bubblewrap, plain: BoxSpec, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bubble, "GRACE_S", -59.5)
    async with bubblewrap.open(replace(plain, limits=SMALL)) as box:
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


async def test_all_processes_of_a_box_are_in_its_groups(bubblewrap: Bubblewrap, plain: BoxSpec):
    async with bubblewrap.open(plain) as box:
        assert isinstance(box, BubbleBox)
        result = await box.exec(["sh", "-c", "sleep 60 & sleep 60 & echo /proc/[0-9]*"])
        left = len(result.stdout.split()) - 1  # all but the shell, which has ended
        for folder in box.cgroup.folders:
            assert len((folder / "cgroup.procs").read_text().split()) == left == 3


async def test_a_box_that_cannot_be_limited_does_not_open(
    bubblewrap: Bubblewrap, plain: BoxSpec, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Cgroup, "entrances", lambda self: [Path("/dev/full")])
    with pytest.raises(SandboxError, match=r"cannot put the box into .*/dev/full.*: No space left"):
        async with bubblewrap.open(plain):
            pass


def test_a_process_that_does_not_end_in_time_is_killed_and_collected():
    with subprocess.Popen(["sleep", "60"]) as process:
        bubble._stop(process, patience_s=0.05)
        assert process.returncode == -signal.SIGKILL
        bubble._stop(process, patience_s=0.05)  # nothing is left to stop
