"""Boxes of bubblewrap on an unpacked image: here one of a shell and a few programs, with no Python in it."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox.base import BoxSpec, BuiltImage, FolderImage, Mount, RegistryImage, SandboxError, StoredImage
from sandbox.bubble import Bubblewrap

PROGRAMS = ("sh", "cat", "ls", "id", "env")
LIBRARY = re.compile(r"(/\S+/(\S+)) \(0x")


@pytest.fixture
def image(tmp_path: Path) -> FolderImage:
    root = tmp_path / "image"
    for folder in ("usr/bin", "usr/lib", "usr/lib64", "etc", "opt"):
        (root / folder).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    for program in PROGRAMS:
        source = shutil.which(program)
        assert source
        shutil.copy(source, root / "usr" / "bin" / program)
        listed = subprocess.run(["ldd", source], capture_output=True, text=True, check=True).stdout
        for path, name in LIBRARY.findall(listed):
            shutil.copy(path, root / ("usr/lib64" if name.startswith("ld-") else "usr/lib") / name)
    (root / "etc" / "release").write_text("tiny 1\n")
    return FolderImage(path=root)


@pytest.fixture
def tiny(plain: BoxSpec, image: FolderImage) -> BoxSpec:
    return replace(plain, image=image)


async def test_a_box_has_the_programs_of_its_image_and_no_others(bubblewrap: Bubblewrap, tiny: BoxSpec):
    async with bubblewrap.open(tiny) as box:
        assert (await box.exec(["cat", "/etc/release"])).stdout == b"tiny 1\n"
        assert (await box.exec(["ls", "/usr/bin"])).stdout.decode().split() == sorted(PROGRAMS)
        assert (await box.exec(["git", "--version"])).code == (await box.exec(["python3"])).code == 127
        assert (await box.exec(["cat", "/etc/hosts"])).stdout.startswith(b"127.0.0.1 localhost")
        assert b"LD_LIBRARY_PATH" not in (await box.exec(["env"])).stdout


async def test_files_listeners_and_changes_work_without_python_in_the_image(bubblewrap: Bubblewrap, tiny: BoxSpec):
    async with bubblewrap.open(tiny) as box:
        await box.put(Path("/home/agent/x"), b"1")
        assert await box.get(Path("/home/agent/x")) == b"1"
        (await box.listen(8080)).close()
        await box.exec(["sh", "-c", "echo 2 > README; echo 3 > /tmp/x; echo 4 > /var/tmp/x"])
        assert [(str(change.path), change.content) for change in await box.changes()] == [("README", b"2\n")]


async def test_the_image_itself_stays_as_it_is(bubblewrap: Bubblewrap, tiny: BoxSpec, image: FolderImage):
    before = sorted(image.path.rglob("*"))
    async with bubblewrap.open(tiny) as box:
        for path in ("/x", "/usr/x", "/etc/release", "/usr/bin/sh", "/opt/x", "/.lego/x", "/.lego/python/x"):
            assert (await box.exec(["sh", "-c", f"echo x > {path}"])).code != 0
    assert sorted(image.path.rglob("*")) == before
    assert (image.path / "etc" / "release").read_text() == "tiny 1\n"


async def test_our_interpreter_shows_no_package_of_the_host(bubblewrap: Bubblewrap, tiny: BoxSpec):
    async with bubblewrap.open(tiny) as box:
        shown = await box.exec(["sh", "-c", "ls -A /.lego/python/lib/python3*/site-packages"])
        assert (shown.stdout, shown.code) == (b"", 0)


async def test_mounts_and_the_work_folder_may_be_where_the_image_has_folders(
    bubblewrap: Bubblewrap, tiny: BoxSpec, base: Path
):
    mount = Mount(source=base / "pkg", target=Path("/opt/tool/pkg"))
    async with bubblewrap.open(replace(tiny, mounts=(mount,), workdir=Path("/usr/src/app"))) as box:
        assert (await box.exec(["cat", "/opt/tool/pkg/a.py", "README"])).stdout == b"A = 1\nread me\n"


async def test_what_is_no_unpacked_image_is_refused_with_the_way_to_get_one(bubblewrap: Bubblewrap, plain: BoxSpec):
    stored = (StoredImage(name="x"), RegistryImage(reference="h/x:1"), BuiltImage(context=plain.base))
    for image in stored:
        with pytest.raises(SandboxError, match=r"unpack it to a folder, as with .*export"):
            bubblewrap.open(replace(plain, image=image))
        with pytest.raises(SandboxError, match="FolderImage"):
            await bubblewrap.prepare([image])
    with pytest.raises(SandboxError, match="no bin/sh"):
        bubblewrap.open(replace(plain, image=FolderImage(path=plain.base)))


async def test_prepare_tells_its_progress(bubblewrap: Bubblewrap, image: FolderImage):
    told = []
    await bubblewrap.prepare([image], lambda *words: told.append(words))
    assert told[-1] == (1, 1, "all images are there") and str(image.path) in told[0][2]
