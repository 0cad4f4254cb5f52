"""Runs the ordinary package clients, npm and pip or uv, and says in one line why one failed."""

import errno
import importlib.util
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

Progress = Callable[[str], None]

OLDEST_NPM = 9
LIMIT_S = 1200.0
HEARTBEAT_S = 15.0
FULL = re.compile(r"ENOSPC|EDQUOT|no space left on device|quota exceeded|os error 28", re.IGNORECASE)
UNREACHABLE = re.compile(
    r"ENOTFOUND|ECONNREFUSED|ETIMEDOUT|EAI_AGAIN|ECONNRESET|ENETUNREACH|EHOSTUNREACH|ERR_SOCKET_TIMEOUT"
    r"|NewConnectionError|Failed to establish a new connection|Name or service not known|Network is unreachable"
    r"|error sending request|dns error|Connection refused|Max retries exceeded|timed out|network connectivity",
    re.IGNORECASE,
)
MISMATCH = re.compile(r"EINTEGRITY|DO NOT MATCH THE HASHES|Hash mismatch", re.IGNORECASE)
CHATTER = re.compile(
    r"complete log of this run|log files were not written|^npm (error|ERR!)\s*$|^\[notice\]", re.IGNORECASE
)
BLAMES = re.compile(r"error|ERR!", re.IGNORECASE)


class FetchError(Exception):
    """A harness could not be fetched: one line for the user."""


class RegistryUnreachable(FetchError):
    """The package registry does not answer, which is nobody's mistake here."""


def run(argv: Sequence[str], *, step: str, folder: Path, progress: Progress) -> str:
    """Runs a client in `folder` and returns its standard output; FetchError when it fails."""
    start = time.monotonic()
    with subprocess.Popen(
        argv, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            output, errors = _wait(process, step, start, progress)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise explain(step, f"{output}\n{errors}", process.returncode)
    return output


def _wait(process: subprocess.Popen[str], step: str, start: float, progress: Progress) -> tuple[str, str]:
    while True:
        try:
            return process.communicate(timeout=HEARTBEAT_S)
        except subprocess.TimeoutExpired:
            seconds = time.monotonic() - start
            if seconds > LIMIT_S:
                raise FetchError(f"{step}: not done after {seconds:.0f} s") from None
            progress(f"{step}: {seconds:.0f} s")


def explain(step: str, output: str, code: int) -> FetchError:
    """One line from all that a failed client printed: its kind where we know it, and the line that blames."""
    for pattern, kind, error in (
        (FULL, "the disk is full", FetchError),
        (MISMATCH, "what the registry sent is not what is pinned", FetchError),
        (UNREACHABLE, "the package registry cannot be reached", RegistryUnreachable),
    ):
        found = [line for line in _lines(output) if pattern.search(line)]
        if found:
            return error(f"{step}: {kind}: {found[-1]}")
    return FetchError(f"{step} failed with exit status {code}: {blame(output)}")


def blame(output: str) -> str:
    """The last line that speaks of an error, or else the last line."""
    lines = _lines(output)
    return ([line for line in lines if BLAMES.search(line)] or lines or ["it printed nothing"])[-1]


def _lines(output: str) -> list[str]:
    return [line.strip() for line in output.splitlines() if line.strip() and not CHATTER.search(line.strip())]


def explain_os_error(step: str, error: OSError) -> str:
    """One line for what the operating system refused."""
    where = f" ({error.filename})" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{step}: the disk is full{where}"
    return f"{step}: {error.strerror or error}{where}"


def own_npm() -> tuple[str, ...] | None:
    """The npm of this machine, where there is one that reads today's lock files and runs at all."""
    found = shutil.which("npm")
    if found is None:
        return None
    version = subprocess.run([found, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    major = version.stdout.strip().partition(".")[0]
    if version.returncode != 0 or not major.isdigit() or int(major) < OLDEST_NPM:
        return None
    return (found,)


def npm_flags() -> tuple[str, ...]:
    """Nothing but the packages: no scripts of theirs, no reports, no long waits for a dead registry."""
    quiet = ("--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error", "--logs-max=0")
    return (*quiet, "--fetch-retries=2", "--fetch-retry-mintimeout=1000", "--fetch-retry-maxtimeout=5000")


def wheel_installer(target: Path, requirements: Path, python: str | None = None) -> tuple[str, ...]:
    """The command that unpacks hash-pinned wheels below `target`, with whichever client this Python has.

    The wheels are those for the version `python`, or for this one.
    """
    common = ("--no-deps", "--only-binary=:all:", "--require-hashes", "--target", str(target), "-r", str(requirements))
    if python is not None:
        common += ("--python-version", python)
    if importlib.util.find_spec("pip") is not None:
        quiet = ("--quiet", "--disable-pip-version-check", "--no-compile", "--no-input", "--retries=2")
        # pip compares what a wheel requires with its own Python, not with the one that is asked for.
        other = () if python is None else ("--ignore-requires-python",)
        return (sys.executable, "-m", "pip", "install", *quiet, *other, *common)
    uv = shutil.which("uv")
    if uv is not None:
        return (uv, "pip", "install", "--quiet", "--link-mode=copy", "--python", sys.executable, *common)
    raise FetchError("neither pip (of this Python) nor uv is there to fetch with: install one of them")
