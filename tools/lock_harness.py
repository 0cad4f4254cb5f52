"""Makes a lock file of a Python harness: one wheel of each package, pinned by hash, no index address.

    python tools/lock_harness.py harnesses/locks/mini-2.4.6.txt mini-swe-agent==2.4.6 --without datasets

PACKAGE is locked with all it depends on, less what only the packages of --without need; so run the harness's live test
with the new file. Prints the hash of the file, which goes into the harness. The wheels are for the Python that
`harnesses/python.py` names.
"""

import argparse
import hashlib
import json
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from harnesses.python import PYTHON, find

Installs = Mapping[str, Mapping[str, Any]]
"""What pip would install, by name: an `install` entry of its report."""


def resolved(packages: Sequence[str]) -> tuple[Installs, Mapping[str, str]]:
    """pip's choice, and the machine it is for."""
    command = [find(PYTHON.version).program, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--prefer-binary", "--target", "unused", "--report", "-", *packages]
    report = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return {canonicalize_name(one["metadata"]["name"]): one for one in report["install"]}, report["environment"]


def needed(installs: Installs, environment: Mapping[str, str], without: Collection[str]) -> Iterator[str]:
    """The names that are reached from what was asked for, not going through `without`."""
    todo = [(name, frozenset(one.get("requested_extras", ()))) for name, one in installs.items() if one["requested"]]
    seen = set()
    while todo:
        name, extras = todo.pop()
        if (name, extras) in seen or name in without:
            continue
        seen.add((name, extras))
        for text in installs[name]["metadata"].get("requires_dist", ()):
            wanted = Requirement(text)
            contexts = [{**environment, "extra": extra} for extra in extras or {""}]
            if wanted.marker is None or any(wanted.marker.evaluate(context) for context in contexts):
                todo.append((canonicalize_name(wanted.name), frozenset(wanted.extras)))
    yield from sorted({name for name, _ in seen})


def main() -> None:
    """Writes one lock file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lock", type=Path)
    parser.add_argument("packages", nargs="+", metavar="PACKAGE")
    parser.add_argument("--without", nargs="*", default=[], metavar="NAME")
    options = parser.parse_args()
    installs, environment = resolved(options.packages)
    lines = []
    for name in needed(installs, environment, options.without):
        one = installs[name]
        if not one["download_info"]["url"].endswith(".whl"):
            raise SystemExit(f"{name} has no wheel: name it, or what needs it, in --without")
        sha256 = one["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(f"{name}=={one['metadata']['version']} --hash=sha256:{sha256}\n")
    options.lock.write_text("".join(lines))
    print(hashlib.sha256(options.lock.read_bytes()).hexdigest(), len(lines), "packages")


if __name__ == "__main__":
    main()
