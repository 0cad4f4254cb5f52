"""Starts the trainer ranks under torch's elastic agent: `python -m lego.learn.launch NPROC LOGS SETTINGS.json`.

One machine, loopback only, no restarts. If a rank fails, LOGS/failure.json names the rank that failed first
and this ends with status 1.
"""

import json
import os
import signal
import sys
import uuid
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

SHUTDOWN_S = 5
LOST_PEER = ("onnection closed by peer", "onnection reset by peer", "Timed out waiting")
"""How a rank sounds that lost another one: it did not fail first."""


def first_cause(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The rank that failed first: a killed one, then one with an error of its own, then by time (in seconds)."""

    def order(rank: int) -> tuple[bool, bool, int]:
        failure = failures[rank]
        killed = failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM
        return not killed, any(sign in _message(failure) for sign in LOST_PEER), failure.timestamp

    rank = min(failures, key=order)
    return rank, failures[rank]


def describe(failure: ProcessFailure) -> str:
    """One line: the exception, the signal, or the exit status."""
    if failure.exitcode < 0:
        return f"killed by {signal.Signals(-failure.exitcode).name}"
    return f"{_message(failure)} (exit status {failure.exitcode})"


def _message(failure: ProcessFailure) -> str:
    """The exception a rank recorded, or that it recorded none."""
    data = failure.error_file_data.get("message") if failure.error_file_data else None
    return str(data["message"]) if isinstance(data, dict) else "it ended without an exception"


def main() -> int:
    """Runs the ranks to their end."""
    ranks, logs, settings = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex[:8],
        role="trainer",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=SHUTDOWN_S,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "lego.learn.worker", settings)
    except ChildFailedError as error:
        rank, failure = first_cause({int(r): f for r, f in error.failures.items()})
        (logs / "failure.json").write_text(json.dumps({"rank": rank, "what": describe(failure)}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
