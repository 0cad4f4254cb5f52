"""How a rank lets its driver see that it makes progress: a small file, written in place; imports no torch."""

import faulthandler
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

FILE_PATIENCE = 20.0
"""Commands that move whole models may take so many times longer without progress."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a rank last told."""

    count: int
    """Pieces of work it began."""
    due: float
    """When the next one is due, on the monotonic clock of the machine; inf while it waits for a command."""


class Watchdog:
    """Says where the driver can see it that a rank makes progress; ends a stuck one with its stacks in the log."""

    def __init__(self, shared: Path, rank: int, stall_s: float) -> None:
        self.stall_s, self.count = stall_s, 0
        self._file = os.open(_place(shared, rank), os.O_WRONLY | os.O_CREAT, 0o600)

    def mark(self, patience: float = 1.0) -> None:
        """The rank made progress and is to make more within `patience` times the stall time."""
        self.count += 1
        allowed = self.stall_s * patience
        self._write(time.monotonic() + allowed)
        faulthandler.dump_traceback_later(allowed, exit=True)

    def rest(self) -> None:
        """The rank waits for a command: however long."""
        self._write(math.inf)
        faulthandler.cancel_dump_traceback_later()

    def _write(self, deadline: float) -> None:
        os.pwrite(self._file, f"{self.count:12d} {deadline:24.3f}".encode(), 0)


def read(shared: Path, rank: int) -> Progress | None:
    """What a rank last told in this folder; None before its first word."""
    path = _place(shared, rank)
    words = path.read_text().split() if path.exists() else []
    return Progress(count=int(words[0]), due=float(words[1])) if len(words) == 2 else None


def _place(shared: Path, rank: int) -> Path:
    return shared / f"progress.{rank}"
