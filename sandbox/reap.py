"""`python -m sandbox.reap [STATE]`: removes the boxes that dead processes of this user left behind."""

import argparse
import asyncio
import logging
from pathlib import Path

from sandbox.base import SandboxError
from sandbox.bubble import Bubblewrap

log = logging.getLogger("sandbox.reap")


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 when all is removed, 1 with a message when something cannot be."""
    parser = argparse.ArgumentParser(prog="python -m sandbox.reap", description=__doc__)
    parser.add_argument("state", nargs="?", type=Path, help="state folder of the boxes; the default is the usual one")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sandbox = Bubblewrap(state=parser.parse_args(argv).state)
    try:
        count = asyncio.run(sandbox.reap())
    except (SandboxError, OSError) as error:
        log.error("cannot remove left-over boxes in %s: %s", sandbox.state_folder(), error)
        return 1
    log.info("removed %d left-over boxes from %s", count, sandbox.state_folder())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
