"""`python -m lego.train RECIPE.py [flags]`: trains as a recipe says, or goes on where the same command was left."""

import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import Coroutine
from pathlib import Path

RUNS = Path("runs")
INTERRUPTED = 130
SHOW_CURSOR = b"\x1b[?25h"


def main() -> None:
    """The command line."""
    from lego.cli import parse

    path, recipe = parse(sys.argv[1:], "python -m lego.train")
    from lego.resume import home
    from lego.run import run  # heavy, so only once the flags are right

    folder = home(recipe, RUNS, path.stem, time.strftime("%Y%m%d-%H%M%S"))
    # A polite kill is a Ctrl-C: everything is closed in order.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    # By default Python looks for garbage after 700 new objects, and at those of thousands of live trials each time.
    gc.set_threshold(20_000)
    asyncio.run(_interruptible(run(recipe, folder, path.stem)))


async def _interruptible(work: Coroutine[None, None, None]) -> None:
    """Runs `work`. The first Ctrl-C ends it in order; the second leaves it as it is, which loses nothing either.

    Children of a process that is gone end by themselves, and the next start goes on from the journal.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    heard = asyncio.Event()

    def hear() -> None:
        if heard.is_set():
            if sys.stdout.isatty():
                os.write(sys.stdout.fileno(), SHOW_CURSOR)  # the view hides it
            os._exit(INTERRUPTED)
        heard.set()
        sys.stderr.write("interrupted: finishing and saving; once more to stop at once\n")
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, hear)
    try:
        await work
    except asyncio.CancelledError:
        if heard.is_set():
            raise KeyboardInterrupt from None
        raise


if __name__ == "__main__":
    try:
        from lego.cli import guarded  # takes a moment, in which nothing is open yet
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    guarded(main)
