"""Runs inside the verdict's box, standard library only: lay the agent's changes, then run the hidden tests.

Reads one JSON object on standard input; its text is handed to `python -I -S -B -c`, so nothing of the
repository is on the path before the standard library and the test environment are. Standard output becomes
the witness's stream to the host; the tests' own output goes to standard error.
"""

import base64
import json
import os
import resource
import shutil
import sys
from pathlib import Path
from typing import Any


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


def streams() -> int:
    """The stream to the host, closed to programs that the tests start; 0 and 1 lead nowhere and to standard error."""
    stream = os.dup(1)
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(nothing, 0)
    os.close(nothing)
    return stream


def main() -> None:
    """Runs pytest under own limits, which turn endless loops and memory hogs into plain failures; never returns."""
    job = json.load(sys.stdin)
    stream = streams()
    for change in job["changes"]:
        lay(Path(job["root"]), change)
    limit(resource.RLIMIT_CPU, job["cpu_s"])
    limit(resource.RLIMIT_AS, job["memory_bytes"])
    limit(resource.RLIMIT_CORE, 0)
    sys.path += job["path"]
    import pytest

    here: dict[str, Any] = {"__name__": "witness"}
    exec(compile(job["witness"], "witness", "exec"), here)
    end, flushes = os._exit, (sys.stdout.flush, sys.stderr.flush)
    # Made here and told in the first line: what comes in by standard input may stay readable to the agent's code.
    nonce, canary = os.urandom(16).hex(), f"test_{os.urandom(4).hex()}"
    witness = here["Witness"](stream, nonce, canary, job["test_path"], twin=job["twin"])
    status = int(pytest.main(job["args"], plugins=[witness]))
    witness.say("finish", status)
    for flush in flushes:
        flush()
    end(status)  # handlers that the agent's code left for the end do not run


if __name__ == "__main__":
    main()
