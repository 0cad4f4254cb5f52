"""Which sessions of a run stay on disk, for `python -m lego.replay`."""

import asyncio
import re
from dataclasses import dataclass
from pathlib import Path

from lego.capture.recording import record, write
from lego.capture.session import Session
from lego.chat.render import Renderer
from lego.records import Drift, KeepSessions, Outcome, Trajectory

ODD_DRIFT = frozenset({Drift.EDITED, Drift.REASONING_DROPPED, Drift.UNKNOWN})
ODD_ENDS = frozenset({Outcome.HARNESS_ERROR, Outcome.ENGINE_ERROR, Outcome.CONTEXT_EXCEEDED})


@dataclass(frozen=True, kw_only=True)
class Sessions:
    """A folder of session files."""

    folder: Path
    which: KeepSessions
    renderer: Renderer

    async def keep(self, session: Session, trajectory: Trajectory) -> str:
        """Writes the session if it is to be kept; returns the file's name, or nothing."""
        if not session.turns or self.which == "none" or (self.which == "odd" and not odd(trajectory)):
            return ""
        self.folder.mkdir(exist_ok=True)
        task = re.sub(r"[^\w.-]", "_", trajectory.task)[:80]
        name = f"{task}-{trajectory.attempt}-{session.uid}.npz"
        # Rows that failed a check are the evidence, and without them a replay would find nothing wrong.
        routing = any(fault.startswith("routing_") for fault in trajectory.fidelity.faults)
        await asyncio.to_thread(write, record(session, self.renderer), self.folder / name, routing=routing)
        return name


def odd(trajectory: Trajectory) -> bool:
    """Whether the proxy, the harness or the engine did something that wants a look."""
    drift = {Drift(name) for name in trajectory.fidelity.drift}
    return bool(trajectory.outcome in ODD_ENDS or trajectory.fidelity.faults or drift & ODD_DRIFT)
