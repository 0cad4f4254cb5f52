"""The harness seam: how an unmodified agent program is mounted, started and read.

A harness is one frozen dataclass in one file: pure values in, a `Command` out; the trial runs it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from sandbox.base import ExecResult, Mount

HOME = Path("/home/agent")


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where the model answers, as the harness shall see it."""

    url: str
    """Base URL without a trailing slash and without /v1."""
    key: str
    model: str
    context_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True)
class Command:
    """One headless run: files are written before it starts, absolute paths of the box."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[Path, bytes] = field(default_factory=dict)
    stdin: bytes = b""


@dataclass(frozen=True, kw_only=True)
class End:
    """How the harness says its run ended: `error` is None when it finished in its own normal way."""

    error: str | None = None


class Harness(Protocol):
    """An agent program."""

    @property
    def name(self) -> str: ...

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        """What must be shown in the box; HarnessNotFetched where `harnesses.fetch` has not run."""
        ...

    def command(self, instruction: str, endpoint: Endpoint) -> Command:
        """The headless run of `instruction` in the current folder."""
        ...

    def ended(self, result: ExecResult) -> End:
        """Reads exit status and output."""
        ...


class HarnessNotFetched(Exception):
    """The pinned program is not in the cache; the message holds the command that fetches it."""
