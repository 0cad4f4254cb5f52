"""What a pinned program is made of: packages of npm and of the Python index, and where they lie in the cache."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from harnesses.base import HarnessNotFetched

LOCKS = Path(__file__).parent / "locks"
INTERPRETED = "any"


@dataclass(frozen=True, kw_only=True)
class NpmTarball:
    """One file of npm's registry, of which the members in `keep` are installed."""

    name: str
    version: str
    sha512: str
    """Hash of the file in the registry's own notation, base64."""
    keep: tuple[str, ...]
    """Paths inside the package and where each goes, as `FROM -> TO`."""
    machine: str = INTERPRETED


@dataclass(frozen=True, kw_only=True)
class NpmTree:
    """An npm package with all it depends on, as an npm lock file names and hashes them."""

    name: str
    version: str
    lock: str
    """Name of the lock file in `harnesses/locks`."""
    sha256: str
    """Hash of the lock file, in hexadecimal digits."""
    files_sha256: str
    """Hash over all installed files (`fetch.tree_digest`): npm leaves empty ones, with status 0, on a full disk."""
    drop: tuple[str, ...] = ()
    """Patterns of file names that no run reads."""
    machine: str = INTERPRETED


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """One package of the Python index, unpacked beside any environment."""

    name: str
    version: str
    sha256: str
    """Hash of the wheel, in hexadecimal digits."""
    keep: tuple[str, ...]
    """Folders and files that are kept, relative to the unpacked wheel."""
    machine: str = INTERPRETED


@dataclass(frozen=True, kw_only=True)
class HostPython:
    """An interpreter that is copied from the machine, as no registry has one."""

    name: str
    version: str
    """Major and minor."""
    machine: str = INTERPRETED


@dataclass(frozen=True, kw_only=True)
class WheelTree:
    """A package of the Python index with all that its runs import, as a lock file names and hashes their wheels."""

    name: str
    version: str
    lock: str
    """Name of the lock file in `harnesses/locks`."""
    sha256: str
    """Hash of the lock file, in hexadecimal digits."""
    python: HostPython
    """What the wheels are made for."""
    glibc: tuple[int, int]
    """The oldest C library that the wheels run with."""
    machine: str = INTERPRETED


Part = NpmTarball | NpmTree | Wheel | HostPython | WheelTree


@runtime_checkable
class Fetchable(Protocol):
    """What `fetch` must know of a harness."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def parts(self) -> tuple[Part, ...]:
        """All that must be in the cache; the last one is the program itself."""
        ...

    def starts(self, folders: Sequence[Path]) -> tuple[str, ...]:
        """The command that prints the version, from the folder of each part."""
        ...


def folder_of(part: Part, cache: Path) -> Path:
    """The part's folder: its name holds a digest of all pins, so what is there is what is pinned."""
    digest = hashlib.sha256(repr(part).encode()).hexdigest()[:12]
    label = part.name.rpartition("/")[2]
    return home_of(cache) / f"{label}-{part.version}-{digest}"


def record_of(harness: Fetchable, cache: Path) -> Path:
    """The file that says the harness is whole and was seen to start."""
    return home_of(cache) / f"{harness.name}-{harness.version}.json"


def home_of(cache: Path) -> Path:
    """The part of the cache that belongs to harnesses."""
    return cache.expanduser().absolute() / "harnesses"


def is_fetched(harness: Fetchable, cache: Path) -> bool:
    """Whether all parts are in the cache and the program was seen to start."""
    return record_of(harness, cache).is_file() and all(folder_of(part, cache).is_dir() for part in harness.parts)


def locate(harness: Fetchable, cache: Path) -> tuple[Path, ...]:
    """The folder of each part; HarnessNotFetched where one is missing."""
    if not is_fetched(harness, cache):
        raise HarnessNotFetched(
            f"harness {harness.name} {harness.version} is not in {cache}: "
            f"run `python -m harnesses.fetch {harness.name} --cache {cache}`"
        )
    return tuple(folder_of(part, cache) for part in harness.parts)
