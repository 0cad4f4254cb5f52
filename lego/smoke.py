"""`python -m lego.smoke NAME...`: runs real harnesses against a scripted model, and tells what each made of it.

Two runs a harness, each in a box of its own on a repository of three files: a plain one (list, edit, finish), and one
whose first call has arguments that are no JSON.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from harnesses.base import HarnessNotFetched
from harnesses.fetch import DEFAULT_CACHE
from harnesses.known import KNOWN
from lego.errors import UsageError
from sandbox.base import SandboxError

POLICY = Path(__file__).parent.parent / "tools/demo_policy/policy"


def smoke(options: argparse.Namespace) -> list[str]:
    """Runs what is asked for and prints the table; returns what must not be. Raises what `main` reports."""
    # Imported late, so that --help and a wrong flag answer at once.
    from lego.drill.exercise import exercise
    from lego.drill.row import table, verdict, written

    page = options.write.read_text() if options.write else None
    verdicts = []
    for name in options.names:
        verdicts.append(verdict(*asyncio.run(exercise(KNOWN[name](), options.cache, options.policy))))
        sys.stderr.write(f"{name} is done\n")
    sys.stdout.write(table(verdicts))
    if page is not None:
        options.write.write_text(written(page, verdicts))
    return [f"{v.cells[0]}: {fault}" for v in verdicts for fault in v.faults]


def main(argv: Sequence[str]) -> int:
    """The command line: 1 if a harness did what it must not, 2 if one cannot be run."""
    parser = argparse.ArgumentParser(prog="python -m lego.smoke", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("names", nargs="+", choices=sorted(KNOWN), metavar="NAME", help=f"one of {', '.join(KNOWN)}")
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="where the programs are (%(default)s)")
    parser.add_argument("--policy", type=Path, default=POLICY, help="model folder whose tokenizer counts (%(default)s)")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the rows into the table of this page too")
    try:
        faults = smoke(parser.parse_args(argv))
    except (HarnessNotFetched, SandboxError, UsageError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stderr.write("".join(f"{fault}\n" for fault in faults))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
