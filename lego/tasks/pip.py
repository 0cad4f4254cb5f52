"""The package index, by pip alone: pinned packages into a folder, checked by hash; one line when it cannot be."""

import asyncio
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from lego.errors import UsageError

WAIT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Pin:
    """One file of the index."""

    name: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


async def install(pins: Sequence[Pin], into: Path) -> None:
    """Installs wheels into a folder of their own; nothing is compiled."""
    await _pip(["install", "--no-compile", "--only-binary", ":all:", "--target", str(into)], pins)


async def download_sources(pins: Sequence[Pin], into: Path, backends: Path) -> None:
    """Downloads source archives; pip asks each for its name, with the build backends found in `backends`."""
    options = ["--no-binary", ":all:", "--no-build-isolation", "--dest", str(into)]
    await _pip(["download", *options], pins, {"PYTHONPATH": str(backends)})


async def _pip(options: Sequence[str], pins: Sequence[Pin], env: dict[str, str] | None = None) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as wanted, tempfile.TemporaryFile() as errors:
        wanted.write("".join(f"{pin} --hash=sha256:{pin.sha256}\n" for pin in pins))
        wanted.flush()
        common = ["--quiet", "--no-input", "--disable-pip-version-check", "--retries", "2", "--no-deps"]
        words = [options[0], *common, "--require-hashes", "--requirement", wanted.name, *options[1:]]
        try:
            async with asyncio.timeout(WAIT_S):
                code = await _run([*_program(), *words], {**os.environ, **(env or {})}, errors)
        except TimeoutError as error:
            raise UsageError(f"the package index did not deliver {_list(pins)} within {WAIT_S:g} s") from error
        if code != 0:
            errors.seek(0)
            cause = _cause(errors.read().decode(errors="replace"))
            raise UsageError(f"cannot get {_list(pins)} from the package index: {cause}")


async def _run(argv: Sequence[str], env: Mapping[str, str], errors: IO[bytes]) -> int:
    """Exit status. Files instead of pipes: a cancelled wait would hang on a pipe that nobody reads."""
    null = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=null, stdout=null, stderr=errors, env=env, start_new_session=True
    )
    try:
        return await process.wait()
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def _program() -> list[str]:
    """Our environment's pip, or the one on the path: environments made by uv have none."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if (found := shutil.which("pip")) is not None:
        return [found]
    raise UsageError(f"the demo's packages are fetched by pip, which {sys.executable} lacks: install pip there")


def _cause(errors: str) -> str:
    """The most telling line of pip's complaint."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    if any("No space left on device" in line for line in lines):
        return "no space left on the disk"
    told = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    mismatch = [line for line in told if "HASHES" in line]
    return (mismatch or told or lines or ["pip said nothing"])[0]


def _list(pins: Iterable[Pin]) -> str:
    return ", ".join(str(pin) for pin in pins)
