"""The host's end of the socket to a box's first process: numbered requests, and the replies that come back."""

import asyncio
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from sandbox.commands import BoxEnded

INT = struct.Struct("i")
CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class Reply:
    """What the box answered: a number, perhaps an open file, and the sender's pid as this host sees it."""

    status: int
    fds: tuple[int, ...]
    pid: int


def pair() -> tuple[socket.socket, socket.socket]:
    """The host's end, and the end for the box."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # The kernel vouches for the sender's pid, translated out of the box's own pid namespace; only for messages that
    # are sent after this, so it comes before anything can send.
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    return ours, theirs


class Link:
    """Talks over the host's end of a `pair`, in one event loop. `close` fails what still waits."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._serial = 0
        self.lost = False
        """Whether the box closed its end first."""
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self.ready = self._expect(0)
        sock.setblocking(False)
        self._loop.add_reader(sock, self._receive)

    def call(self, verb: str, *words: int, fds: Sequence[int] = ()) -> asyncio.Future[Reply]:
        """Sends a request now; await what it returns for the reply. Raises BoxEnded."""
        self._serial += 1
        text = " ".join([verb, str(self._serial), *map(str, words)]).encode()
        rights = b"".join(map(INT.pack, fds))
        try:
            self._sock.sendmsg([text], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if fds else [])
        except OSError as error:
            raise BoxEnded(f"the box is gone: {error.strerror}") from error
        return self._expect(self._serial)

    def close(self) -> None:
        """Closes the socket, on which the box ends itself."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._sock.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(BoxEnded("the box has ended"))
                future.exception()  # nobody may be waiting any more
        self._waiting.clear()

    def _expect(self, request: int) -> asyncio.Future[Reply]:
        future: asyncio.Future[Reply] = self._loop.create_future()
        self._waiting[request] = future
        return future

    def _receive(self) -> None:
        space = socket.CMSG_SPACE(INT.size) + socket.CMSG_SPACE(CREDENTIALS.size)
        try:
            data, ancillary, _, _ = self._sock.recvmsg(64, space, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data, ancillary = b"", []
        if not data:
            self.lost = True
            self.close()
            return
        self._deliver(data, ancillary)

    def _deliver(self, data: bytes, ancillary: list[tuple[int, int, bytes]]) -> None:
        by_type = {kind: content for _, kind, content in ancillary}
        rights = by_type.get(socket.SCM_RIGHTS, b"")
        fds = tuple(fd for (fd,) in INT.iter_unpack(rights[: len(rights) // INT.size * INT.size]))
        pid = CREDENTIALS.unpack(by_type[socket.SCM_CREDENTIALS])[0]
        request, status = map(int, data.split())
        future = self._waiting.pop(request, None)
        if future is None or future.done():
            for fd in fds:
                socket.close(fd)
            return
        future.set_result(Reply(status=status, fds=fds, pid=pid))
