"""From a command line to a checked recipe: a Python file, its flags, and errors a user can act on."""

import difflib
import errno
import math
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import NoReturn

import tyro

from harnesses.base import Harness, HarnessNotFetched
from lego.errors import EngineError, GateError, HarnessError, TrainerError, UsageError, VerdictError
from lego.recipe import Recipe
from sandbox.base import SandboxError

EXPECTED = (
    UsageError,
    GateError,
    EngineError,
    HarnessError,
    TrainerError,
    VerdictError,
    SandboxError,
    HarnessNotFetched,
)


def load_recipe(path: Path) -> Recipe:
    """The `recipe` that a recipe file ends in; UsageError names the file and what is wrong with it."""
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], 1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise UsageError(f"no recipe file {path}{hint}")
    try:
        recipe = runpy.run_path(str(path)).get("recipe")
    except Exception as error:  # the user's own code may raise anything
        where = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = f":{where[-1].lineno}" if where else ""
        raise UsageError(f"{path}{line}: {type(error).__name__}: {error}") from error
    if not isinstance(recipe, Recipe):
        raise UsageError(f"{path} must end in `recipe = Recipe(...)`; found {type(recipe).__name__}")
    return recipe


def parse(argv: Sequence[str], program: str) -> tuple[Path, Recipe]:
    """As `resolve`, but a recipe that cannot run is a UsageError with all its problems."""
    path, recipe = resolve(argv, program)
    problems = list(recipe.problems())
    if problems:
        raise UsageError(f"{path}: " + "\n  ".join(["the recipe cannot run:", *problems]))
    return path, recipe


def resolve(argv: Sequence[str], program: str) -> tuple[Path, Recipe]:
    """The recipe file named first and the recipe with all flags applied; exits with 2 on flags that cannot be read."""
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: {program} RECIPE.py [flags]\n\n{program} RECIPE.py --help lists the recipe's flags.")
        sys.exit(0 if argv else 2)
    if argv[0].startswith("-"):
        raise UsageError(f"the recipe file comes first: {program} RECIPE.py {argv[0]} …")
    path = Path(argv[0])
    own = load_recipe(path)
    recipe = tyro.cli(
        Recipe,
        default=own,
        args=list(argv[1:]),
        prog=f"{program} {path}",
        config=(tyro.conf.AvoidSubcommands, tyro.conf.SuppressFixed),
    )
    same = type(recipe.algorithm) is type(own.algorithm)
    algorithm = own.algorithm if same else recipe.algorithm
    mix = tuple(replace(part, harness=_as_set(own, part.harness)) for part in recipe.mix)
    return path, replace(recipe, harness=_as_set(own, recipe.harness), mix=mix, algorithm=algorithm)


def _as_set(recipe: Recipe, chosen: Harness) -> Harness:
    """The harness of that name as the recipe sets its fields, if it does; a name alone takes the defaults."""
    own = (recipe.harness, *(part.harness for part in recipe.mix), *recipe.other_harnesses)
    return next((harness for harness in own if harness.name == chosen.name), chosen)


def described(value: object) -> object:
    """A value as strict JSON data, dataclasses with their class, so that a run folder tells what ran."""
    if is_dataclass(value) and not isinstance(value, type):
        own = {f.name: described(getattr(value, f.name)) for f in fields(value)}
        return {"class": f"{type(value).__module__}.{type(value).__qualname__}", **own}
    if isinstance(value, dict):
        return {str(key): described(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [described(item) for item in value]
    plain = isinstance(value, str | int | bool | None) or (isinstance(value, float) and math.isfinite(value))
    return value if plain else str(value)


def leave(error: BaseException) -> NoReturn:
    """Ends the program with one line on stderr and the exit status of that kind of error."""
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2 if isinstance(error, UsageError | HarnessNotFetched) else 1)


def first_expected(error: BaseException) -> BaseException | None:
    """The first expected error in an exception (group), or None if any of it is a bug."""
    if isinstance(error, BaseExceptionGroup):
        found = [first_expected(inner) for inner in error.exceptions]
        return found[0] if all(found) else None
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UsageError(f"no space left on the disk of {error.filename or 'the run folder (run_dir) or the cache'}")
    return error if isinstance(error, EXPECTED) else None


def guarded(main: Callable[[], None]) -> None:
    """Runs `main`; expected errors become one line, Ctrl-C a quiet end, a bug keeps its traceback."""
    try:
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output left; what is still buffered goes nowhere, and quietly.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (*EXPECTED, OSError, BaseExceptionGroup) as error:
        expected = first_expected(error)
        if expected is None:
            raise
        leave(expected)
