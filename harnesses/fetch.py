"""Installs pinned harnesses into a cache: `python -m harnesses.fetch codex pi`.

Each part is unpacked beside its place, checked against its pinned hash and renamed; so a folder that is there is whole.
"""

import argparse
import base64
import fcntl
import fnmatch
import hashlib
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from harnesses import clients, node, python
from harnesses.clients import FetchError, Progress
from harnesses.known import KNOWN
from harnesses.packages import (
    INTERPRETED,
    LOCKS,
    Fetchable,
    HostPython,
    NpmTarball,
    NpmTree,
    Part,
    Wheel,
    WheelTree,
    folder_of,
    home_of,
    is_fetched,
    record_of,
)

log = logging.getLogger(__name__)
DEFAULT_CACHE = Path("~/.cache/lego")
PARTIAL = ".partial-"
START_LIMIT_S = 120.0
FULL_BYTES = 4 << 20


def fetch(harness: Fetchable, cache: Path, progress: Progress = log.info) -> Path:
    """The folder of the installed program; FetchError where it cannot be had. Instant when it is there."""
    if not is_fetched(harness, cache):
        try:
            with _alone(home_of(cache), progress):
                if not is_fetched(harness, cache):
                    _fetch(harness, cache, progress)
        except OSError as error:
            raise FetchError(clients.explain_os_error(f"{harness.name} into {cache}", error)) from error
    return folder_of(harness.parts[-1], cache)


def _fetch(harness: Fetchable, cache: Path, progress: Progress) -> None:
    start = time.monotonic()
    folders = [_installed(part, cache, progress) for part in harness.parts]
    says = _started(harness, folders)
    size = sum(file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file())
    record = {
        "name": harness.name,
        "version": harness.version,
        "says": says,
        "bytes": size,
        "parts": {folder.name: _pin(part, folder) for folder, part in zip(folders, harness.parts, strict=True)},
    }
    with _partial(home_of(cache)) as partial:
        (partial / "record").write_text(json.dumps(record, indent=2) + "\n")
        (partial / "record").replace(record_of(harness, cache))
    progress(f"{harness.name} {harness.version}: {size / 1e6:.0f} MB, {time.monotonic() - start:.1f} s")


@contextmanager
def _alone(home: Path, progress: Progress) -> Iterator[None]:
    """One fetch at a time in this cache; what a killed one left behind goes first."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another fetch into {home}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        for left in home.glob(f"{PARTIAL}*"):
            shutil.rmtree(left)
        yield


@contextmanager
def _partial(home: Path) -> Iterator[Path]:
    """A folder on the cache's disk that is gone afterwards, however the work in it ends."""
    folder = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=home))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _installed(part: Part, cache: Path, progress: Progress) -> Path:
    """The folder of a part, which is fetched where it is missing."""
    folder = folder_of(part, cache)
    if folder.is_dir():
        return folder
    if part.machine not in (INTERPRETED, platform.machine()):
        raise FetchError(
            f"{part.name} {part.version} is pinned for {part.machine}, this machine is {platform.machine()}"
        )
    progress(f"fetching {part.name} {part.version}")
    with _partial(home_of(cache)) as partial:
        ready = partial / "ready"
        ready.mkdir()
        match part:
            case NpmTarball():
                _install_tarball(part, partial, ready, _npm(cache, progress), progress)
            case NpmTree():
                _install_tree(part, ready, _npm(cache, progress), progress)
            case Wheel():
                _install_wheel(part, partial, ready, progress)
            case HostPython():
                python.install(part, ready, progress)
            case WheelTree():
                _install_wheels(part, ready, _installed(part.python, cache, progress), progress)
        ready.replace(folder)
    return folder


def _npm(cache: Path, progress: Progress) -> tuple[str, ...]:
    return clients.own_npm() or node.npm(_installed(node.NODE, cache, progress))


def _install_tarball(part: NpmTarball, partial: Path, ready: Path, npm: tuple[str, ...], progress: Progress) -> None:
    spec = f"{part.name}@{part.version}"
    flags = ("--pack-destination", str(partial), *clients.npm_flags())
    clients.run((*npm, "pack", spec, *flags), step=f"npm pack {spec}", folder=partial, progress=progress)
    files = list(partial.glob("*.tgz"))
    if len(files) != 1:
        raise FetchError(f"npm pack {spec}: expected one tarball, got {len(files)}")
    found = base64.b64encode(_digest(files[0], "sha512")).decode()
    if found != part.sha512:
        raise FetchError(f"npm pack {spec}: what the registry sent is not what is pinned: sha512-{found}")
    _unpack(files[0], part.keep, ready, spec)


def _unpack(tarball: Path, keep: Sequence[str], ready: Path, spec: str) -> None:
    """Writes the kept members, all regular files, and refuses a tarball that lacks one."""
    wanted = dict(rule.split(" -> ") for rule in keep)
    with tarfile.open(tarball) as archive:
        for member in archive:
            target = wanted.pop(member.name.partition("/")[2], None)
            content = archive.extractfile(member) if target else None
            if target is None or content is None:
                continue
            path = ready / target
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                shutil.copyfileobj(content, file, 1 << 20)
            path.chmod(0o755 if member.mode & 0o100 else 0o644)
    if wanted:
        raise FetchError(f"npm pack {spec}: {', '.join(wanted)} is not in the package")


def _install_tree(part: NpmTree, ready: Path, npm: tuple[str, ...], progress: Progress) -> None:
    lock = _lock(part)
    (ready / "package-lock.json").write_bytes(lock)
    (ready / "package.json").write_text(json.dumps({**json.loads(lock)["packages"][""], "private": True}))
    step = f"npm ci of {part.name}@{part.version}"
    flags = ("--omit=optional", "--omit=dev", *clients.npm_flags())
    clients.run((*npm, "ci", *flags), step=step, folder=ready, progress=progress)
    full = shutil.disk_usage(ready).free < FULL_BYTES
    (ready / "node_modules/.package-lock.json").unlink(missing_ok=True)
    for file in ready.rglob("*"):
        if any(fnmatch.fnmatch(file.name, pattern) for pattern in part.drop) and not file.is_dir():
            file.unlink()
    found = tree_digest(ready / "node_modules")
    if found != part.files_sha256:
        reason = "the disk is full" if full else f"the installed files are not the pinned ones: sha256 {found}"
        raise FetchError(f"{step}: {reason}")


def _lock(part: NpmTree | WheelTree) -> bytes:
    """The part's lock file; FetchError where it is not the pinned one."""
    lock = (LOCKS / part.lock).read_bytes()
    if hashlib.sha256(lock).hexdigest() != part.sha256:
        raise FetchError(f"{LOCKS / part.lock}: was changed, its hash is not the pinned one")
    return lock


def tree_digest(folder: Path) -> str:
    """SHA-256 over the names and contents of all regular files below `folder`."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()):
        digest.update(f"{file.relative_to(folder)}\0".encode())
        digest.update(_digest(file, "sha256"))
    return digest.hexdigest()


def _install_wheel(part: Wheel, partial: Path, ready: Path, progress: Progress) -> None:
    requirements, unpacked = partial / "requirements.txt", partial / "unpacked"
    requirements.write_text(f"{part.name}=={part.version} --hash=sha256:{part.sha256}\n")
    step = f"install of the wheel {part.name} {part.version}"
    argv = clients.wheel_installer(unpacked, requirements)
    clients.run(argv, step=step, folder=partial, progress=progress)
    for kept in part.keep:
        if not (unpacked / kept).exists():
            raise FetchError(f"{step}: {kept} is not in the wheel")
        (ready / kept).parent.mkdir(parents=True, exist_ok=True)
        (unpacked / kept).replace(ready / kept)


def _install_wheels(part: WheelTree, ready: Path, interpreter: Path, progress: Progress) -> None:
    _lock(part)
    kind, version = platform.libc_ver()
    if kind != "glibc" or tuple(map(int, version.split("."))) < part.glibc:
        wanted = ".".join(map(str, part.glibc))
        raise FetchError(
            f"{part.name} {part.version} needs the C library glibc {wanted} or newer, this machine has {kind} {version}"
        )
    step = f"install of {part.name}=={part.version}"
    argv = clients.wheel_installer(ready, LOCKS / part.lock, part.python.version)
    clients.run(argv, step=step, folder=ready, progress=progress)
    # Their first lines name the interpreter that installed them.
    shutil.rmtree(ready / "bin", ignore_errors=True)
    python.compile_all(interpreter, ready, step=part.name, progress=progress)


def _started(harness: Fetchable, folders: Sequence[Path]) -> str:
    """What the program answers when asked for its version; FetchError when that is not the pinned one."""
    argv = harness.starts(folders)
    with tempfile.TemporaryDirectory() as home:
        try:
            result = subprocess.run(
                argv,
                cwd=home,
                env={"HOME": home, "PATH": os.defpath},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=START_LIMIT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise FetchError(f"{harness.name} was fetched but does not start: {error}") from error
    lines = [line for line in (result.stdout + result.stderr).splitlines() if harness.version in line.split()]
    if result.returncode != 0 or not lines:
        line = clients.blame(f"{result.stdout}\n{result.stderr}")
        raise FetchError(f"{harness.name} was fetched but does not answer as {harness.version}: {line}")
    return lines[0]


def _digest(file: Path, kind: str) -> bytes:
    with file.open("rb") as content:
        return hashlib.file_digest(content, kind).digest()


def _pin(part: Part, folder: Path) -> str:
    match part:
        case NpmTarball():
            return f"sha512-{part.sha512}"
        case HostPython():
            return (folder / python.ORIGIN).read_text().strip()
        case _:
            return f"sha256:{part.sha256}"


def main(argv: Sequence[str]) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m harnesses.fetch", description="Installs pinned harnesses into a cache."
    )
    parser.add_argument("names", nargs="+", choices=sorted(KNOWN), metavar="NAME", help=f"one of {', '.join(KNOWN)}")
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="where it goes (default: %(default)s)")
    options = parser.parse_args(argv)
    try:
        for name in options.names:
            folder = fetch(KNOWN[name](), options.cache)
            log.info("%s is in %s", name, folder)
    except FetchError as error:
        log.error("error: %s", error)
        return 2
    except KeyboardInterrupt:
        log.error("interrupted: what was not complete is removed")
        return 130
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sys.exit(main(sys.argv[1:]))
