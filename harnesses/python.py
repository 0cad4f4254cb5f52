"""A Python of its own for harnesses written in it: the machine's, copied with every C library that it needs.

Neither the Python index nor npm has one that runs without a further download. A copy that its own loader starts runs in
any image of this kind of machine, whatever Python and C library that has, and stays when the machine's changes.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harnesses import clients
from harnesses.clients import FetchError, Progress
from harnesses.packages import Fetchable, HostPython, Part, WheelTree, locate
from sandbox.base import Mount

PYTHON = HostPython(name="python", version="3.12", machine="x86_64")
TARGET = Path("/opt/python")
ORIGIN = "origin"
LITELLM_ALONE: Mapping[str, str] = {
    # Else it downloads a list of prices, and reads a file of settings.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_MODE": "PRODUCTION",
}
"""Settings for the library through which most Python harnesses reach their model."""
LOADER = "ld-linux-x86-64.so.2"
_UNUSED = shutil.ignore_patterns(
    *("__pycache__", "test", "tests", "site-packages", "dist-packages", "config-*", "idlelib", "lib2to3", "ensurepip"),
    *("tkinter", "turtledemo", "pydoc_data", "sitecustomize.py", "EXTERNALLY-MANAGED"),
)
_KEPT_BY = (".pyenv/versions/{0}.*/bin/python{0}", ".local/share/uv/python/cpython-{0}.*/bin/python{0}")
"""Where version managers have interpreters, below the user's home."""
_ASKED_FOR = ("libstdc++.so.6", "libgcc_s.so.1", "libz.so.1", "libresolv.so.2", "libnss_files.so.2", "libnss_dns.so.2")
"""The C libraries that wheels may count on, and that names of users and hosts are looked up with."""
_ASK = """
import ctypes, json, os, platform, sys, sysconfig
for name in sys.argv[1:]:
    try: ctypes.CDLL(name)
    except OSError: pass
mapped = {line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if "/" in line}
print(json.dumps({
    "version": platform.python_version(),
    "program": os.path.realpath(sys.executable),
    "stdlib": [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")],
    "mapped": sorted(mapped),
}))
"""
_COMPILE = """
import compileall, sys
mode = __import__("py_compile").PycInvalidationMode.UNCHECKED_HASH
compileall.compile_dir(sys.argv[1], quiet=2, workers=0, invalidation_mode=mode, stripdir=sys.argv[1], prependdir="/")
"""
_SAYS_VERSION = """
import importlib, importlib.metadata, sys
sys.path.append(sys.argv[1])
importlib.import_module(sys.argv[2])
print(sys.argv[3], importlib.metadata.version(sys.argv[3]))
"""
_TELLS_VERSION = """
import importlib.metadata, sys
sys.path.append(sys.argv[1])
print(sys.argv[2], importlib.metadata.version(sys.argv[2]))
"""
_LIBRARY = re.compile(r"^\s*(\S+) => (/\S+) \(0x", re.MULTILINE)
ASK_LIMIT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Found:
    """An interpreter of this machine: its own files and what it had loaded."""

    version: str
    program: Path
    stdlib: tuple[Path, ...]
    mapped: tuple[Path, ...]


def parts(name: str, version: str, *, lock: str, sha256: str, glibc: tuple[int, int]) -> tuple[Part, ...]:
    """The interpreter, and a package of the Python index with all that the lock file names for it."""
    tree = WheelTree(name=name, version=version, lock=lock, sha256=sha256, python=PYTHON, glibc=glibc, machine="x86_64")
    return (PYTHON, tree)


def command(folder: Path) -> tuple[str, ...]:
    """Starts the interpreter below `folder`, blind to settings, to the current folder and to packages of the place."""
    libraries = folder / "clib"
    start = (libraries / LOADER, "--inhibit-cache", "--library-path", libraries, folder / "bin/python")
    return (*map(str, start), "-I", "-S")


def says_version(folders: Sequence[Path], module: str, package: str) -> tuple[str, ...]:
    """The command that imports a module of an installed tree and prints the version of its package."""
    interpreter, packages = folders
    return (*command(interpreter), "-c", _SAYS_VERSION, str(packages), module, package)


def tells_version(folders: Sequence[Path], package: str) -> tuple[str, ...]:
    """As `says_version`, but imports nothing of the tree, which can take seconds."""
    interpreter, packages = folders
    return (*command(interpreter), "-c", _TELLS_VERSION, str(packages), package)


def mount(folder: Path) -> Mount:
    """Shows the interpreter in a box."""
    return Mount(source=folder, target=TARGET)


def mounts(harness: Fetchable, cache: Path, target: Path, program: Mount) -> tuple[Mount, ...]:
    """The interpreter, the packages of a harness at `target`, and the program of ours that drives them."""
    interpreter, packages = locate(harness, cache)
    return (mount(interpreter), Mount(source=packages, target=target), program)


def install(part: HostPython, ready: Path, progress: Progress) -> None:
    """Copies an interpreter of this machine to `ready`; FetchError where there is none of that version."""
    found = find(part.version)
    (ready / "bin").mkdir()
    shutil.copy(found.program, ready / "bin/python")
    for source in dict.fromkeys(found.stdlib):
        target = ready / "lib" / f"python{part.version}"
        shutil.copytree(source, target, ignore=_UNUSED, ignore_dangling_symlinks=True, dirs_exist_ok=True)
    (ready / "clib").mkdir()
    for name, path in _libraries(found).items():
        shutil.copy(path, ready / "clib" / name)
    (ready / ORIGIN).write_text(f"copy of Python {found.version}, {found.program}\n")
    compile_all(ready, ready / "lib", step=f"Python {found.version}", progress=progress)


def find(version: str) -> Found:
    """An interpreter of this version on this machine; FetchError with what to do where there is none."""
    looked = []
    for program in dict.fromkeys(_candidates(version)):
        looked.append(str(program))
        found = _asked(program)
        if found is not None and found.version.startswith(f"{version}."):
            return found
    raise FetchError(
        f"no Python {version} on this machine to copy (looked at {', '.join(looked)}): "
        f"install one, such as the package python{version} of your system, or with `uv python install {version}`"
    )


def _candidates(version: str) -> Iterator[Path]:
    yield Path(getattr(sys, "_base_executable", sys.executable))
    for folder in os.get_exec_path():
        if (program := Path(folder) / f"python{version}").is_file():
            yield program
    for pattern in _KEPT_BY:
        yield from sorted(Path.home().glob(pattern.format(version)), reverse=True)


def _asked(program: Path) -> Found | None:
    """What an interpreter says of itself; None where it does not run."""
    argv = (program, "-I", "-S", "-c", _ASK, *_ASKED_FOR)
    try:
        said = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if said.returncode != 0:
        return None
    told = json.loads(said.stdout)
    return Found(
        version=told["version"],
        program=Path(told["program"]),
        stdlib=tuple(map(Path, told["stdlib"])),
        mapped=tuple(map(Path, told["mapped"])),
    )


def _libraries(found: Found) -> dict[str, Path]:
    """Every C library of the interpreter and its extension modules, by the name it is asked for."""
    loader = next((path for path in found.mapped if path.name == LOADER), None)
    if loader is None:
        raise FetchError(f"{found.program} has another loader than {LOADER}: the harness's packages are made for glibc")
    # A library's file often has more digits in its name than it is asked for by.
    libraries = {name: path for name in _ASKED_FOR for path in found.mapped if path.name.startswith(name)}
    modules = [path for folder in found.stdlib for path in (folder / "lib-dynload").glob("*.so")]
    modules = [path for path in modules if not path.name.startswith("_tkinter")]
    for path in (found.program, *libraries.values(), *modules):
        libraries |= {name: Path(place) for name, place in _LIBRARY.findall(_listed(loader, path)) if "/" not in name}
    return {**libraries, LOADER: loader}


def _listed(loader: Path, path: Path) -> str:
    """What the loader would load for a file; a module that lacks a library is one that no run imports."""
    return subprocess.run((loader, "--list", path), capture_output=True, text=True, env={}).stdout


def compile_all(interpreter: Path, folder: Path, *, step: str, progress: Progress) -> None:
    """Writes the bytecode of all modules below `folder`, so that no start in a box has to."""
    argv = (*command(interpreter), "-c", _COMPILE, str(folder))
    clients.run(argv, step=f"bytecode of {step}", folder=folder, progress=progress)
