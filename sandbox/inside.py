"""The processes of a running container as the host's kernel shows them: who is there, and who must go."""

import asyncio
import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from sandbox.cgroup import Cgroup, groups_of

GONE = (FileNotFoundError, ProcessLookupError)
PAUSE_S = 0.003


class Inside:
    """Everything behind one container's first process. `close` it."""

    def __init__(self, pid: int) -> None:
        """Raises ProcessLookupError or FileNotFoundError if there is no such process any more."""
        self.pid = pid
        self._first = os.pidfd_open(pid)
        try:
            self._namespace = _namespace(pid)
            self._keeper = _status(pid)["Uid"].split()[0]
            self.cgroup = Cgroup(groups_of(pid), "")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Forgets the container; does nothing to it."""
        os.close(self._first)

    def ended(self) -> bool:
        """Whether the first process, and with it the container, is gone."""
        poll = select.poll()
        poll.register(self._first, select.POLLIN)
        return bool(poll.poll(0))

    async def ends_within(self, patience_s: float) -> bool:
        """The same, after waiting so long for it."""
        try:
            async with asyncio.timeout(patience_s):
                await _readable(self._first)
        except TimeoutError:
            return self.ended()
        return True

    def end(self) -> None:
        """Kills the first process, and so all others. Does not wait."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._first, signal.SIGKILL)

    def oom_kills(self) -> int:
        """How many processes the kernel has killed here for want of memory; 0 where nobody counts."""
        try:
            return self.cgroup.oom_kills()
        except OSError:  # the group went with the container
            return 0

    def kill_commands(self, patience_s: float) -> None:
        """Kills all but the container's own first processes; TimeoutError when some stay. Blocks."""
        deadline = time.monotonic() + patience_s
        while victims := list(self.commands()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(victims)} processes stay")
            for pid in victims:
                self._kill(pid)
            time.sleep(PAUSE_S)

    def commands(self) -> Iterator[int]:
        """Pids of all living processes but those of the container's own user, which no command can become."""
        for pid in self._candidates():
            with suppress(*GONE, PermissionError):
                if _namespace(pid) == self._namespace:
                    status = _status(pid)
                    if status["State"][0] not in "ZX" and status["Uid"].split()[0] != self._keeper:
                        yield pid

    async def gone(self, pid: int) -> None:
        """Waits until a process of the container has ended; returns at once where there is none of that number."""
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            with suppress(*GONE, PermissionError):
                if _namespace(pid) == self._namespace:  # else it ended, and another took its number
                    await _readable(fd)
        finally:
            os.close(fd)

    def _candidates(self) -> list[int]:
        folders = self.cgroup.folders
        if folders:
            with suppress(OSError):  # the group went with the container
                return [int(pid) for pid in (folders[0] / "cgroup.procs").read_text().split()]
        return [int(path.name) for path in Path("/proc").glob("[0-9]*")]

    def _kill(self, pid: int) -> None:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            with suppress(*GONE):
                if _namespace(pid) == self._namespace:
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
        finally:
            os.close(fd)


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(fd, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(fd)


def _namespace(pid: int) -> int:
    """Which pid namespace a process is in."""
    return Path(f"/proc/{pid}/ns/pid").stat().st_ino


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
