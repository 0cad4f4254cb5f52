"""`python -m lego.train RECIPE.py [flags]`: trains as a recipe says."""

import asyncio
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    """The command line."""
    from lego.cli import parse

    path, recipe = parse(sys.argv[1:], "python -m lego.train")
    from lego.run import run  # heavy, so only once the flags are right

    folder = recipe.run_dir or Path("runs") / f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    # A polite kill is a Ctrl-C: everything is closed in order.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    asyncio.run(run(recipe, folder, path.stem))


if __name__ == "__main__":
    try:
        from lego.cli import guarded  # takes a moment, in which nothing is open yet
    except KeyboardInterrupt:
        sys.exit(130)
    guarded(main)
