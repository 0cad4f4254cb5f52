"""Finds out what this host enforces, by a small box whose programs try to break each limit."""

import asyncio
import functools
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sandbox.base import BoxSpec, Capabilities, ExecResult, Limits
from sandbox.bubble import Bubblewrap, hierarchy, open_box
from sandbox.livebox import BubbleBox
from sandbox.rootfs import python

LIMITS = Limits(memory_gib=0.0625, pids=16, cpus=0.5, disk_mib=1, deadline_s=30)
PORT = 8000

DISK_AND_PIDS = f"""
import errno, os, signal
full = started = 0
try:
    for name in "ab":
        with open(name, "wb") as file:
            file.write(bytes({int(LIMITS.disk_mib * 0.75 * 2**20)}))
except OSError as error:
    full = error.errno == errno.ENOSPC
try:
    while started < {LIMITS.pids}:
        if os.fork() == 0:
            signal.pause()
        started += 1
except OSError:
    print("pids")
if full:
    print("disk")
"""
MEMORY = f"bytearray(b'x') * {int(LIMITS.memory_gib * 2**30 * 2)}"
CONNECT = f"import _socket as s; s.socket(s.AF_INET, s.SOCK_STREAM).connect(('127.0.0.1', {PORT}))"


@dataclass(frozen=True)
class _Findings:
    words: set[str]
    memory: bool
    cpus: bool
    netns: bool
    overlay: bool


@functools.cache
def probe(sandbox: Bubblewrap) -> Capabilities:
    """What holds on this host. Works with and without a running event loop; takes well under a second."""
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(asyncio.run, _find(sandbox)).result()
    return Capabilities(
        overlay=found.overlay,
        netns=found.netns,
        memory=found.memory,
        pids="pids" in found.words,
        cpus=found.cpus,
        disk="disk" in found.words,
        cgroup=hierarchy().version,
        rootless=os.geteuid() != 0,
    )


async def _find(sandbox: Bubblewrap) -> _Findings:
    with tempfile.TemporaryDirectory(prefix="lego-probe-") as base:
        async with open_box(sandbox, BoxSpec(base=Path(base), limits=LIMITS)) as box:
            words = (await _python(box, DISK_AND_PIDS)).stdout.decode().split()
            await box.kill()
            # Without a memory limit this takes twice 64 MiB for a moment, which harms nobody.
            hog = await _python(box, MEMORY)
            with await box.listen(PORT):
                connected = (await _python(box, CONNECT)).code == 0
            overlay = bool(await box.changes(LIMITS.disk_mib << 22)) and _is_empty(Path(base))
            return _Findings(set(words), hog.oom, box.cgroup.cpu_limit() == LIMITS.cpus, connected, overlay)


def _is_empty(folder: Path) -> bool:
    return not any(folder.iterdir())


async def _python(box: BubbleBox, code: str) -> ExecResult:
    return await box.exec([python(), "-I", "-S", "-c", code], timeout_s=10)
