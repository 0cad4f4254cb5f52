"""`python -m lego.check RECIPE.py [flags]`: what a recipe resolves to and all that is wrong with it.

Starts nothing but each harness, for its version, in a box of its own.
"""

import asyncio
import json
import sys
from collections.abc import Sequence

from harnesses.checks import checked
from lego.cli import described, guarded, resolve
from lego.recipe import Recipe
from sandbox.bubble import Bubblewrap


def check(argv: Sequence[str]) -> int:
    """Prints the resolved recipe as JSON, each problem, and `ok` or their number; returns 2 with problems, else 0."""
    _, recipe = resolve(argv, "python -m lego.check")
    problems = [*recipe.problems(), *of_harnesses(recipe)]
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}" if problems else "ok"
    lines = [json.dumps(described(recipe), indent=2, ensure_ascii=False, allow_nan=False), *problems, count]
    sys.stdout.write("\n".join(lines) + "\n")
    return 2 if problems else 0


def of_harnesses(recipe: Recipe) -> list[str]:
    """What keeps the recipe's harnesses from running here.

    They are started where boxes need no image: those of tasks are prepared, and harnesses started in them, by a run.
    """
    sandbox = recipe.sandbox
    boxes = sandbox if isinstance(sandbox, Bubblewrap) and sandbox.missing() is None else None
    if recipe.validation.harness not in (None, *recipe.known_harnesses):
        return []  # the recipe's own problem, with which it has no harnesses
    return asyncio.run(checked(recipe.harnesses, recipe.cache.expanduser(), boxes))


def main() -> None:
    """The command line."""
    sys.exit(check(sys.argv[1:]))


if __name__ == "__main__":
    guarded(main)
