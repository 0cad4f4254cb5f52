"""The seam between a container box and its engine: what Podman and Docker both do, in few calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sandbox.base import Limits, Progress, User

OWNER_LABEL, BOX_LABEL = "lego.owner", "lego.box"
"""What every container of ours carries: `this_owner` of its process, and the name of its box's folder."""
AGENT_ID = 1000
KEEPER_ID = 65532
"""Uid and gid of a container's first process: root without capabilities cannot signal it, and agents neither."""


@dataclass(frozen=True, kw_only=True)
class Bind:
    """A host path shown in the container."""

    source: Path
    target: Path
    writable: bool = False


@dataclass(frozen=True, kw_only=True)
class Tmpfs:
    """A private memory file system, where programs may also be run from."""

    target: Path
    size_mib: int
    mode: int = 0o1777


@dataclass(frozen=True, kw_only=True)
class Overlay:
    """A folder shown at `target` under a writable layer of its own, mounted by the engine: only for an engine whose
    `mounts_overlay` is set."""

    lower: Path
    upper: Path
    work: Path
    target: Path


@dataclass(frozen=True, kw_only=True)
class Container:
    """All that an engine is told about one container. What every one has (no network, no capabilities, an init that
    reaps, a read-only root, no privileges gained by setuid, `argv` run as KEEPER_ID) is the engine's to add."""

    name: str
    image: str
    argv: Sequence[str]
    env: Mapping[str, str]
    binds: tuple[Bind, ...]
    overlay: Overlay | None
    tmpfs: tuple[Tmpfs, ...]
    limits: Limits
    labels: Mapping[str, str]
    runtime: str | None
    """OCI runtime: runc, crun, runsc; None for the engine's default."""


@dataclass(frozen=True, kw_only=True)
class Exec:
    """A command in a running container, detached: its streams are redirected by its own shell."""

    argv: Sequence[str]
    env: Mapping[str, str]
    user: User


@dataclass(frozen=True, kw_only=True)
class ExecState:
    """A command as the engine sees it: `code` is None while it runs, and `pid` is the host's number for it."""

    code: int | None
    pid: int


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A container of ours, running or not."""

    id: str
    labels: Mapping[str, str]


class Engine(Protocol):
    """An open connection. Every method raises SandboxError with the engine's own words."""

    @property
    def command(self) -> str:
        """How people reach the same store at a shell, such as `docker -H unix:///run/docker.sock`; for messages."""
        ...

    @property
    def first_id(self) -> int | None:
        """The host's id of a container's uid and gid 0: 0 where it is the host's own root, None where we are no root,
        and uid 1000 of a container is we ourselves."""
        ...

    @property
    def mounts_overlay(self) -> bool:
        """Whether a `Container.overlay` is the engine's to mount, as for an ordinary user who may not."""
        ...

    async def create(self, container: Container) -> str:
        """Its id. Nothing is pulled."""
        ...

    async def start(self, container: str) -> int:
        """The host's pid of the container's first process."""
        ...

    async def exec(self, container: str, command: Exec) -> str:
        """Starts it and returns at once with an id to ask about."""
        ...

    async def state(self, exec_id: str) -> ExecState: ...

    async def remove(self, container: str) -> None:
        """Kills and removes; quiet where there is none."""
        ...

    async def delete(self, path: Path) -> None:
        """Removes a host folder that a container has had, also where files in it are of users that are not ours."""
        ...

    async def listed(self, label: str) -> list[Listed]:
        """Containers that carry this label, whatever its value."""
        ...

    async def image_id(self, name: str) -> str | None:
        """The digest of an image in the store; None where it is not."""
        ...

    async def pull(self, reference: str, progress: Progress) -> None: ...

    async def load(self, tar: Path, name: str) -> None:
        """Imports a root file system from a tar file as an image."""
        ...

    async def build(self, tar: Path, dockerfile: Path, name: str, *, network: bool, progress: Progress) -> None:
        """Builds from a tar file of the context; RUN steps reach out only with `network`. Nothing but what is named
        in FROM may be pulled. The error of a failed build holds its last lines."""
        ...

    async def archive(self, container: str, path: Path, tar: Path) -> None:
        """Writes a folder of a container, running or not, to a tar file; the folder itself is its first member."""
        ...
