"""A child program of the driver, under the guard: it and all it starts end with the driver, and leave a log."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from lego import guard


class Child:
    """A running guarded command; leave its `async with` to end the whole tree."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        cwd: Path | None = None,
        grace_s: float = 10.0,
    ) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._grace_s = grace_s
        # Started without awaiting: a cancelled caller must never lose a process that already runs.
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                guard.command(list(argv), grace_s=grace_s),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the guard, the root of the tree."""
        return self._process.pid

    def status(self) -> int | None:
        """Exit status (128 + signal for a killed command), or None while it runs."""
        return self._process.poll()

    def tail(self, lines: int = 20, limit: int = 1 << 16) -> str:
        """The last lines of its output."""
        with self.log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])

    async def wait(self) -> int:
        """Waits for the end of the tree and returns the exit status."""
        while (status := self._process.poll()) is None:  # noqa: ASYNC110 - only the kernel knows, and pidfd is not everywhere
            await asyncio.sleep(0.05)
        return status

    def hurry(self) -> None:
        """Cuts the grace short: for a child that has nothing to put in order."""
        if self.status() is None:
            os.kill(self.pid, guard.HURRY)

    async def stop(self) -> None:
        """Asks the guard to end the tree (SIGTERM, grace, SIGKILL) and waits for it. Cancelling only stops waiting."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self.status() is None:
            os.kill(self.pid, signal.SIGTERM)
        await self.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
