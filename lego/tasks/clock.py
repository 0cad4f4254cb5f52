"""Boxes that live on another date: a library loaded before all others (libfaketime) shifts what programs are told.

What it does not cover: statically linked programs, and times of files, which stay the host's.
"""

import importlib.util
import socket
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from lego.errors import UsageError
from sandbox.base import (
    Box,
    BoxSpec,
    Capabilities,
    Change,
    ExecResult,
    Image,
    Mount,
    Progress,
    Sandbox,
    SandboxError,
    User,
    no_progress,
)

IN_BOX = Path("/opt/clock/libfaketime.so.1")
DAY_S = 86400


def library() -> Path:
    """Where this host has libfaketime; UsageError with the commands that bring it."""
    package = importlib.util.find_spec("libfaketime")
    own = (
        Path(package.origin).parent / "vendor/libfaketime/src/libfaketime.so.1" if package and package.origin else None
    )
    for path in (*([own] if own else []), *Path("/usr/lib").glob("*/faketime/libfaketime.so.1")):
        if path.is_file():
            return path.resolve()
    raise UsageError(
        "days: the clock is shifted by libfaketime: `pip install libfaketime` or `apt install libfaketime`"
    )


@dataclass(frozen=True, kw_only=True)
class Shifted:
    """A `Sandbox` whose boxes are those of another, `days` later."""

    sandbox: Sandbox
    days: int
    library: Path

    def probe(self, image: Image | None = None) -> Capabilities:
        return self.sandbox.probe(image)

    async def prepare(self, images: Iterable[Image], progress: Progress = no_progress) -> None:
        await self.sandbox.prepare(images, progress)

    def open(self, spec: BoxSpec) -> AbstractAsyncContextManager[Box]:
        """As the other's; SandboxError where the box's programs do not see the other date."""
        return self._open(spec)

    async def reap(self) -> int:
        return await self.sandbox.reap()

    @asynccontextmanager
    async def _open(self, spec: BoxSpec) -> AsyncIterator[Box]:
        mount = Mount(source=self.library, target=IN_BOX)
        async with self.sandbox.open(replace(spec, mounts=(*spec.mounts, mount))) as box:
            shifted = _ShiftedBox(box, self.days)
            await shifted.check()
            yield shifted


class _ShiftedBox:
    """A `Box` that gives every command the library."""

    def __init__(self, box: Box, days: int) -> None:
        self._box, self._shift_s = box, days * DAY_S
        # Only dates move: programs that wait or measure use the monotonic clock.
        self._env = {"LD_PRELOAD": str(IN_BOX), "FAKETIME": f"{self._shift_s:+d}s", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}

    async def check(self) -> None:
        result = await self.exec(["date", "+%s"])
        said = result.stdout.strip()
        if not said.isdigit() or abs(int(said) - time.time() - self._shift_s) > DAY_S:
            told = result.stderr.decode(errors="replace").strip() or f"`date` says {said.decode(errors='replace')}"
            raise SandboxError(f"the clock of this box cannot be shifted, as with another C library: {told}")

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        user: User = "agent",
        stdin: bytes = b"",
        timeout_s: float = 600.0,
        max_output: int = 1 << 20,
    ) -> ExecResult:
        return await self._box.exec(
            argv,
            env={**self._env, **(env or {})},
            cwd=cwd,
            user=user,
            stdin=stdin,
            timeout_s=timeout_s,
            max_output=max_output,
        )

    async def put(self, path: Path, content: bytes, mode: int = 0o644) -> None:
        await self._box.put(path, content, mode)

    async def get(self, path: Path, max_bytes: int = 1 << 24) -> bytes:
        return await self._box.get(path, max_bytes)

    async def listen(self, port: int) -> socket.socket:
        return await self._box.listen(port)

    async def kill(self) -> None:
        await self._box.kill()

    async def changes(self, max_bytes: int = 1 << 24) -> tuple[Change, ...]:
        return await self._box.changes(max_bytes)
