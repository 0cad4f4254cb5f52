"""Other copies of a task's package in an agent's box: installed, cached, packed, vendored, or of somebody's tools.

Found by name: distributions by their metadata and archives, code by how many of its files have the names of the
task's. Not found: copies under other names, inside archives of another name, or in another language than Python.
"""

import re
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lego.errors import VerdictError
from lego.tasks.task import PytestSuite, Task
from sandbox.base import Box, BoxSpec, Mount, Sandbox, SandboxError

LIST = r"""
find / \( -path /proc -o -path /sys -o -path /dev -o -path "$1" \) -prune -o \( \
  -name '*.py' -o -name '*.pyc' -o -name '*.so' -o -name '*-info' -o -name '*.egg*' -o -name '__editable__*' \
  -o -name '*.whl' -o -name '*.tar.*' -o -name '*.tgz' -o -name '*.zip' -o -name '*.conda' -o -name '*.deb' \
  -o -name '*.rpm' -o -path '*/conda-meta/*.json' -o -path '*/simple/*' -o -path '*/pypi/*' -o -path '*/pkgs/*' \
  -o -path '*/pip/http*/*' \) -print0
"""
LIST_BYTES = 1 << 28
LIST_S = 300.0
LINK_BYTES = 1 << 16
ARCHIVE = r"(?:whl|tar\.\w+|tgz|zip|egg|conda|deb|rpm)"
PIP_CACHE = re.compile(r"/pip/http[^/]*/.")
NO_PACKAGES = frozenset(
    {"tests", "test", "testing", "docs", "doc", "examples", "scripts", "tools", "benchmarks", "bin"}
)
NO_MODULES = frozenset({"setup.py", "conftest.py", "noxfile.py", "conf.py", "manage.py", "tasks.py", "versioneer.py"})
PLAIN = frozenset({"__init__.py", "__main__.py"})
ENOUGH_FILES, ENOUGH_SHARE = 3, 0.5
"""So many files of a task's module make a folder a copy, where its name is not the package's own."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What a box shows beside its work folder."""

    paths: tuple[str, ...]
    """What could be part of a Python package, absolute."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Files that tell where an installed package really is, with what they say."""


async def listing(task: Task, sandbox: Sandbox, mounts: tuple[Mount, ...]) -> Listing:
    """Lists an agent's box; VerdictError where it cannot be. Needs sh and find in the box."""
    spec = BoxSpec(base=task.base, image=task.image, workdir=task.workdir, mounts=mounts)
    try:
        async with sandbox.open(spec) as box:
            argv = ["sh", "-c", LIST, "sh", str(task.workdir)]
            result = await box.exec(argv, timeout_s=LIST_S, max_output=LIST_BYTES)
            # find also complains about folders that the agent may not read either.
            if result.code not in (0, 1) or result.truncated:
                told = result.stderr[-1000:].decode(errors="replace").strip()
                raise VerdictError(f"task {task.id}: its box cannot be searched: {told or result.code}")
            paths = tuple(path.decode(errors="surrogateescape") for path in result.stdout.split(b"\0")[:-1])
            return Listing(paths=paths, links={path: text async for path, text in _links(box, paths)})
    except SandboxError as error:
        raise VerdictError(f"task {task.id}: its box cannot be searched: {error}") from error


async def _links(box: Box, paths: Iterable[str]) -> AsyncIterator[tuple[str, str]]:
    """The small files that say where installed packages are, with what they say."""
    for path in paths:
        name = path.rpartition("/")[2]
        if name.endswith(".dist-info"):
            path = f"{path}/direct_url.json"
        elif not (name.endswith(".egg-link") or name.startswith("__editable__")):
            continue
        try:
            yield path, (await box.get(Path(path), LINK_BYTES)).decode(errors="replace")
        except (FileNotFoundError, ValueError):
            continue


def copies(task: Task, seen: Listing) -> tuple[str, ...]:
    """Paths of the box that hold another copy of the task's package, or could."""
    named, home = _named(task.package), str(task.workdir)
    found = [path for path in seen.paths if named.search(path) and not _leads_home(path, seen.links, home)]
    found += [path for path in seen.paths if PIP_CACHE.search(path)][:1]
    for module, files in sorted(modules(task).items()):
        found += _code(seen.paths, module, files, own=_folded(module) == _folded(task.package))
    return tuple(dict.fromkeys(found))


def _folded(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _named(package: str) -> re.Pattern[str]:
    """Matches metadata, archives, and folders of caches and indexes that are named after a distribution."""
    name = "[-_.]+".join(map(re.escape, re.split(r"[-_.]+", package)))
    forms = (
        rf"{name}(?:-[^/]*)?\.(?:dist-info|egg-info|egg|egg-link)$",
        rf"__editable__[._]*{name}-[^/]*$",
        rf"(?:python3?-)?{name}[-_]v?\d[^/]*\.{ARCHIVE}$",
        rf"(?:simple|pypi)/{name}(?:/|$)",
        rf"pkgs/{name}-\d[^/]*$",
        rf"conda-meta/{name}-\d[^/]*\.json$",
    )
    return re.compile(rf"/(?:{'|'.join(forms)})", re.IGNORECASE)


def _leads_home(path: str, links: Mapping[str, str], home: str) -> bool:
    """Whether this is how a package is installed that lies in the work folder itself: metadata without code."""
    told = links.get(f"{path}/direct_url.json", links.get(path, ""))
    return re.search(rf"(?:^|[\"'\s]|file://){re.escape(home)}(?:[/\"'\s]|$)", told) is not None


def modules(task: Task) -> dict[str, frozenset[str]]:
    """What can be imported from the task's base: each name with the Python files below it."""
    roots = task.verifier.roots if isinstance(task.verifier, PytestSuite) else (".", "src")
    found: dict[str, frozenset[str]] = {}
    for root in {task.base / root for root in roots}:
        for path in sorted(root.iterdir()) if root.is_dir() else ():
            files = _python_files(path)
            if files and path.stem.isidentifier() and path.name not in NO_PACKAGES | NO_MODULES:
                found[path.stem] = found.get(path.stem, frozenset()) | files
    return found


def _python_files(path: Path) -> frozenset[str]:
    if path.is_symlink():
        return frozenset()
    if path.is_file():
        return frozenset({"__init__.py"}) if path.suffix == ".py" and not path.name.startswith("test_") else frozenset()
    return frozenset(str(file.relative_to(path)) for file in path.rglob("*.py"))


def _code(paths: Iterable[str], module: str, files: frozenset[str], *, own: bool) -> Iterator[str]:
    """Folders and files of this module's name that hold enough of its files."""
    inside = re.compile(rf"^(.*/{re.escape(module)})(?:/(.+)|\.py|\.[^/]*\.so)$")
    there: defaultdict[str, set[str]] = defaultdict(set)
    for path in paths:
        if (match := inside.match(path)) is not None:
            there[match[1]].add(_source_name(match[2] or "__init__.py"))
    for folder, names in there.items():
        shared = files & names if own else (files & names) - PLAIN
        if shared and (own or len(shared) >= max(ENOUGH_FILES, ENOUGH_SHARE * len(files - PLAIN))):
            yield folder


def _source_name(name: str) -> str:
    """The source file that a compiled one was made from."""
    return re.sub(r"(?:__pycache__/)?([^/.]+)(?:\.[^/]*)?\.pyc$", r"\1.py", name)
