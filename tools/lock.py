"""Makes locks/*.txt: every package pinned by version and hash, no index address. Needs `uv`.

    python tools/lock.py [--find-links FOLDER]

FOLDER holds torch's CPU wheels, if you have some: their hashes are added to those of the package index.
"""

import argparse
import hashlib
import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
LOCKS = ROOT / "locks"
CUDA = re.compile(r"(nvidia-|cuda-|triton)")
"""What only torch's CUDA build needs; left out of the CPU lock."""
EVERYWHERE = " ; python_full_version < '3.14' and platform_machine == 'x86_64' and sys_platform == 'linux'"
"""The marker of the one kind of machine that pyproject.toml locks for; says nothing on a line."""


def compiled(requirements: str, *options: str) -> list[str]:
    """uv's answer as blocks: a pin followed by its hash lines."""
    command = ["uv", "pip", "compile", "-", "--universal", "--generate-hashes", "--no-emit-index-url"]
    command += ["--no-annotate", "--no-header", "--no-emit-find-links", "--python-version", "3.11", *options]
    done = subprocess.run(command, input=requirements, text=True, stdout=subprocess.PIPE, check=True, cwd=ROOT)
    return re.split(r"\n(?=\S)", done.stdout.replace(EVERYWHERE, "").strip())


def write(name: str, blocks: list[str]) -> None:
    """A lock file with the command that makes it."""
    head = "# Made by `python tools/lock.py`; install with `pip install --no-deps --require-hashes -r` or uv's same.\n"
    (LOCKS / name).write_text(head + "\n".join(blocks) + "\n")


def with_wheels(block: str, folder: Path) -> str:
    """A pin's block plus the hashes of wheels of the same project in `folder`."""
    name, version = block.split()[0].split("==")
    lines = [
        f"    --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}"
        for wheel in sorted(folder.glob(f"{name}-{version}*.whl"))
    ]
    return " \\\n".join([block, *lines])


def main() -> None:
    """Writes the three locks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--find-links", type=Path, default=None, help="folder with torch's CPU wheels")
    wheels = parser.parse_args().find_links
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    base = project["dependencies"] + extras["podman"] + extras["docker"]
    LOCKS.mkdir(exist_ok=True)
    cpu = [b for b in compiled("\n".join(base + extras["cpu"])) if not CUDA.match(b)]
    if wheels:
        cpu = [with_wheels(b, wheels) if b.startswith("torch==") else b for b in cpu]
    write("cpu.txt", cpu)
    write("gpu.txt", compiled("\n".join(base + extras["gpu"])))
    constraint = ("--constraint", str(LOCKS / "cpu.txt"))
    write("dev.txt", compiled("\n".join(extras["dev"]), *constraint))


if __name__ == "__main__":
    main()
