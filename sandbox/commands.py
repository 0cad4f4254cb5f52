"""A box without its backend: commands in turn until its deadline, and files that commands of the box itself move."""

import asyncio
import errno
import os
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

from sandbox.base import BoxSpec, Change, ExecResult, SandboxError, User
from sandbox.pipes import Output
from sandbox.rootfs import environment
from sandbox.state import BoxFolder
from sandbox.upper import read_changes

KILL_S = 20.0
"""The longest that the kernel may take to end what was killed."""
FILE_S = 120.0
MESSAGE_BYTES = 4096
OOM_CODE = 128 + signal.SIGKILL
LAST_ERRNO = 124
"""Exit codes up to this are the system's error numbers, where a box itself moves a file."""


class BoxEnded(SandboxError):
    """The box's first process is gone: its deadline, the memory limit, or a kill from outside."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Become a program."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    user: User


@dataclass(frozen=True, kw_only=True)
class Put:
    """Write standard input to a file in one step; a link or folder of that name is replaced, not followed."""

    path: Path
    mode: int


@dataclass(frozen=True, kw_only=True)
class Get:
    """Write a regular file to standard output; the exit code is 0 or the system's error number."""

    path: Path
    max_bytes: int


Order = Run | Put | Get
"""What a process of the box shall do; all but `Run` as the agent."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """An order with its streams. `code` sees it to its end, and raises BoxEnded where the box ends before."""

    stdout: Output
    stderr: Output
    code: Callable[[], Awaitable[int]]


class CommandBox(ABC):
    """A `Box`. Commands queue up: one at a time."""

    users: tuple[User, ...]

    def __init__(self, spec: BoxSpec, folder: BoxFolder) -> None:
        self._spec, self._folder = spec, folder
        self._turn = asyncio.Lock()
        self._deadline = asyncio.get_running_loop().time() + spec.limits.deadline_s

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
        """Runs `argv`; `max_output` holds for each stream, and `code` is 128 + N for a program that signal N ended.

        A timeout kills all processes of the box, also those that earlier commands left behind.
        """
        if user not in self.users:
            raise ValueError(f"user={user!r}: want {' or '.join(map(repr, self.users))} in a box of this backend")
        if not argv or any("\0" in word for word in argv):
            raise ValueError(f"argv={argv!r}: want at least a program, and no NUL in a word")
        environment(env)  # ValueError for what cannot be a variable
        order = Run(argv=argv, env=env or {}, cwd=cwd or self._spec.workdir, user=user)
        return await self._run(order, stdin, timeout_s, max_output)

    async def put(self, path: Path, content: bytes, mode: int = 0o644) -> None:
        """Writes a file in one step, as the agent; a link or folder of that name is replaced, not followed."""
        if not path.is_absolute():
            raise ValueError(f"path={path}: want an absolute path of the box")
        result = await self._run(Put(path=path, mode=mode), content, FILE_S, MESSAGE_BYTES)
        if result.code != 0:
            raise SandboxError(f"cannot write {path} in the box: {_failure(result)}")

    async def get(self, path: Path, max_bytes: int = 1 << 24) -> bytes:
        """The bytes of a regular file; FileNotFoundError where the box shows no such file that its agent may read."""
        result = await self._run(Get(path=path, max_bytes=max_bytes), b"", FILE_S, max_bytes)
        if result.code == errno.EFBIG or result.truncated:
            raise ValueError(f"{path} in the box is larger than {max_bytes} bytes")
        if result.code is None or result.code > LAST_ERRNO:
            raise SandboxError(f"cannot read {path} in the box: {_failure(result)}")
        if result.code != 0:
            raise FileNotFoundError(result.code, f"no file to read in the box: {_failure(result)}", str(path))
        return result.stdout

    async def listen(self, port: int) -> socket.socket:
        """A listening socket on 127.0.0.1:`port` of the box's own network; the caller closes it."""
        if not 1024 <= port <= 65535:
            raise ValueError(f"port={port}: want 1024 to 65535")
        try:
            return await self._listen(port)
        except OSError as error:
            raise SandboxError(f"port={port} in the box: {error.strerror}") from error

    async def kill(self) -> None:
        """Kills every process but the box's own first ones, and waits until they are gone."""
        try:
            await self._kill(KILL_S)
        except TimeoutError as error:
            raise SandboxError(f"processes of the box did not end within {KILL_S:g} s of being killed") from error

    async def changes(self, max_bytes: int = 1 << 24) -> tuple[Change, ...]:
        """What differs from `base`; TooLarge (a ValueError) above `max_bytes`. `kill` first for a still picture."""
        return await asyncio.to_thread(read_changes, self._folder.upper, self._spec.base, max_bytes)

    @abstractmethod
    def oom_kills(self) -> int:
        """How many processes the kernel has killed here for want of memory."""

    @abstractmethod
    def _started(self, order: Order, stdin: bytes, cap: int) -> AbstractContextManager[Command]:
        """Streams for one order, each kept up to `cap` bytes; closes them in the end."""

    @abstractmethod
    async def _listen(self, port: int) -> socket.socket:
        """As `listen`; OSError where the box's system refuses."""

    @abstractmethod
    async def _kill(self, patience_s: float) -> None:
        """As `kill`; TimeoutError when some stay."""

    async def _run(self, order: Order, stdin: bytes, timeout_s: float, cap: int) -> ExecResult:
        async with self._turn:
            loop = asyncio.get_running_loop()
            begun, kills = loop.time(), self.oom_kills()
            limit_s = min(timeout_s, self._deadline - begun)
            if limit_s <= 0:
                raise SandboxError(f"the box's deadline of {self._spec.limits.deadline_s:g} s has passed")
            with self._started(order, stdin, cap) as command:
                code = await self._code(command, limit_s, kills)
                return ExecResult(
                    code=code,
                    stdout=command.stdout.finish(),
                    stderr=command.stderr.finish(),
                    timed_out=code is None,
                    truncated=command.stdout.truncated or command.stderr.truncated,
                    oom=self.oom_kills() > kills,
                    seconds=loop.time() - begun,
                )

    async def _code(self, command: Command, limit_s: float, kills: int) -> int | None:
        """The exit code; None after a timeout. Leaves no command running when it is cancelled."""
        try:
            async with asyncio.timeout(limit_s):
                return await command.code()
        except TimeoutError:
            await self.kill()
            return None
        except asyncio.CancelledError:
            with suppress(SandboxError):  # what stays ends with the box
                await self.kill()
            raise
        except BoxEnded:
            if self.oom_kills() > kills:
                return OOM_CODE
            raise


def _failure(result: ExecResult) -> str:
    """Why a file could not be moved, in words."""
    if result.timed_out:
        return f"not done within {result.seconds:.0f} s"
    if result.oom:
        return "out of memory"
    said = result.stderr.decode(errors="replace").strip()
    if not said and result.code is not None and 0 < result.code <= LAST_ERRNO:
        return os.strerror(result.code)
    return said or f"exit status {result.code}"
