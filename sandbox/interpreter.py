"""The host's own Python inside a foreign root file system: loader, C libraries and standard library at a private path.

The first process of a bubblewrap box is Python, which an image need not have, or not in this version, or with
another C library. Commands of the box are not touched by it: they find the image's own programs and loader.
"""

import functools
import os
import re
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from sandbox import boxinit
from sandbox.base import Mount, SandboxError

PLACE = Path("/.lego")
"""Where the box shows it; nothing else of an image has this name."""
INIT = PLACE / "init.pyc"
_LIST_FILES = """
import sys
exec(compile(sys.argv[1], "", "exec"))
for line in open("/proc/self/maps"):
    if "/" in line: print(line.split(None, 5)[5], end="")
"""
_LIBRARY = re.compile(r"^\s*(\S+) => (/\S+) \(0x", re.MULTILINE)


@dataclass(frozen=True)
class Interpreter:
    """How the box starts it, and what it must be shown for that."""

    command: tuple[str, ...]
    mounts: tuple[Mount, ...]


def python() -> str:
    """The interpreter that runs the box's first process: ours, without its virtual environment."""
    return os.path.realpath(sys.executable)


@functools.cache
def foreign() -> Interpreter:
    """Our interpreter with all it loads, below `PLACE`. SandboxError where its libraries cannot be told."""
    program, libraries = Path(python()), _libraries()
    stdlib = Path(sysconfig.get_path("stdlib"))
    extensions = Path(sysconfig.get_path("platstdlib", vars={"platbase": sys.base_exec_prefix}))
    home, lib = PLACE / "python", PLACE / "lib"
    shown = {home / "bin" / program.name: program, home / sys.platlibdir / stdlib.name: extensions}
    shown[home / "lib" / stdlib.name] = stdlib
    shown |= {lib / name: path for name, path in libraries.items()}
    loader = next(name for name in libraries if name.startswith("ld-"))
    command = (lib / loader, "--inhibit-cache", "--library-path", lib, home / "bin" / program.name)
    return Interpreter(
        command=tuple(map(str, command)),
        mounts=tuple(Mount(source=source, target=target) for target, source in shown.items()),
    )


def _libraries() -> dict[str, Path]:
    """Every C library that the interpreter needs for `boxinit`, by the name it is asked for, its loader among them."""
    imports = "\n".join(re.findall(r"^import .*$", Path(boxinit.__file__).read_text(), re.MULTILINE))
    loaded = {*map(Path, _output(python(), "-I", "-S", "-c", _LIST_FILES, imports).splitlines())}
    objects = [path for path in loaded if ".so" in path.name or path == Path(python())]
    loader = next((path for path in objects if path.name.startswith("ld-")), None)
    if loader is None:
        raise SandboxError(f"{python()} has no dynamic loader that could be shown in an image; use a box without one")
    found = {loader.name: loader}
    for path in objects:
        listed = _output(str(loader), "--list", str(path)) if path != loader else ""
        found |= {name: Path(place) for name, place in _LIBRARY.findall(listed) if "/" not in name}
    return found


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, env={}).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise SandboxError(f"cannot tell which libraries {python()} needs: {error}") from error
