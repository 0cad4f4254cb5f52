"""The builder against an index in a folder: a toy package whose sdist has one real bug to put in."""

import asyncio
import base64
import errno
import hashlib
import importlib.metadata
import io
import json
import re
import shutil
import subprocess
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from lego.errors import UsageError
from lego.tasks import sdist
from lego.tasks.mutants import DemoTasks
from lego.tasks.pip import Pin
from lego.tasks.verdict import grade
from sandbox.bubble import Bubblewrap
from tests.tasks.conftest import FIXED, TESTS, changed, suite_of

BACKEND = """
import pathlib
def prepare_metadata_for_build_wheel(folder, settings=None):
    info = pathlib.Path(folder, "legotoy-1.0.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: legotoy\\nVersion: 1.0\\n")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\\nGenerator: toy\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
    return info.name
def build_wheel(*arguments):
    raise NotImplementedError
"""
FILES = {
    "PKG-INFO": "Metadata-Version: 2.1\nName: legotoy\nVersion: 1.0\n",
    "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
    "backend.py": BACKEND,
    "toy/__init__.py": FIXED,
    "tests/__init__.py": "",
    "tests/test_toy.py": TESTS,
}
UNNEEDED = re.compile(
    r"pygments/(styles/(?!__init__|_mapping|default)|lexers/(?!__init__|_mapping|python|special|diff))"
)
TASK = {
    "package": "legotoy",
    "path": "toy/__init__.py",
    "line": 2,
    "end": 3,
    "name": "largest",
    "edit": {"line": 3, "old": "max(", "new": "min("},
    "test_file": "tests/test_toy.py",
    "split": "train",
    "candidates": 2,
}


def write_sdist(folder: Path) -> Pin:
    with tarfile.open(folder / "legotoy-1.0.tar.gz", "w:gz") as tar:
        for name, text in FILES.items():
            info = tarfile.TarInfo(f"legotoy-1.0/{name}")
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return pin("legotoy", "1.0", folder / "legotoy-1.0.tar.gz")


def write_wheel(folder: Path, name: str) -> Pin:
    """The installed package, packed again."""
    found = importlib.metadata.distribution(name)
    path = folder / f"{name}-{found.version}-py3-none-any.whl"
    info = f"{name}-{found.version}.dist-info"
    files = {
        str(f): Path(found.locate_file(f)).read_bytes() for f in found.files or () if f.parts[0] in (name, f"_{name}")
    }
    files |= {f"{name}.py": Path(found.locate_file(f"{name}.py")).read_bytes()} if not files else {}
    files |= {"py.py": Path(found.locate_file("py.py")).read_bytes()} if name == "pytest" else {}
    files = {n: c for n, c in files.items() if n.endswith(".py") and not UNNEEDED.match(n)}
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {found.version}\n".encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: toy\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    rows = [f"{n},sha256={_urlsafe(c)},{len(c)}" for n, c in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    with zipfile.ZipFile(path, "w") as wheel:
        for file, content in files.items():
            wheel.writestr(file, content)
    return pin(name, found.version, path)


def _urlsafe(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def pin(name: str, version: str, path: Path) -> Pin:
    return Pin(name=name, version=version, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Pin, tuple[Pin, ...]]:
    """A folder of archives, the toy's pin, and those of the test environment."""
    folder = tmp_path_factory.mktemp("shelf")
    names = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
    return folder, write_sdist(folder), tuple(write_wheel(folder, name) for name in names)


@pytest.fixture
def demo(shelf: tuple[Path, Pin, tuple[Pin, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DemoTasks:
    """The toy as a demo of one task, its index the shelf alone."""
    folder, toy, environment = shelf
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    write_index(tmp_path / "index.json", toy)
    return DemoTasks(index=tmp_path / "index.json", test_environment=environment, backends=())


def write_index(path: Path, toy: Pin, *tasks: dict) -> None:
    package = {"name": toy.name, "version": toy.version, "sha256": toy.sha256, "tests": "tests", "roots": ["."]}
    path.write_text(json.dumps({"packages": [package], "tasks": list(tasks) or [TASK]}))


async def test_a_build_gives_a_verified_task_and_the_second_is_from_the_cache(demo, sandbox, tmp_path, monkeypatch):
    said: list[tuple[int, int, str]] = []
    both = [demo.build(tmp_path / "cache", sandbox, lambda *step: said.append(step)) for _ in range(2)]
    tasks, same = await asyncio.gather(*both)
    assert tasks == same and len({step[:2] for step in said}) == len(said)  # one of the two waited
    assert said[-1][0] == said[-1][1] == 4
    (task,) = tasks
    assert task.instruction == "toy/__init__.py:2 test_largest fails."
    assert suite_of(task).fail_to_pass == ("tests.test_toy::test_largest",)
    assert suite_of(task).pass_to_pass == ("tests.test_toy.TestDouble::test_double",)
    assert (task.split, task.chance, task in tasks.train) == ("train", 0.5, True)
    assert [str(p.relative_to(task.base)) for p in sorted(task.base.rglob("*.py"))] == ["backend.py", "toy/__init__.py"]
    subprocess.run(["sed", "-n", "3{/min(/!q1}", str(task.base / "toy/__init__.py")], check=True)
    assert (await grade(task, [changed("toy/__init__.py", FIXED)], sandbox)).reward == 1.0
    assert (await grade(task, [], sandbox)).reward == 0.0
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert await demo.build(tmp_path / "cache", sandbox, lambda *step: said.append(step)) == tasks
    assert sorted(p.name for p in (tmp_path / "cache/tasks").iterdir())[:1] == [".lock"]
    assert len(list((tmp_path / "cache/tasks").iterdir())) == 2


async def refused(demo: DemoTasks, cache: Path, sandbox: Bubblewrap) -> str:
    """The one line a failed build says; nothing of it is left behind."""
    with pytest.raises(UsageError) as error:
        await demo.build(cache, sandbox, lambda *_: None)
    assert "\n" not in str(error.value)
    assert [p.name for p in cache.glob("tasks/*") if p.name != ".lock"] == []
    assert not list(cache.glob("tasks/.build-*"))
    return str(error.value)


async def test_an_unreachable_index_is_one_clear_message(demo, sandbox, tmp_path, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    said = await refused(demo, tmp_path / "cache", sandbox)
    assert said.startswith("cannot get legotoy==1.0 ") and "package index" in said


async def test_a_package_with_another_hash_is_refused(demo, shelf, sandbox, tmp_path):
    write_index(demo.index, replace(shelf[1], sha256="0" * 64))
    assert "HASHES" in await refused(demo, tmp_path / "cache", sandbox)


async def test_a_bug_that_no_test_notices_is_refused(demo, shelf, sandbox, tmp_path):
    hidden = TASK | {"test_file": "tests/__init__.py"}
    assert "only 0 of 1 train tasks" in await refused_index(demo, shelf[1], hidden, tmp_path, sandbox)


async def test_a_bug_that_sed_cannot_undo_is_refused(demo, shelf, sandbox, tmp_path):
    spaces = TASK | {"line": 6, "end": 7, "edit": {"line": 7, "old": "return ", "new": "return  "}}
    assert "does not undo" in await refused_index(demo, shelf[1], spaces, tmp_path, sandbox)


async def refused_index(demo: DemoTasks, toy: Pin, task: dict, tmp_path: Path, sandbox: Bubblewrap) -> str:
    write_index(demo.index, toy, task)
    return await refused(demo, tmp_path / "cache", sandbox)


async def test_a_full_disk_is_one_clear_message(demo, sandbox, tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sdist, "clone", full)
    assert "no space left" in await refused(demo, tmp_path / "cache", sandbox)


async def test_a_cancelled_build_leaves_nothing(demo, sandbox, tmp_path):
    begun = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        building = group.create_task(demo.build(tmp_path / "cache", sandbox, lambda *_: begun.set()))
        await begun.wait()
        await asyncio.sleep(0.3)
        building.cancel()
    assert [p.name for p in (tmp_path / "cache/tasks").iterdir()] == [".lock"]


@pytest.mark.parametrize("text", ["", "{}", '{"packages": [], "tasks": [{"package": "x"}]}', "[1]"])
async def test_a_broken_index_is_named(tmp_path, sandbox, text):
    (tmp_path / "index.json").write_text(text)
    assert "index.json" in await refused(DemoTasks(index=tmp_path / "index.json"), tmp_path / "cache", sandbox)
    assert "index.json" in await refused(DemoTasks(index=tmp_path / "gone" / "index.json"), tmp_path / "cache", sandbox)


@pytest.mark.parametrize("name", ["../evil.py", "/evil.py", "legotoy-1.0/../../evil.py"])
def test_an_archive_cannot_write_outside_its_folder(tmp_path: Path, name: str):
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(ValueError, match="leaves the archive"):
        sdist.unpack(tmp_path / "a.tar.gz", tmp_path / "out")


def test_links_and_devices_of_an_archive_are_not_unpacked(tmp_path: Path):
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        for name, kind in (("link", tarfile.SYMTYPE), ("hard", tarfile.LNKTYPE), ("pipe", tarfile.FIFOTYPE)):
            info = tarfile.TarInfo(f"a/{name}")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        tar.addfile(tarfile.TarInfo("a/file"), io.BytesIO())
    assert [p.name for p in sdist.unpack(tmp_path / "a.tar.gz", tmp_path / "out").iterdir()] == ["file"]


def test_tests_are_parted_from_the_source(tmp_path: Path):
    top = tmp_path / "top"
    source = ("a/code.py", "a/contest.py", "README", "tests_of_skill.py")
    hidden = (
        "a/tests/test_x.py",
        "a/tests/data.txt",
        "conftest.py",
        "test_y.py",
        "a/z_test.py",
        "b/test/x.py",
        "a.egg-info/PKG-INFO",
    )
    for name in (*source, *hidden):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(name)
    sdist.part(top, "a/tests", tmp_path / "base", tmp_path / "hidden")
    assert {str(p.relative_to(tmp_path / "base")) for p in (tmp_path / "base").rglob("*") if p.is_file()} == set(source)
    assert {p.name for p in (tmp_path / "hidden/tests").iterdir()} == {"test_x.py", "data.txt"}
    shutil.rmtree(top)
    assert (tmp_path / "base/a/code.py").read_text() == "a/code.py"
