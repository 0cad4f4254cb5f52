"""`python -m lego.replay FILE...`: rebuilds recorded sessions without harness, engine or GPU."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lego.cli import guarded
from lego.errors import UsageError


def replay(file: Path, model: Path | None) -> tuple[list[str], list[str]]:
    """What came out differently, and the audit of the session as it is now. Raises UsageError."""
    # Imported late, so that --help and a wrong flag answer at once.
    from lego.capture.again import again, differences
    from lego.capture.audit import audit
    from lego.capture.recording import read
    from lego.chat.messages import BadMessage
    from lego.chat.render import Renderer
    from lego.chat.template import difference

    recording = read(file)
    renderer = Renderer.load(model or Path(recording.model), name=recording.family, thinking=recording.thinking)
    try:
        session = asyncio.run(again(recording, renderer))
    except BadMessage as error:
        raise UsageError(f"{file}: a recorded request cannot be read any more: {error}") from error
    found = list(differences(recording, session, renderer.decode))
    return found, list(audit(session, partial(difference, renderer, renderer.folder)).lines())


def main(argv: Sequence[str]) -> int:
    """Prints one verdict a file and its audit; 1 if any came out differently."""
    parser = argparse.ArgumentParser(
        prog="python -m lego.replay", description="Rebuilds recorded sessions and compares them token for token."
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="session file (.npz) of a run's sessions/")
    parser.add_argument("--model", type=Path, help="model folder to render with (default: the one recorded)")
    options = parser.parse_args(argv)
    status = 0
    for file in options.files:
        found, audited = replay(file, options.model)
        lines = [f"{file}: {'the same tree' if not found else f'{len(found)} differences'}", *found, *audited]
        sys.stdout.write("\n  ".join(lines) + "\n")
        status = max(status, int(bool(found)))
    return status


if __name__ == "__main__":
    guarded(lambda: sys.exit(main(sys.argv[1:])))
