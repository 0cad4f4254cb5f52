"""What making images needs of the host: files that leave no trace, the tar program, and one at a time."""

import asyncio
import fcntl
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import IO

from sandbox.base import SandboxError
from sandbox.state import private_folder, usual_folder

SPOOL = Path("/var/tmp")
"""For tar files, which may be larger than memory."""
TURN_S = 0.1


@contextmanager
def spool() -> Iterator[tuple[IO[bytes], Path]]:
    """A file without a name, which goes with this process, and a path by which another open reaches it."""
    with tempfile.TemporaryFile(dir=SPOOL) as file:
        yield file, Path(f"/proc/self/fd/{file.fileno()}")


async def tar(
    *arguments: str, stdin: IO[bytes] | int = subprocess.DEVNULL, stdout: IO[bytes] | int = subprocess.DEVNULL
) -> None:
    """Runs it; SandboxError with its own words when it fails. It does not outlive a cancelled wait."""
    program = shutil.which("tar")
    if program is None:
        raise SandboxError("tar is missing: apt-get install tar")
    process = await asyncio.create_subprocess_exec(
        program, *arguments, stdin=stdin, stdout=stdout, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        _, complaint = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise SandboxError(f"tar {' '.join(arguments)}: {complaint.decode(errors='replace').strip()[-500:]}")


@asynccontextmanager
async def alone(key: str) -> AsyncIterator[None]:
    """One at a time for a key, in all processes of this user; the lock goes with the process."""
    folder = private_folder(usual_folder("images"))
    with (folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.lock").open("w") as lock:
        while not _locked(lock):  # noqa: ASYNC110 - another process cannot set an event of ours
            await asyncio.sleep(TURN_S)
        yield


def _locked(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
