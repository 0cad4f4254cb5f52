import asyncio
import os
import signal
import socket
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path, PurePosixPath

import pytest

from sandbox import images, podman
from sandbox.base import BuiltImage, FolderImage, Image, RegistryImage, SandboxError, StoredImage
from sandbox.context import starts_from, write_context
from sandbox.engine import Engine
from sandbox.images import extract, prepare, resolve
from tests.sandbox.conftest import DOCKER, PODMAN
from tools.base_image import NAME


@pytest.fixture(params=[PODMAN, DOCKER])
def engine(request: pytest.FixtureRequest) -> Engine:
    """Each engine in turn, with the base image in its store."""
    if request.param == "podman":
        return podman.engine(request.getfixturevalue("podman_sandbox"))
    return request.getfixturevalue("docker_engine")


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch):
    """Each test is a process that has looked at nothing yet."""
    monkeypatch.setattr(images, "_digests", {})


@pytest.fixture
def context(tmp_path: Path) -> Path:
    folder = tmp_path / "context"
    (folder / "sub").mkdir(parents=True)
    (folder / "Dockerfile").write_text(f"FROM {NAME}\nCOPY . /made\n")
    (folder / "sub" / "a").write_text("a")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("sub/a")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    top = tmp_path / "image"
    (top / "etc").mkdir(parents=True)
    (top / "etc" / "note").write_text("one")
    return top


def digest(image: BuiltImage) -> str:
    return write_context(image, BytesIO())


def names(image: BuiltImage) -> list[str]:
    file = BytesIO()
    write_context(image, file)
    file.seek(0)
    with tarfile.open(fileobj=file) as tar:
        return sorted(tar.getnames())


def test_the_same_contents_have_the_same_digest_whatever_their_times_owners_and_place(context: Path, tmp_path: Path):
    first = digest(BuiltImage(context=context))
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", context, copy], check=True)
    for path in copy.rglob("*"):
        os.utime(path, (1, 1), follow_symlinks=False)
    assert digest(BuiltImage(context=copy)) == first


@pytest.mark.parametrize(
    "change",
    [
        lambda top: (top / "sub" / "a").write_text("b"),
        lambda top: (top / "run.sh").chmod(0o644),
        lambda top: (top / "sub" / "new").touch(),
        lambda top: (top / "Dockerfile").write_text("FROM scratch\n"),
        lambda top: (top / "link").unlink() or (top / "link").symlink_to("sub"),
    ],
    ids=["content", "mode", "new file", "Dockerfile", "link"],
)
def test_any_change_of_the_context_changes_the_digest(context: Path, change):
    first = digest(BuiltImage(context=context))
    change(context)
    assert digest(BuiltImage(context=context)) != first


def test_the_network_and_the_choice_of_dockerfile_are_in_the_digest(context: Path):
    (context / "Other").write_text((context / "Dockerfile").read_text())
    first = digest(BuiltImage(context=context))
    assert digest(BuiltImage(context=context, network=True)) != first
    assert digest(BuiltImage(context=context, dockerfile=Path("Other"))) != first


def test_what_dockerignore_names_is_left_out_but_never_the_dockerfile(context: Path):
    for name in ("x.pyc", "sub/y.pyc", "sub/keep.pyc", "deep/er/z.log", "sub/b"):
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        (context / name).touch()
    (context / ".dockerignore").write_text("# no\n**/*.pyc\n!sub/keep.pyc\ndeep\nDockerfile\n/link\nsub/?\n")
    assert names(BuiltImage(context=context)) == [".dockerignore", "Dockerfile", "run.sh", "sub", "sub/keep.pyc"]


def test_an_exception_below_an_ignored_folder_is_kept(context: Path):
    (context / "sub" / "b").touch()
    (context / ".dockerignore").write_text("sub\n!sub/b\n")
    assert names(BuiltImage(context=context)) == [".dockerignore", "Dockerfile", "link", "run.sh", "sub/b"]


def test_the_images_that_a_dockerfile_starts_from():
    text = """
ARG BASE=host/first:1
# FROM nothing
FROM --platform=linux/amd64 ${BASE} AS build
ARG BASE=ignored
RUN echo FROM here
FROM host/second@sha256:aa as Final
COPY --from=build /a /b
COPY --chown=1 --from=host/third /a \\
     /b
COPY --from=0 /c /d
RUN --mount=type=bind,from=host/fourth,target=/x true
FROM scratch
from BUILD
"""
    assert starts_from(text) == ("host/first:1", "host/second@sha256:aa", "host/third", "host/fourth")


def test_a_dockerfile_outside_the_context_is_the_users_mistake(context: Path, tmp_path: Path):
    (tmp_path / "Dockerfile").touch()
    for name in ("../Dockerfile", "none"):
        with pytest.raises(SandboxError, match=f"dockerfile={name}: want a file in context="):
            digest(BuiltImage(context=context, dockerfile=Path(name)))


@dataclass
class Said:
    """What progress was shown."""

    calls: list[tuple[int, int, str]] = field(default_factory=list)

    def __call__(self, done: int, total: int, what: str) -> None:
        self.calls.append((done, total, what))

    def count(self, word: str) -> int:
        return sum(word in what for _, _, what in self.calls)


async def text_of(engine: Engine, image: Image, folder: str, name: str, tmp_path: Path) -> str:
    return (await extract(engine, image, PurePosixPath(folder), tmp_path / "out") / name).read_text()


async def test_a_folder_becomes_an_image_once_and_again_when_it_changed(engine: Engine, folder: Path, tmp_path: Path):
    image, said = FolderImage(path=folder), Said()
    with pytest.raises(SandboxError, match=rf"image of the folder {folder} is not in .* import - localhost/lego-fold"):
        await resolve(engine, image)
    await prepare(engine, [image], said)
    first = await resolve(engine, image)
    await prepare(engine, [image], said)
    assert await resolve(engine, image) == first and said.count("importing") == 1
    assert said.calls[-1] == (1, 1, "all images are there")
    assert await text_of(engine, image, "/etc", "note", tmp_path) == "one"

    status = (folder / "etc" / "note").stat()
    (folder / "etc" / "note").write_text("two")
    os.utime(folder / "etc" / "note", ns=(status.st_atime_ns, status.st_mtime_ns))
    await prepare(engine, [image], said)
    assert await resolve(engine, image) != first and said.count("importing") == 2
    assert await text_of(engine, image, "/etc", "note", tmp_path) == "two"


async def test_files_of_the_image_keep_their_owner_and_mode(engine: Engine, folder: Path, tmp_path: Path):
    (folder / "etc" / "note").chmod(0o640)
    os.chown(folder / "etc" / "note", 1000, 1000)
    image = FolderImage(path=folder)
    await prepare(engine, [image])
    saved = tmp_path / "saved.tar"
    subprocess.run([*engine.command.split(), "save", "-o", saved, await resolve(engine, image)], check=True)
    with tarfile.open(saved) as outer:
        layer = next(one for one in outer if one.isfile() and one.name.endswith(".tar"))
        with tarfile.open(fileobj=outer.extractfile(layer)) as inner:
            found = next(one for one in inner if one.name.endswith("etc/note"))
    assert (found.uid, found.gid, found.mode & 0o777) == (1000, 1000, 0o640)


async def test_two_that_prepare_the_same_at_once_do_the_work_once(engine: Engine, folder: Path):
    said = Said()
    async with asyncio.TaskGroup() as group:
        for _ in range(5):
            group.create_task(prepare(engine, [FolderImage(path=folder)], said))
    assert said.count("importing") == 1


async def test_an_import_that_was_cancelled_or_failed_leaves_no_image(engine: Engine, tmp_path: Path):
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "noise").write_bytes(os.urandom(1 << 25))
    image = FolderImage(path=folder)
    for delay_ms in (10, 50, 100):
        task = asyncio.create_task(prepare(engine, [image]))
        await asyncio.sleep(delay_ms / 1000)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(SandboxError, match="is not in the engine's store"):
            await resolve(engine, image)
    tar = tmp_path / "half.tar"
    subprocess.run(["tar", "-cf", tar, "-C", folder, "."], check=True)
    os.truncate(tar, tar.stat().st_size // 2)
    with pytest.raises(SandboxError, match="cannot import localhost/half:1"):
        await engine.load(tar, "localhost/half:1")
    assert await engine.image_id("localhost/half:1") is None


async def test_a_folder_that_is_none_is_the_users_mistake(engine: Engine, tmp_path: Path):
    with pytest.raises(SandboxError, match=f"path={tmp_path / 'none'}: no such folder"):
        await prepare(engine, [FolderImage(path=tmp_path / "none")])


async def test_a_stored_image_must_be_there_and_is_never_fetched(engine: Engine):
    await prepare(engine, [StoredImage(name=NAME)])
    assert await resolve(engine, StoredImage(name=NAME)) == await engine.image_id(NAME)
    for action in (resolve(engine, missing := StoredImage(name="localhost/none:1")), prepare(engine, [missing])):
        with pytest.raises(SandboxError, match=r"image localhost/none:1 is not in .*`\S+ .*pull localhost/none:1` br"):
            await action


async def test_a_registry_image_that_is_there_is_not_pulled(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    async def pull(reference: str, progress: object) -> None:
        raise AssertionError(reference)

    monkeypatch.setattr(type(engine), "pull", lambda self, reference, progress: pull(reference, progress))
    await prepare(engine, [RegistryImage(reference=NAME)])
    with pytest.raises(AssertionError, match="localhost/none:2"):
        await prepare(engine, [RegistryImage(reference="localhost/none:2")])
    with pytest.raises(SandboxError, match="image localhost/none:2 is not in"):
        await resolve(engine, RegistryImage(reference="localhost/none:2"))


async def test_a_dockerfile_is_built_once_and_by_what_is_in_it(engine: Engine, context: Path, tmp_path: Path):
    image, said = BuiltImage(context=context), Said()
    with pytest.raises(SandboxError, match=r"is not in .* build --network none -t localhost/lego-built:\w+ -f "):
        await resolve(engine, image)
    await prepare(engine, [image], said)
    first = await resolve(engine, image)
    await prepare(engine, [image], said)
    assert await resolve(engine, image) == first and said.count(": building") == 1
    assert said.count("COPY . /made 1/2") == 1
    assert await text_of(engine, image, "/made", "link", tmp_path) == "a"
    (context / "sub" / "a").write_text("b")
    await prepare(engine, [image], said)
    assert await text_of(engine, image, "/made", "link", tmp_path) == "b"


async def test_a_base_that_moved_makes_a_new_image(engine: Engine, context: Path, folder: Path, tmp_path: Path):
    tar = tmp_path / "tar"
    (context / "Dockerfile").write_text("FROM localhost/moving:1\nCOPY run.sh /\n")
    found = []
    for text in ("one", "two"):
        (folder / "etc" / "note").write_text(text)
        subprocess.run(["tar", "-cf", tar, "-C", folder, "."], check=True)
        await engine.load(tar, "localhost/moving:1")
        await prepare(engine, [image := BuiltImage(context=context)])
        found.append(await text_of(engine, image, "/etc", "note", tmp_path))
    assert found == ["one", "two"]


LOOK = """
import socket
print(socket.if_nameindex())
try:
    socket.create_connection(("127.0.0.1", {port}), timeout=2)
    print("connected")
except OSError as error:
    print(type(error).__name__)
"""


async def test_a_build_sees_no_network_of_the_host_unless_it_may(engine: Engine, context: Path, tmp_path: Path):
    (context / "Dockerfile").write_text(f"FROM {NAME}\nCOPY look.py /\nRUN mkdir /out && python3 /look.py > /out/net\n")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        (context / "look.py").write_text(LOOK.format(port=listening.getsockname()[1]))
        control = subprocess.run([sys.executable, context / "look.py"], check=True, stdout=subprocess.PIPE)
        assert control.stdout.endswith(b"connected\n")
        image = BuiltImage(context=context)
        await prepare(engine, [image])
    assert await text_of(engine, image, "/out", "net", tmp_path) == "[(1, 'lo')]\nConnectionRefusedError\n"


async def test_a_failed_build_shows_its_last_lines_and_leaves_no_name(engine: Engine, context: Path):
    steps = "RUN echo first; for i in 1 2 3; do echo line $i; done; echo to stderr >&2; exit 7\n"
    (context / "Dockerfile").write_text(f"FROM {NAME}\n{steps}")
    image = BuiltImage(context=context)
    with pytest.raises(SandboxError, match="cannot build localhost/lego-built:") as caught:
        await prepare(engine, [image])
    assert all(f"\n{line}" in str(caught.value) for line in ("line 1", "line 3", "to stderr")), caught.value
    with pytest.raises(SandboxError, match="is not in the engine's store"):
        await resolve(engine, image)
    assert await engine.listed("lego.owner") == []


async def test_a_build_that_was_cancelled_stops_and_leaves_no_name(engine: Engine, context: Path):
    (context / "Dockerfile").write_text(f"FROM {NAME}\nRUN sleep 4322 && touch /never\n")
    image = BuiltImage(context=context)
    task = asyncio.create_task(prepare(engine, [image]))
    await until(lambda: sleepers() != [])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    if isinstance(engine, podman.PodmanEngine):
        for pid in sleepers():  # the service leaves a RUN step alone
            os.kill(pid, signal.SIGKILL)
    await until(lambda: sleepers() == [])
    with pytest.raises(SandboxError, match="is not in the engine's store"):
        await resolve(engine, image)


async def test_what_a_build_starts_from_is_not_pulled_behind_our_back(engine: Engine, context: Path):
    for line in (f"FROM {NAME}\nCOPY --from=localhost/none:3 /a /b", "FROM localhost/none:3"):
        (context / "Dockerfile").write_text(line)
        with pytest.raises(SandboxError, match=r"FROM image localhost/none:3 .*network=False; prepare RegistryImage"):
            await prepare(engine, [BuiltImage(context=context)])


async def test_a_folder_taken_out_of_an_image_is_ours_and_harmless(engine: Engine, folder: Path, tmp_path: Path):
    repo = folder / "testbed"
    (repo / "closed").mkdir(parents=True)
    (repo / "closed" / "file").write_text("x")
    (repo / "program").write_text("x")
    (repo / "program").chmod(0o6755)
    os.chown(repo / "closed" / "file", 1000, 1000)
    os.mkfifo(repo / "pipe")
    (repo / "absolute").symlink_to("/etc/passwd")
    (repo / "up").symlink_to("../../../../etc")
    (repo / "closed").chmod(0o500)
    image = FolderImage(path=folder)
    await prepare(engine, [image])
    base = await extract(engine, image, PurePosixPath("/testbed"), tmp_path / "bases")
    assert sorted(path.name for path in base.iterdir()) == ["absolute", "closed", "program", "up"]
    assert (base / "program").stat().st_mode & 0o7777 == 0o755
    assert (base / "closed" / "file").stat().st_uid == os.geteuid()
    assert (base / "closed").stat().st_mode & 0o700 == 0o700
    assert (base / "absolute").readlink() == Path("/etc/passwd")
    assert await engine.listed("lego.owner") == []

    (base / "mine").touch()
    assert await extract(engine, image, PurePosixPath("/testbed"), tmp_path / "bases") == base
    assert (base / "mine").exists()
    with pytest.raises(SandboxError, match="/nowhere"):
        await extract(engine, image, PurePosixPath("/nowhere"), tmp_path / "bases")
    assert list((tmp_path / "bases").iterdir()) == [base]
    assert await engine.listed("lego.owner") == []


async def until(holds) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - a process of the engine sets no event of ours
            await asyncio.sleep(0.05)


def sleepers() -> list[int]:
    """The processes that a build's RUN step started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"sleep\x004322"):
                found.append(int(path.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@pytest.mark.parametrize(
    ("image", "told"),
    [
        (FolderImage(path=Path("/nowhere")), "path=/nowhere: no such folder; want an unpacked root file system"),
        (BuiltImage(context=Path("/nowhere")), "dockerfile=Dockerfile: want a file in context=/nowhere"),
    ],
)
def test_an_image_that_cannot_be_is_told_before_any_engine_is_asked(image: Image, told: str):
    assert images.unusable(image) == f"image: {told}"
    assert images.unusable(StoredImage(name="x")) is images.unusable(None) is None
