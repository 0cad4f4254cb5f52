"""Finds out what a sandbox really enforces on this host, by small boxes whose programs try to break each limit.

The programs are plain `sh` and a few usual commands, so that any image will do.
"""

import asyncio
import functools
import logging
import os
import re
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sandbox.base import Box, BoxSpec, Capabilities, ExecResult, Image, Limits, Sandbox

log = logging.getLogger(__name__)

LIMITS = Limits(memory_gib=0.125, pids=16, cpus=2.0, disk_mib=1, deadline_s=60)
SLOW = Limits(memory_gib=0.125, pids=16, cpus=0.1, disk_mib=1, deadline_s=60)
PORT = 8000
EXEC_S = 20.0
SPIN_S = 0.6

DISK = f"for name in a b; do head -c {int(LIMITS.disk_mib * 0.75 * 2**20)} /dev/zero > $name; done"
PIDS = f"n=0; while [ $n -lt {LIMITS.pids} ]; do sleep {EXEC_S:.0f} & n=$((n + 1)); done; echo all"
# `tail` keeps a line without an end in memory. Without a limit this takes twice 128 MiB for a moment.
MEMORY = f"head -c {int(LIMITS.memory_gib * 2**30 * 2)} /dev/zero | tail -n 1 > /dev/null"
SPIN = f"while :; do :; done & sleep {SPIN_S}; kill $!; wait $!; times"
NETWORK = "readlink /proc/self/ns/net; cat /proc/net/tcp"
CGROUPS = "cat /proc/self/cgroup"
TIMES = re.compile(r"(\d+)m([\d.]+)s")
HELD_SHARE, TRIES = 2 * SLOW.cpus, 5


@dataclass(frozen=True, kw_only=True)
class _Held:
    """What one box held of all but CPU time, and how it names its control groups."""

    overlay: bool
    netns: bool
    memory: bool
    pids: bool
    disk: bool
    groups: str


@functools.cache
def probe(sandbox: Sandbox, image: Image | None = None) -> Capabilities:
    """What holds on this host in boxes of `image`. Works with and without a running event loop; takes a second or two.

    The answer is kept for this process. SandboxError where no box can be opened.
    """
    with ThreadPoolExecutor(1) as thread:
        held, cpus = thread.submit(asyncio.run, _find(sandbox, image)).result()
    return Capabilities(
        overlay=held.overlay,
        netns=held.netns,
        memory=held.memory,
        pids=held.pids,
        cpus=cpus,
        disk=held.disk,
        cgroup=_version(held.groups) if held.memory or cpus else "none",
        rootless=os.geteuid() != 0,
    )


async def _find(sandbox: Sandbox, image: Image | None) -> tuple[_Held, bool]:
    with tempfile.TemporaryDirectory(prefix="lego-probe-") as folder:
        base = Path(folder)
        async with sandbox.open(BoxSpec(base=base, image=image, limits=LIMITS)) as box:
            held = await _held(box, base)
        async with sandbox.open(BoxSpec(base=base, image=image, limits=SLOW)) as box:
            return held, await _cpu_is_held(box)


async def _held(box: Box, base: Path) -> _Held:
    disk = await _sh(box, DISK)
    overlay = bool(await box.changes(LIMITS.disk_mib << 22)) and _is_empty(base)
    processes = await _sh(box, PIDS)
    await box.kill()
    with await box.listen(PORT):
        network = (await _sh(box, NETWORK)).stdout.decode()
    return _Held(
        overlay=overlay,
        netns=_is_own(network),
        memory=(await _sh(box, MEMORY)).oom,
        pids=b"all" not in processes.stdout and b"fork" in processes.stderr,
        disk=b"No space left" in disk.stderr,
        groups=(await _sh(box, CGROUPS)).stdout.decode(),
    )


def _is_empty(folder: Path) -> bool:
    return not any(folder.iterdir())


async def _cpu_is_held(box: Box) -> bool:
    """Whether a spinner in the box is held to its share while one outside, at the same time, gets more.

    Without the one outside, a busy host would look like a limit.
    """
    for _ in range(TRIES):
        outside, inside = await asyncio.gather(asyncio.to_thread(_spin), _sh(box, SPIN))
        used = sum(int(minutes) * 60 + float(seconds) for minutes, seconds in TIMES.findall(inside.stdout.decode()))
        if used == 0 or used > HELD_SHARE * inside.seconds:
            return False
        if outside > HELD_SHARE:
            return True
    log.warning("this host is too busy to tell whether a box is held to its share of CPU time")
    return False


def _spin() -> float:
    """The share of one CPU that a thread of this process gets for a moment."""
    begun, used = time.monotonic(), time.thread_time()
    while (wall := time.monotonic() - begun) < SPIN_S:
        pass
    return (time.thread_time() - used) / wall


def _is_own(network: str) -> bool:
    """Whether the box's network is another than ours, and `PORT` is open in it."""
    name, _, sockets = network.partition("\n")
    return name.startswith("net:") and name != os.readlink("/proc/self/ns/net") and f":{PORT:04X} " in sockets  # noqa: PTH115


def _version(groups: str) -> str:
    """The version of the control groups, from a text of /proc/self/cgroup: 1 where any controller has its own line."""
    controllers = {name for line in groups.splitlines() for name in line.split(":")[1].split(",")}
    return "v1" if controllers & {"memory", "pids", "cpu"} else "v2"


async def _sh(box: Box, script: str) -> ExecResult:
    return await box.exec(["sh", "-c", script], env={"LANG": "C", "LC_ALL": "C"}, timeout_s=EXEC_S)
