"""`python -m lego.check RECIPE.py [flags]`: what a recipe resolves to and all that is wrong with it; starts nothing."""

import json
import sys
from collections.abc import Sequence

from lego.cli import described, guarded, resolve


def check(argv: Sequence[str]) -> int:
    """Prints the resolved recipe as JSON, each problem, and `ok` or their number; returns 2 with problems, else 0."""
    _, recipe = resolve(argv, "python -m lego.check")
    problems = list(recipe.problems())
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}" if problems else "ok"
    lines = [json.dumps(described(recipe), indent=2, ensure_ascii=False, allow_nan=False), *problems, count]
    sys.stdout.write("\n".join(lines) + "\n")
    return 2 if problems else 0


def main() -> None:
    """The command line."""
    sys.exit(check(sys.argv[1:]))


if __name__ == "__main__":
    guarded(main)
