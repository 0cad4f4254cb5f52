"""`python -m lego.replay FILE...`: rebuilds recorded sessions without harness, engine or GPU."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lego.cli import guarded
from lego.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Renders:
    """What is to render, in place of what a session was recorded with."""

    model: Path | None
    family: str | None


def replay(file: Path, by: Renders) -> tuple[list[str], list[str]]:
    """What came out differently, and the audit of the session as it is now. Raises UsageError."""
    # Imported late, so that --help and a wrong flag answer at once.
    from lego.capture.again import again, differences
    from lego.capture.audit import audit
    from lego.capture.recording import read
    from lego.chat.messages import BadMessage
    from lego.chat.render import Renderer
    from lego.chat.template import difference

    recording = read(file)
    model = by.model or Path(recording.model)
    if not model.is_dir():
        raise UsageError(f"{file}: its model folder {model} is gone; name another by --model")
    family = by.family or (recording.family if by.model is None else None)
    renderer = Renderer.load(model, name=family, thinking=recording.thinking)
    try:
        session = asyncio.run(again(recording, renderer))
    except BadMessage as error:
        raise UsageError(f"{file}: a recorded request cannot be read any more: {error}") from error
    found = list(differences(recording, session, renderer.decode))
    return found, list(audit(session, partial(difference, renderer, renderer.folder)).lines())


def told(file: Path, by: Renders) -> int:
    """Prints the verdict on one file; 1 if it came out differently, 2 if it cannot be replayed."""
    try:
        found, audited = replay(file, by)
    except UsageError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    verdict = "the same tree" if not found else f"{len(found)} difference{'s' if len(found) > 1 else ''}"
    sys.stdout.write("\n  ".join([f"{file}: {verdict}", *found, *audited]) + "\n")
    return int(bool(found))


def main(argv: Sequence[str]) -> int:
    """Prints a verdict and an audit for each file; the worst of their statuses."""
    parser = argparse.ArgumentParser(
        prog="python -m lego.replay", description="Rebuilds recorded sessions and compares them token for token."
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="session file (.npz) of a run's sessions/")
    parser.add_argument("--model", type=Path, help="model folder to render with (default: the one recorded)")
    parser.add_argument("--family", help="renderer by name (default: the one recorded, or the named model's own)")
    options = parser.parse_args(argv)
    statuses = [told(file, Renders(model=options.model, family=options.family)) for file in options.files]
    if len(statuses) > 1:
        same, different, unread = (statuses.count(status) for status in (0, 1, 2))
        sys.stdout.write(f"{same} the same, {different} different, {unread} not replayed\n")
    return max(statuses)


if __name__ == "__main__":
    guarded(lambda: sys.exit(main(sys.argv[1:])))
