"""The files through which a container's command gets its script and input and gives its output: no engine between.

They lie in a host folder that the container is shown read-only; a pipe there may be written all the same. Script and
input go as soon as the command has opened them, before any program runs: none can read its input a second time.
"""

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from sandbox.base import User
from sandbox.engine import AGENT_ID
from sandbox.pipes import Output
from sandbox.script import PLACE, Streams
from sandbox.state import remove_tree

NAMES = {"stdin": "in", "stdout": "out", "stderr": "err", "taken": "taken", "go": "go"}
Script = Callable[[Streams], bytes]


@dataclass(frozen=True, kw_only=True)
class Opened:
    """One command's script, as the container sees it, and its output."""

    script: Path
    stdout: Output
    stderr: Output


class Exchange:
    """One box's folder `top`; `first_id` is the host's id of its uid 0, None where we cannot give files away."""

    def __init__(self, top: Path, first_id: int | None) -> None:
        self._top, self._first_id = top, first_id
        self._numbers = count()

    @contextmanager
    def opened(self, script: Script, user: User, stdin: bytes, cap: int) -> Iterator[Opened]:
        """Files for one command. Afterwards they are gone, and what its children write then is lost."""
        folder = self._top / str(next(self._numbers))
        place = PLACE / folder.name
        streams = Streams(**{field: place / name for field, name in NAMES.items()})
        with ExitStack() as undo:
            folder.mkdir()
            folder.chmod(0o711)
            undo.callback(remove_tree, folder)
            self._write(folder / "in", stdin, user)
            self._write(folder / "run", script(streams), user)
            out, err = (Output(cap, self._pipe(folder / name, user, 0o200)) for name in ("out", "err"))
            undo.callback(out.close)
            undo.callback(err.close)
            undo.enter_context(self._hidden_once_taken(folder, user))
            yield Opened(script=place / "run", stdout=out, stderr=err)

    @contextmanager
    def _hidden_once_taken(self, folder: Path, user: User) -> Iterator[None]:
        """Answers a command that has opened its script and input by removing both."""
        loop = asyncio.get_running_loop()
        with ExitStack() as undo:
            taken, go = (self._pipe(folder / name, user, mode) for name, mode in (("taken", 0o200), ("go", 0o400)))
            undo.callback(os.close, taken)
            undo.callback(os.close, go)

            def hide() -> None:
                loop.remove_reader(taken)
                (folder / "in").unlink()
                (folder / "run").unlink()
                os.write(go, b"\n")

            loop.add_reader(taken, hide)
            undo.callback(loop.remove_reader, taken)
            yield

    def _write(self, path: Path, content: bytes, user: User) -> None:
        path.write_bytes(content)
        self._give(path, user, 0o400)

    def _pipe(self, path: Path, user: User, mode: int) -> int:
        """A new named pipe, open for both: it never shows an end, whoever opens and closes it in the box."""
        os.mkfifo(path, 0o600)
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._give(path, user, mode)
        return fd

    def _give(self, path: Path, user: User, mode: int) -> None:
        """Lets that user of the box alone use a file; where we are no root, its root is one of all others."""
        if self._first_id is None:
            path.chmod(mode if user == "agent" else mode >> 6)
        else:
            path.chmod(mode)
            owner = self._first_id + (AGENT_ID if user == "agent" else 0)
            os.chown(path, owner, owner)
