"""The ids of a path, kept once however many turns it has."""

import numpy as np

from lego.records import Ids


def common(a: Ids, b: Ids) -> int:
    """How many ids both begin with."""
    n = min(len(a), len(b))
    unlike = np.flatnonzero(a[:n] != b[:n])
    return int(unlike[0]) if len(unlike) else n


class Tape:
    """A growing array: turns hold views of it, so that a longer prompt costs only what is new."""

    def __init__(self, ids: Ids) -> None:
        self._buffer = np.array(ids, np.int32)
        self._filled = len(ids)

    def grown(self, start: int, ids: Ids) -> tuple["Tape", Ids]:
        """The first `start` ids and then these, read-only; on a copy if something else lies there already."""
        tape = self if self._filled == start else Tape(self._buffer[:start])
        stop = start + len(ids)
        tape._reserve(stop)
        tape._buffer[start:stop] = ids
        tape._filled = stop
        return tape, tape.view()

    def view(self) -> Ids:
        """All ids, read-only."""
        ids = self._buffer[: self._filled]
        ids.flags.writeable = False
        return ids

    def _reserve(self, size: int) -> None:
        if size > len(self._buffer):
            larger = np.empty(max(size, 2 * len(self._buffer)), np.int32)
            larger[: self._filled] = self._buffer[: self._filled]
            self._buffer = larger
