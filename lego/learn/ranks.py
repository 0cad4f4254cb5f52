"""What the driver can tell of the trainer ranks from outside: how far each is, which one failed first, and why."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

from lego.errors import TrainerError, UsageError
from lego.learn import progress

LOG_LINES = 30
WATCHDOG = "Timeout ("
"""What a rank writes when it ends itself for lack of progress."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The files that `count` ranks write: progress in `shared`, output and the first failure in `logs`."""

    logs: Path
    shared: Path
    count: int
    stall_s: float

    def overdue(self) -> bool:
        """Whether a rank inside a command made no progress in its time."""
        return any(told.due < time.monotonic() for told in self._progress().values())

    def stuck(self) -> TrainerError:
        """The rank that is furthest behind; of those level with it, one that does not just wait for others."""
        counts = {rank: told.count for rank, told in self._progress().items()}
        level = [rank for rank, count in counts.items() if count == min(counts.values())]
        tails = {rank: self._tail(rank) for rank in level}
        rank = next((r for r in level if "/torch/" not in _innermost(tails[r])), level[0])
        return TrainerError(
            f"trainer rank {rank} failed: no progress in time (stall_s={self.stall_s:g})\n{tails[rank]}"
        )

    def failure(self, status: int | None, launcher: str) -> Exception:
        """What stopped the ranks: the first cause, and the last lines its rank wrote; or how the launcher ended."""
        path = self.logs / "failure.json"
        if not path.is_file():
            return TrainerError(f"the trainer's launcher ended with status {status}\n{launcher}")
        failure = json.loads(path.read_text())
        rank, what = failure["rank"], failure["what"]
        if WATCHDOG in self._tail(rank):
            return self.stuck()
        if what.startswith("UsageError: "):
            return UsageError(what.removeprefix("UsageError: ").rpartition(" (exit")[0])
        return TrainerError(f"trainer rank {rank} failed: {what}\n{self._tail(rank)}")

    def _progress(self) -> dict[int, progress.Progress]:
        """Of each rank that lives."""
        told = {rank: progress.read(self.shared, rank) for rank in range(self.count)}
        return {rank: found for rank, found in told.items() if found is not None}

    def _tail(self, rank: int) -> str:
        logs = sorted(self.logs.glob(f"*/attempt_0/{rank}/stderr.log"), key=lambda p: p.stat().st_mtime)
        text = logs[-1].read_text(errors="replace") if logs else ""
        return "\n".join(text.splitlines()[-LOG_LINES:])


def _innermost(tail: str) -> str:
    """The innermost frame of the last stack in a log, the main thread's; nothing if no stack was written."""
    _, found, stack = tail.rpartition("(most recent call first):\n")
    return stack.partition("\n")[0] if found else ""
