"""Files and pipes between the host and a command: input from memory, output up to a cap."""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Iterator

CHUNK = 1 << 16
F_GETPIPE_SZ = 1032
NOBODY = 65534


@contextlib.contextmanager
def memory_file(content: bytes) -> Iterator[int]:
    """A file in memory that holds `content`, opened read-only: a program reads it at its own pace, nobody feeds it."""
    writable = os.memfd_create("lego")
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(writable, view) :]
        fd = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(writable)
    try:
        yield fd
    finally:
        os.close(fd)


def _pipe() -> tuple[int, int]:
    """Its ends. Programs may open it again by /proc/self/fd, but only to write: none takes out what another wrote.

    Where we are no root it stays theirs, so they can change that.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):  # root of a container that has no such user
            os.fchown(writer, NOBODY, NOBODY)
    os.fchmod(writer, 0o222)
    return reader, writer


class Output:
    """Collects one stream of a command. Above `cap` it goes on reading and drops, so that the writer never blocks.

    Reads from a new pipe, or from the non-blocking `reader` that it is given and closes in the end.
    """

    def __init__(self, cap: int, reader: int | None = None) -> None:
        self._left = cap
        self._chunks: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self.truncated = False
        self._reader, self.writer = _pipe() if reader is None else (reader, -1)
        os.set_blocking(self._reader, False)
        self._loop.add_reader(self._reader, self._read)

    def close_writer(self) -> None:
        """Closes our copy of the writing end, once the command has its own."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def close(self) -> None:
        """Stops reading; what the command's children write later is lost."""
        self.close_writer()
        if self._reader >= 0:
            self._loop.remove_reader(self._reader)
            os.close(self._reader)
            self._reader = -1

    def finish(self) -> bytes:
        """All that was written until now. Does not wait for children that keep the stream open."""
        # A child may write faster than we read: one full pipe is all that can have been written before the end.
        left = fcntl.fcntl(self._reader, F_GETPIPE_SZ) if self._reader >= 0 else 0
        while left > 0 and (size := self._read()):
            left -= size
        self.close()
        return b"".join(self._chunks)

    def _read(self) -> int:
        try:
            chunk = os.read(self._reader, CHUNK)
        except BlockingIOError:
            return 0
        if not chunk:
            self._loop.remove_reader(self._reader)
        kept = chunk[: self._left]
        self._left -= len(kept)
        self.truncated |= len(kept) < len(chunk)
        if kept:
            self._chunks.append(kept)
        return len(chunk)
