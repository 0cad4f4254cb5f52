"""A running bubblewrap box, seen from the host: its commands and listener are asked of its first process."""

import asyncio
import marshal
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from sandbox.base import BoxSpec
from sandbox.cgroup import Cgroup
from sandbox.commands import Command, CommandBox, Get, Order, Put, Run
from sandbox.link import Link
from sandbox.pipes import Output, memory_file
from sandbox.rootfs import environment
from sandbox.state import BoxFolder


class BubbleBox(CommandBox):
    """A `Box`. It has no root."""

    users = ("agent",)

    def __init__(self, spec: BoxSpec, folder: BoxFolder, link: Link, cgroup: Cgroup) -> None:
        super().__init__(spec, folder)
        self._link, self.cgroup = link, cgroup

    def oom_kills(self) -> int:
        return self.cgroup.oom_kills()

    @contextmanager
    def _started(self, order: Order, stdin: bytes, cap: int) -> Iterator[Command]:
        with ExitStack() as undo:
            out, err = Output(cap), Output(cap)
            undo.callback(out.close)
            undo.callback(err.close)
            with memory_file(_words(order)) as request, memory_file(stdin) as source:
                reply = self._link.call("run", fds=(request, source, out.writer, err.writer))
            out.close_writer()
            err.close_writer()

            async def code() -> int:
                code = os.waitstatus_to_exitcode((await reply).status)
                return code if code >= 0 else 128 - code

            yield Command(stdout=out, stderr=err, code=code)

    async def _listen(self, port: int) -> socket.socket:
        reply = await self._link.call("listen", port)
        if reply.status != 0:
            raise OSError(reply.status, os.strerror(reply.status))
        return socket.socket(fileno=reply.fds[0])

    async def _kill(self, patience_s: float) -> None:
        async with asyncio.timeout(patience_s):
            await self._link.call("kill")


def _words(order: Order) -> bytes:
    """What `boxinit` does in a process of its own: an action and its arguments."""
    match order:
        case Run(argv=argv, env=env, cwd=cwd):
            return marshal.dumps(("run", [os.fsencode(word) for word in argv], environment(env), os.fsencode(cwd)))
        case Put(path=path, mode=mode):
            return marshal.dumps(("put", os.fsencode(path), mode))
        case Get(path=path, max_bytes=max_bytes):
            return marshal.dumps(("get", os.fsencode(path), max_bytes))
