"""Runs inside the verdict's box, standard library only: lay the agent's changes, then run the hidden tests.

Reads one JSON object on standard input; its text is handed to `python -I -S -B -c`, so nothing of the
repository is on the path before the standard library and the test environment are.
"""

import base64
import json
import os
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

STARTED = "lego: tests start\n"
"""Written to standard error before any code of the agent can run."""


def lay(root: Path, change: dict[str, Any]) -> None:
    """Makes one path below `root` what the agent made it."""
    path = root / change["path"]
    if path.is_dir() and not path.is_symlink():
        if change["kind"] == "dir":
            return
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if change["kind"] == "deleted":
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    content = base64.b64decode(change["content"])
    if change["kind"] == "dir":
        path.mkdir()
    elif change["kind"] == "symlink":
        path.symlink_to(os.fsdecode(content))
    else:
        path.write_bytes(content)
        path.chmod(change["mode"])


def limit(kind: int, most: int) -> None:
    """Sets a limit of this process and its children; the hard one stays, so that its signal keeps its meaning."""
    resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


def main() -> int:
    """Exit status of pytest; the own limits turn endless loops and memory hogs into plain failures."""
    job = json.load(sys.stdin)
    for change in job["changes"]:
        lay(Path(job["root"]), change)
    limit(resource.RLIMIT_CPU, job["cpu_s"])
    limit(resource.RLIMIT_AS, job["memory_bytes"])
    limit(resource.RLIMIT_CORE, 0)
    sys.path += job["path"]
    import pytest

    os.write(2, STARTED.encode())
    return pytest.main(job["args"])


if __name__ == "__main__":
    sys.exit(main())
