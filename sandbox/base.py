"""The sandbox seam: a `Sandbox` spec opens a `Box`, a place that runs commands and reaches nothing.

bubblewrap, Podman and Docker fit it, and Kubernetes shall; nothing here knows any of them.
"""

import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol


class SandboxError(Exception):
    """The place failed, not the program in it: never a reward."""


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A host folder or file shown read-only in the box at `target`."""

    source: Path
    target: Path


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one box may use; `Capabilities` says which of these this host enforces."""

    memory_gib: float = 2.0
    """Memory of all processes of the box together."""
    pids: int = 256
    """Processes and threads alive at once."""
    cpus: float = 2.0
    """Cores' worth of CPU time."""
    disk_mib: int = 512
    """Size of the writable workspace layer, and of /tmp and HOME each."""
    deadline_s: float = 900.0
    """The box kills itself after this time, even when nobody watches it any more."""


@dataclass(frozen=True, kw_only=True)
class FolderImage:
    """An unpacked root file system on this host."""

    path: Path


@dataclass(frozen=True, kw_only=True)
class StoredImage:
    """An image in the engine's own store, by name or id; never fetched."""

    name: str


@dataclass(frozen=True, kw_only=True)
class RegistryImage:
    """An image of a registry, fetched by `Sandbox.prepare` alone."""

    reference: str
    """`host/name:tag`, or better `host/name@sha256:…`, which can never change."""


@dataclass(frozen=True, kw_only=True)
class BuiltImage:
    """An image built by `Sandbox.prepare` from a Dockerfile, named after a digest of all that goes into it."""

    context: Path
    """Folder that the Dockerfile copies from."""
    dockerfile: Path = Path("Dockerfile")
    """Relative to `context`."""
    network: bool = False
    """Whether RUN steps may reach out."""


User = Literal["agent", "root"]
"""Who a command runs as: uid 1000, or uid 0 of the box without capabilities."""
Image = FolderImage | StoredImage | RegistryImage | BuiltImage
Progress = Callable[[int, int, str], None]
"""Called with steps done, steps in all, and what is done now."""


@dataclass(frozen=True, kw_only=True)
class BoxSpec:
    """One box: system folders of an image, a shared base folder with a private writable layer, and extra mounts."""

    base: Path
    """Host folder shown, copy-on-write, at `workdir`."""
    image: Image | None = None
    """What the rest of the file system comes from, read-only; None for what the backend has for such boxes."""
    workdir: Path = Path("/repo")
    mounts: tuple[Mount, ...] = ()
    limits: Limits = Limits()
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ExecResult:
    """How one command ended. `code` is None when it was killed by our deadline."""

    code: int | None
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: bool = False
    oom: bool = False
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Change:
    """One path the box's programs changed below `workdir`, relative to it."""

    path: Path
    kind: str  # "file" | "symlink" | "deleted" | "dir"
    content: bytes = b""
    """File bytes, or the link's target."""
    mode: int = 0o644


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What this host really enforces, found by trying it."""

    overlay: bool
    netns: bool
    memory: bool
    pids: bool
    cpus: bool
    disk: bool
    cgroup: str  # "v1" | "v2" | "none"
    rootless: bool


def no_progress(done: int, total: int, what: str) -> None:
    """For those who do not watch."""


class Box(Protocol):
    """A running place. One command at a time; nothing a command starts outlives `kill` or `close`."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        user: User = "agent",
        stdin: bytes = b"",
        timeout_s: float = 600.0,
        max_output: int = 1 << 20,
    ) -> ExecResult:
        """Runs `argv` and returns how it ended. A timeout kills its whole process tree.

        ValueError for a `user` that this backend's boxes do not have.
        """
        ...

    async def put(self, path: Path, content: bytes, mode: int = 0o644) -> None:
        """Writes a file at an absolute path of the box, making its folders."""
        ...

    async def get(self, path: Path, max_bytes: int = 1 << 24) -> bytes:
        """The bytes of a file in the box; FileNotFoundError, or ValueError above `max_bytes`."""
        ...

    async def listen(self, port: int) -> socket.socket:
        """A listening socket on 127.0.0.1:`port` of the box's own network, for a server outside it."""
        ...

    async def kill(self) -> None:
        """Kills every process that commands started; the box itself stays."""
        ...

    async def changes(self, max_bytes: int = 1 << 24) -> tuple[Change, ...]:
        """What differs from `base`, read from the writable layer, without running anything in the box."""
        ...


class Sandbox(Protocol):
    """A recipe's frozen choice of backend."""

    def probe(self, image: Image | None = None) -> Capabilities:
        """What this host enforces; SandboxError with the missing piece where boxes cannot run at all."""
        ...

    async def prepare(self, images: Iterable[Image], progress: Progress = no_progress) -> None:
        """Fetches, imports or builds what boxes will need; what is there already is kept, by digest."""
        ...

    def open(self, spec: BoxSpec) -> AbstractAsyncContextManager[Box]:
        """A fresh box; leaving the context ends all its processes and removes its files.

        Reaches no registry: SandboxError for an image that was not prepared.
        """
        ...

    async def reap(self) -> int:
        """Removes what dead runs of this user left behind; returns how many boxes that was."""
        ...
