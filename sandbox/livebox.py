"""A running bubblewrap box, seen from the host: commands, files, a listener, and what was changed."""

import asyncio
import errno
import marshal
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal

from sandbox.base import BoxSpec, Change, ExecResult, SandboxError
from sandbox.cgroup import Cgroup
from sandbox.link import BoxEnded, Link, Reply
from sandbox.pipes import Output, memory_file
from sandbox.rootfs import environment
from sandbox.state import BoxFolder
from sandbox.upper import read_changes

KILL_S = 20.0
FILE_S = 120.0
MESSAGE_BYTES = 4096
LAST_ERRNO = 124
OOM_CODE = 128 + signal.SIGKILL


Request = (
    tuple[Literal["run"], list[bytes], dict[bytes, bytes], bytes]
    | tuple[Literal["put"], bytes, int]
    | tuple[Literal["get"], bytes, int]
)
"""What `boxinit` is asked to do in a process of its own: an action and its arguments."""


class BubbleBox:
    """A `Box`. Commands queue up: one at a time."""

    def __init__(self, spec: BoxSpec, folder: BoxFolder, link: Link, cgroup: Cgroup) -> None:
        self._spec, self._folder, self._link, self.cgroup = spec, folder, link, cgroup
        self._turn = asyncio.Lock()
        self._deadline = asyncio.get_running_loop().time() + spec.limits.deadline_s

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: bytes = b"",
        timeout_s: float = 600.0,
        max_output: int = 1 << 20,
    ) -> ExecResult:
        """Runs `argv`; `max_output` holds for each stream, and `code` is 128 + N for a program that signal N ended.

        A timeout kills all processes of the box, also those that earlier commands left behind.
        """
        if not argv or any("\0" in word for word in argv):
            raise ValueError(f"argv={argv!r}: want at least a program, and no NUL in a word")
        words = [os.fsencode(word) for word in argv]
        request: Request = ("run", words, environment(env), os.fsencode(cwd or self._spec.workdir))
        return await self._run(request, stdin, timeout_s, max_output)

    async def put(self, path: Path, content: bytes, mode: int = 0o644) -> None:
        """Writes a file in one step; a link or folder of that name is replaced, not followed."""
        if not path.is_absolute():
            raise ValueError(f"path={path}: want an absolute path of the box")
        result = await self._run(("put", os.fsencode(path), mode), content, FILE_S, MESSAGE_BYTES)
        if result.code != 0:
            raise SandboxError(f"cannot write {path} in the box: {_reason(result)}")

    async def get(self, path: Path, max_bytes: int = 1 << 24) -> bytes:
        """The bytes of a regular file; FileNotFoundError where the box shows no such file that it may read."""
        result = await self._run(("get", os.fsencode(path), max_bytes), b"", FILE_S, max_bytes)
        if result.code == errno.EFBIG or result.truncated:
            raise ValueError(f"{path} in the box is larger than {max_bytes} bytes")
        if result.code is None or result.code > LAST_ERRNO:
            raise SandboxError(f"cannot read {path} in the box: {_reason(result)}")
        if result.code != 0:
            raise FileNotFoundError(result.code, f"no file to read in the box: {_reason(result)}", str(path))
        return result.stdout

    async def listen(self, port: int) -> socket.socket:
        """A listening socket on 127.0.0.1:`port` of the box's own network; the caller closes it."""
        if not 1024 <= port <= 65535:
            raise ValueError(f"port={port}: want 1024 to 65535")
        reply = await self._link.call("listen", port)
        if reply.status != 0:
            raise SandboxError(f"port={port} in the box: {os.strerror(reply.status)}")
        return socket.socket(fileno=reply.fds[0])

    async def kill(self) -> None:
        """Kills every process but the box's own first one, and waits until they are gone."""
        try:
            async with asyncio.timeout(KILL_S):
                await self._link.call("kill")
        except TimeoutError as error:
            raise SandboxError(f"processes of the box did not end within {KILL_S:g} s of being killed") from error

    async def changes(self, max_bytes: int = 1 << 24) -> tuple[Change, ...]:
        """What differs from `base`; TooLarge (a ValueError) above `max_bytes`. `kill` first for a still picture."""
        return await asyncio.to_thread(read_changes, self._folder.upper, self._spec.base, max_bytes)

    async def _run(self, request: Request, stdin: bytes, timeout_s: float, cap: int) -> ExecResult:
        async with self._turn:
            loop = asyncio.get_running_loop()
            begun, kills = loop.time(), self.cgroup.oom_kills()
            limit_s = min(timeout_s, self._deadline - begun)
            if limit_s <= 0:
                raise SandboxError(f"the box's deadline of {self._spec.limits.deadline_s:g} s has passed")
            with ExitStack() as open_files:
                out, err = Output(cap), Output(cap)
                open_files.callback(out.close)
                open_files.callback(err.close)
                code = await self._status(self._start(request, stdin, out, err), limit_s, kills)
                return ExecResult(
                    code=code,
                    stdout=out.finish(),
                    stderr=err.finish(),
                    timed_out=code is None,
                    truncated=out.truncated or err.truncated,
                    oom=self.cgroup.oom_kills() > kills,
                    seconds=loop.time() - begun,
                )

    def _start(self, request: Request, stdin: bytes, out: Output, err: Output) -> asyncio.Future[Reply]:
        """Hands the command and its streams to the box."""
        with memory_file(marshal.dumps(request)) as order, memory_file(stdin) as source:
            reply = self._link.call("run", fds=(order, source, out.writer, err.writer))
        out.close_writer()
        err.close_writer()
        return reply

    async def _status(self, reply: asyncio.Future[Reply], limit_s: float, kills: int) -> int | None:
        """The exit code; None after a timeout. Leaves no command running when it is cancelled."""
        try:
            async with asyncio.timeout(limit_s):
                code = os.waitstatus_to_exitcode((await reply).status)
                return code if code >= 0 else 128 - code
        except TimeoutError:
            await self.kill()
            return None
        except asyncio.CancelledError:
            with suppress(BoxEnded):
                self._link.call("kill")
            raise
        except BoxEnded:
            if self.cgroup.oom_kills() > kills:
                return OOM_CODE
            raise


def _reason(result: ExecResult) -> str:
    """Why a file could not be moved, in words."""
    if result.timed_out:
        return f"not done within {result.seconds:.0f} s"
    if result.oom:
        return "out of memory"
    if result.code is not None and result.code <= LAST_ERRNO:
        return os.strerror(result.code)
    return result.stderr.decode(errors="replace").strip() or f"exit status {result.code}"
