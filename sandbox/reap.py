"""`python -m sandbox.reap`: removes the boxes that dead processes of this user left behind, of all backends here.

Where a backend has a place of its own (a state folder, a store, a socket), say so as the recipe does.
"""

import argparse
import asyncio
import importlib.util
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from sandbox.base import SandboxError
from sandbox.bubble import Bubblewrap
from sandbox.docker import SOCKET, Docker, unreachable
from sandbox.podman import Podman

log = logging.getLogger("sandbox.reap")

BACKENDS = ("bubblewrap", "podman", "docker")


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 when all is removed, 1 with a message when something cannot be."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments = _parser().parse_args(argv)
    return max([_reap(name, sandbox) for name, sandbox in _chosen(arguments)], default=0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sandbox.reap", description=__doc__)
    parser.add_argument("state", nargs="?", type=Path, help="state folder of the boxes; the default is the usual one")
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="this one alone; may be given again")
    parser.add_argument("--storage", type=Path, help="Podman's folder for images and containers")
    parser.add_argument("--socket", type=Path, default=SOCKET, help="where the Docker daemon answers")
    return parser


def _chosen(arguments: argparse.Namespace) -> Iterator[tuple[str, Bubblewrap | Podman | Docker]]:
    """The backends asked for, or those that are here."""
    here = {
        "bubblewrap": Bubblewrap(state=arguments.state),
        "podman": Podman(state=arguments.state, storage=arguments.storage),
        "docker": Docker(state=arguments.state, socket=arguments.socket),
    }
    for name in BACKENDS:
        if arguments.backend is None and (why := _absent(name, arguments.socket)):
            log.info("%s: left out, %s", name, why)
        elif name in (arguments.backend or BACKENDS):
            yield name, here[name]


def _absent(name: str, socket: Path) -> str | None:
    """Why nobody can have used a backend on this host; None if somebody may have."""
    if name == "podman" and shutil.which("podman") is None:
        return "there is no program of this name"
    if name == "docker" and not os.access(socket, os.R_OK | os.W_OK):
        return unreachable(socket)
    package = {"podman": "podman", "docker": "aiodocker"}.get(name)
    return f"the package {package} is not installed" if package and not importlib.util.find_spec(package) else None


def _reap(name: str, sandbox: Bubblewrap | Podman | Docker) -> int:
    try:
        count = asyncio.run(sandbox.reap())
    except (SandboxError, OSError) as error:
        log.error("%s: cannot remove left-over boxes in %s: %s", name, sandbox.state_folder(), error)
        return 1
    log.info("%s: removed %d left-over boxes from %s", name, count, sandbox.state_folder())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
