"""Finds the demo's tasks: one-token bugs that a package's own tests notice and that only one edit repairs.

    python tools/demo_tasks/find.py --sdists FOLDER --testenv FOLDER --out recipes/demo_tasks.json

Wants the sdists of PACKAGES and a folder with pytest on disk; writes metadata only. Test runs are forked from this
process, without a sandbox: it runs the code of packages that a person chose. The builder verifies every task again,
in the sandbox.
"""

import argparse
import hashlib
import json
import os
import random
import resource
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lego.tasks import mutate, report, sdist
from lego.tasks.pytest_verifier import pytest_arguments

FEWEST, MOST = 3, 6
"""Candidate edits in a task's view."""
MAX_CPU_S = 0.5
"""One run of a task's test file, the start of pytest not counted."""
MUTANTS = 6
"""Bugs tried in one function before the next function's turn."""
PER_FILE = 4
"""Tasks of one test file."""
TRAIN, HELDOUT = 24, 12
PER_EDIT = 6
"""Tasks with the same bug: without a bound, one answer would solve half of them."""
NONCE, CANARY = "find", "test_that_must_fail"
"""For the witness; nobody here wants to cheat."""


@dataclass(frozen=True)
class Package:
    """What is needed of one package; `files` maps a source file to the test file that covers it."""

    name: str
    version: str
    license: str
    tests: str
    roots: tuple[str, ...]
    files: tuple[tuple[str, str], ...]


def pairs(source: str, stems: str) -> tuple[tuple[str, str], ...]:
    """Source file and test file by stem; a test file may be named after `source` itself."""
    return tuple((source.format(stem), f"tests/test_{stem}.py") for stem in stems.split())


BOLTONS = (
    "cacheutils dictutils fileutils formatutils funcutils iterutils jsonutils listutils mathutils namedutils "
    "queueutils setutils socketutils statsutils strutils tableutils tbutils timeutils typeutils urlutils"
)
PACKAGES = (
    Package("boltons", "25.0.0", "BSD-3-Clause", "tests", (".",), pairs("boltons/{}.py", BOLTONS)),
    Package(
        *("toolz", "1.0.0", "BSD-3-Clause", "toolz/tests", (".",)),
        pairs("toolz/{}.py", "dicttoolz functoolz itertoolz recipes"),
    ),
    Package(
        *("cachetools", "5.5.2", "MIT", "tests", ("src",)),
        (
            *pairs("src/cachetools/__init__.py", "lru lfu ttl tlru mru fifo"),
            *pairs("src/cachetools/{}.py", "keys func"),
        ),
    ),
    Package(
        *("funcy", "2.0", "BSD-3-Clause", "tests", (".",)),
        pairs("funcy/{}.py", "calc decorators flow funcmakers objects strings tree types"),
    ),
    Package("jmespath", "1.0.1", "MIT", "tests", (".",), pairs("jmespath/{}.py", "parser")),
)


@dataclass(frozen=True)
class Found:
    """A task in the making."""

    package: Package
    function: mutate.Function
    bug: mutate.Edit
    test_file: str
    candidates: int


class Runner:
    """Runs test files against one package's tree, one source file replaced."""

    def __init__(self, package: Package, work: Path) -> None:
        self.package, self.work = package, work
        self.base, self.hidden = work / "base", work / "hidden"
        self.runs, self.cpu_s = 0, 0.0

    def source(self, path: str) -> str:
        return (self.base / path).read_bytes().decode()

    def run(self, test_file: str, path: str, source: str) -> tuple[report.Report | None, float]:
        """Report and CPU seconds of one run with `path` holding `source`; None for a run that did not end well."""
        original = (self.base / path).read_bytes()
        (self.base / path).write_bytes(source.encode())
        out = self.work / "record"
        out.write_bytes(b"")
        try:
            child = os.fork()
            if child == 0:
                self._child(test_file, out)
            _, status, usage = os.wait4(child, 0)
        finally:
            (self.base / path).write_bytes(original)
        spent = usage.ru_utime + usage.ru_stime
        self.runs, self.cpu_s = self.runs + 1, self.cpu_s + spent
        found, code = report.read(out.read_bytes()), os.waitstatus_to_exitcode(status)
        return found if report.believed(found, code) else None, spent

    def _child(self, test_file: str, out: Path) -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (3, 4))
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        sys.path[:] = [place for place in sys.path if not place.endswith("site-packages")]
        sys.path += [str(self.base / root) for root in self.package.roots]
        os.chdir(self.base)
        import pytest

        from lego.tasks.witness import Witness

        stream = os.open(out, os.O_WRONLY | os.O_APPEND)
        witness = Witness(stream, NONCE, CANARY, str(self.hidden / test_file), twin=False)
        status = int(pytest.main(pytest_arguments(self.hidden, test_file), plugins=[witness]))
        witness.say("finish", status)
        os._exit(status)


def found_in(runner: Runner, path: str, test_file: str, rng: random.Random) -> Iterator[Found]:
    """At most one task for each function of a file, in random order."""
    source = runner.source(path)
    good, cpu_s = runner.run(test_file, path, source)
    if good is None or good.failed or cpu_s > MAX_CPU_S:
        print(f"  {path}: {test_file} skipped: {good.failed if good else 'no report'}, {cpu_s:.2f} CPU-s", flush=True)
        return
    listed = [f for f in mutate.functions(source, path) if f.end <= 999]
    rng.shuffle(listed)
    for function in listed:
        bugs = list(mutate.candidates(source.split("\n"), function))
        rng.shuffle(bugs)
        # A needless `return not` gives itself away: other bugs first.
        for bug in sorted(bugs, key=lambda bug: bug.old == "return ")[:MUTANTS]:
            count = usable(runner, function, bug, source, test_file, set(good.passed))
            if count:
                yield Found(runner.package, function, bug, test_file, count)
                break


def usable(runner: Runner, f: mutate.Function, bug: mutate.Edit, source: str, test_file: str, passed: set[str]) -> int:
    """Number of candidate edits if exactly the reverse of `bug` repairs it, else 0."""
    broken = mutate.apply(source, bug)
    edits = mutate.candidates(broken.split("\n"), f)
    back = mutate.inverse(bug)
    if not FEWEST <= len(edits) <= MOST or back not in edits or mutate.apply(broken, back) != source:
        return 0
    if mutate.Function(f.path, f.name, f.line, f.end) not in mutate.functions(broken, f.path):
        return 0
    seen, _ = runner.run(test_file, f.path, broken)
    if seen is None or not seen.failed or not passed & set(seen.passed):
        return 0
    for other in edits:
        if other == back:
            continue
        result, cpu_s = runner.run(test_file, f.path, mutate.apply(broken, other))
        if cpu_s > 2.0 or (result is not None and passed <= set(result.passed)):
            return 0
    return len(edits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sdists", type=Path, required=True)
    parser.add_argument("--testenv", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(arguments.testenv))
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    warm_up()
    rng = random.Random(arguments.seed)
    found = [one for package in PACKAGES for one in search(package, arguments.sdists, rng)]
    chosen = choose(found, rng)
    digests = {package.name: digest(arguments.sdists, package) for package in PACKAGES}
    arguments.out.write_text(json.dumps(document(chosen, digests), indent=1) + "\n")


def warm_up() -> None:
    """Imports what every forked run needs, once."""
    import _pytest.config
    import pytest

    assert pytest.__version__ == "8.4.2"
    for name in _pytest.config.default_plugins:
        __import__(f"_pytest.{name}")


def search(package: Package, sdists: Path, rng: random.Random) -> list[Found]:
    work = Path(tempfile.mkdtemp(prefix="find-"))
    runner = Runner(package, work)
    try:
        top = sdist.unpack(archive(sdists, package), work / "unpacked")
        sdist.part(top, package.tests, runner.base, runner.hidden)
        shutil.rmtree(work / "unpacked")
        found: list[Found] = []
        for path, test_file in package.files:
            taken = {(one.function.path, one.function.name, one.function.line) for one in found}
            new = found_in(runner, path, test_file, rng)
            fresh = (one for one in new if (one.function.path, one.function.name, one.function.line) not in taken)
            found += [one for one, _ in zip(fresh, range(PER_FILE), strict=False)]
        print(f"{package.name}: {len(found)} tasks, {runner.runs} runs, {runner.cpu_s:.1f} CPU-s", flush=True)
        return found
    finally:
        shutil.rmtree(work)


def choose(found: list[Found], rng: random.Random) -> list[tuple[Found, str]]:
    """Random tasks, those with more candidate edits first, no package with more than half; a third is held out."""
    rng.shuffle(found)
    wanted = TRAIN + HELDOUT
    packages, edits = Counter[str](), Counter[str]()
    chosen: list[Found] = []
    for one in sorted(found, key=lambda one: -min(one.candidates, 4)):
        full = packages[one.package.name] >= wanted // 2 or edits[one.bug.old] >= PER_EDIT
        if len(chosen) < wanted and not full:
            chosen.append(one)
            packages[one.package.name] += 1
            edits[one.bug.old] += 1
    rng.shuffle(chosen)
    return [(one, "heldout" if i < HELDOUT else "train") for i, one in enumerate(chosen)]


def document(chosen: list[tuple[Found, str]], digests: dict[str, str]) -> dict[str, object]:
    used = {one.package.name for one, _ in chosen}
    packages = [
        {
            "name": p.name,
            "version": p.version,
            "license": p.license,
            "sha256": digests[p.name],
            "tests": p.tests,
            "roots": p.roots,
        }
        for p in PACKAGES
        if p.name in used
    ]
    tasks = [
        {
            "package": one.package.name,
            "path": one.function.path,
            "line": one.function.line,
            "end": one.function.end,
            "name": one.function.name,
            "edit": {"line": one.bug.line, "old": one.bug.old, "new": one.bug.new},
            "test_file": one.test_file,
            "candidates": one.candidates,
            "split": split,
        }
        for one, split in sorted(
            chosen, key=lambda c: (c[1] != "train", c[0].package.name, c[0].function.path, c[0].function.line)
        )
    ]
    counts = Counter((t["split"], t["package"]) for t in tasks)
    for split in ("train", "heldout"):
        chances = [1 / one.candidates for one, s in chosen if s == split]
        print(f"{split}: {len(chances)} tasks, chance {sum(chances) / max(1, len(chances)):.3f}")
    print(dict(counts))
    return {"packages": packages, "tasks": tasks}


def archive(sdists: Path, package: Package) -> Path:
    return sdists / f"{package.name.replace('-', '_')}-{package.version}.tar.gz"


def digest(sdists: Path, package: Package) -> str:
    return hashlib.sha256(archive(sdists, package).read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
