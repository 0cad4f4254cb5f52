"""Patches of change sets applied by real git, change sets laid into real boxes, and what of a huge file is read."""

import os
import shutil
import subprocess
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandbox.base import Box, BoxSpec, Change, Sandbox, SandboxError
from sandbox.compare import between
from sandbox.gitsnap import digest, patch_changes, unified_patch
from sandbox.laying import apply_changes
from sandbox.snapshot import snapshot
from sandbox.state import remove_tree
from sandbox.upper import TooLarge, read_changes

NAMES = [
    "a",
    "b",
    "-f",
    "x\udcff",
    "new\nline",
    'q"',
    " s ",
    "back\\slash",
    ".gitx",
    "ü",
    "git~2",
    "*.[a]",
    "a\tb",
    "#",
]
CONTENTS = [
    b"",
    b"x\n",
    b"x\ny\n",
    b"no end",
    b"\xff\xfe\n",
    b"\0bin",
    "é\n".encode(),
    b"cr\r\nlf\n",
    b"-- \n",
    b"+\n-\n",
]
names = st.sampled_from(NAMES)
contents = st.one_of(st.sampled_from(CONTENTS), st.binary(max_size=40), st.text(max_size=40).map(str.encode))
folder_modes = st.sampled_from([0o755, 0o700, 0o555])
leaves = st.one_of(
    st.tuples(st.just("file"), contents, st.sampled_from([0o644, 0o755, 0o600])),
    st.tuples(st.just("link"), st.sampled_from([b"a", b"../b", b"/etc/passwd", "ü".encode(), b"."]), st.just(0o777)),
)
trees = st.dictionaries(
    names,
    st.recursive(
        leaves, lambda inner: st.tuples(st.just("folder"), st.dictionaries(names, inner, max_size=4), folder_modes)
    ),
    max_size=6,
)
Tree = dict[str, tuple]


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """One that goes also where an ordinary user has made its folders unwritable."""
    folder = Path(mkdtemp())
    try:
        yield folder
    finally:
        remove_tree(folder)


def as_git_has_it(tree: Tree) -> Tree:
    """Without the empty folders, which no commit holds."""
    inner = {n: (kind, as_git_has_it(c) if kind == "folder" else c, mode) for n, (kind, c, mode) in tree.items()}
    return {n: entry for n, entry in inner.items() if entry[0] != "folder" or entry[1]}


def open_folders(tree: Tree) -> Tree:
    """With folders that an ordinary user's git can change; commits hold no modes of folders."""
    return {
        name: (kind, open_folders(content), 0o755) if kind == "folder" else (kind, content, mode)
        for name, (kind, content, mode) in tree.items()
    }


def write(folder: Path, tree: Tree) -> Path:
    folder.mkdir()
    for name, (kind, content, mode) in tree.items():
        path = folder / name
        if kind == "folder":
            write(path, content).chmod(mode)
        elif kind == "link":
            path.symlink_to(os.fsdecode(content))
        else:
            path.write_bytes(content)
            path.chmod(mode)
    return folder


def in_git(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """What git would keep of a folder."""
    empty = Path(str(folder) + "-empty")
    empty.mkdir(exist_ok=True)
    kept = [change for change in between(empty, folder) if change.kind != "dir"]
    return {c.path: (c.mode & 0o100 if c.kind == "file" else -1, c.content) for c in kept}


def git_apply(folder: Path, patch: str) -> None:
    env = {"PATH": os.environ["PATH"], "GIT_CEILING_DIRECTORIES": str(folder.parent), "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(["git", "apply", "-"], cwd=folder, input=patch.encode(), env=env, capture_output=True)
    assert done.returncode == 0, (done.stderr.decode(errors="replace"), patch)


@settings(max_examples=40, deadline=None)
@given(base=trees, after=trees)
def test_plain_git_makes_of_the_base_what_the_patch_was_made_from(base: Tree, after: Tree):
    with temporary_folder() as temporary:
        before = write(Path(temporary, "base"), as_git_has_it(open_folders(base)))
        wanted = write(Path(temporary, "after"), open_folders(after))
        changes = between(before, wanted)
        patch = unified_patch(before, changes, lambda path: False)
        assert patch == unified_patch(before, changes[::-1], lambda path: False)
        if patch:
            shutil.copytree(before, Path(temporary, "work"), symlinks=True)
            git_apply(Path(temporary, "work"), patch)
            assert in_git(Path(temporary, "work")) == in_git(wanted)
            again = patch_changes(before, patch.encode())
            assert unified_patch(before, again, lambda path: False) == patch


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(base=trees, after=trees)
async def test_a_change_set_laid_into_a_box_gives_the_tree_it_was_made_from(
    sandbox: Sandbox, spec: BoxSpec, base: Tree, after: Tree
):
    with temporary_folder() as temporary:
        before, wanted = write(Path(temporary, "base"), base), write(Path(temporary, "after"), after)
        changes = between(before, wanted)
        async with sandbox.open(replace(spec, base=before)) as box:
            await apply_changes(box, changes)
            assert {digest([change]) for change in await box.changes()} == {digest([change]) for change in changes}
            assert await shell(box, "ls -A /tmp") == ""


async def shell(box: Box, line: str) -> str:
    result = await box.exec(["sh", "-c", line])
    assert result.code == 0, result.stderr
    return result.stdout.decode()


async def test_thousands_of_files_are_laid_at_once(sandbox: Sandbox, spec: BoxSpec):
    many = [Change(path=Path(f"d{n % 50}/{'x' * 100}{n}"), kind="file", content=b"%d" % n) for n in range(5000)]
    many += [Change(path=Path(f"d{n}"), kind="dir", mode=0o555) for n in range(50)]
    async with sandbox.open(spec) as box:
        await apply_changes(box, many)
        assert await shell(box, "cat d*/* | wc -c; stat -c %a d7") == "18890\n555\n"
        await apply_changes(box, [replace(c, kind="deleted", content=b"") for c in many])
        assert await box.changes() == ()


async def test_a_folder_closed_to_writing_is_closed_again(sandbox: Sandbox, spec: BoxSpec):
    (spec.base / "pkg" / "deep").chmod(0o555)
    (spec.base / "pkg").chmod(0o555)
    edits = [
        Change(path=Path("pkg/a.py"), kind="deleted"),
        Change(path=Path("pkg/deep/b.py"), kind="file", content=b"B"),
    ]
    async with sandbox.open(spec) as box:
        await apply_changes(box, edits)
        assert await shell(box, "stat -c %a pkg pkg/deep; cat pkg/deep/b.py; ls pkg") == "555\n555\nBdeep\n"


async def test_nothing_is_written_through_a_link(sandbox: Sandbox, spec: BoxSpec):
    (spec.base / "way").symlink_to("pkg")
    beyond = [Change(path=Path("way/a.py"), kind="file", content=b"evil")]
    async with sandbox.open(spec) as box:
        for changes in (beyond, [Change(path=Path("way/a.py"), kind="deleted")]):
            with pytest.raises(SandboxError, match=r"way is no folder"):
                await apply_changes(box, changes)
        with pytest.raises(ValueError, match="lies below link"):
            own = [
                Change(path=Path("link"), kind="symlink", content=b"pkg"),
                replace(beyond[0], path=Path("link/a.py")),
            ]
            await apply_changes(box, own)
        assert await box.changes() == ()
        await apply_changes(box, [Change(path=Path("way"), kind="dir", mode=0o755), *beyond])
        assert await shell(box, "cat way/a.py pkg/a.py") == "evilA = 1\n"


async def test_a_folder_in_place_of_a_link_is_not_compared_with_what_the_link_led_to(
    bubblewrap: Sandbox, plain: BoxSpec, tmp_path: Path
):
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "secret").write_text("host secret\n")
    (plain.base / "way").symlink_to("pkg")
    (plain.base / "out").symlink_to(tmp_path / "host")
    edit = "cp -r pkg copy; rm way out; mv copy way; mkdir out; echo 'host secret' > out/secret"
    async with bubblewrap.open(plain) as box:
        await shell(box, edit)
        changes = await box.changes()
    made = [(str(c.path), c.kind) for c in changes]
    assert made == [
        *(("out", "dir"), ("out/secret", "file"), ("way", "dir")),
        *(("way/a.py", "file"), ("way/deep", "dir"), ("way/deep/b.py", "file")),
    ]
    other = [replace(c, content=b"mine\n") if c.path.name == "secret" else c for c in changes]
    patch = unified_patch(plain.base, other, lambda path: False)
    assert "host secret" not in patch
    work = tmp_path / "work"
    shutil.copytree(plain.base, work, symlinks=True)
    git_apply(work, patch)
    assert (work / "way" / "a.py").read_text() == "A = 1\n" and not (work / "way").is_symlink()


GIT_TRAPS = r"""
set -e
g="git -c user.name=x -c user.email=x@y -c init.defaultBranch=m"
$g init -q . && printf '#!/bin/sh\ntouch /tmp/hooked\n' > .git/hooks/pre-commit && chmod 755 .git/hooks/pre-commit
git config core.fsmonitor /repo/run.sh && git config filter.evil.clean 'tr a-z A-Z' && git config core.bare true
git config core.worktree /etc && git config diff.external /repo/run.sh
echo '* filter=evil -text diff=evil' > .gitattributes
echo 'pkg/' > .gitignore
echo 'A = 2' > pkg/a.py
mkdir nested && (cd nested && $g init -q . && echo n > n && $g add n && $g commit -qm n)
printf '[submodule "s"]\n\tpath = s\n\turl = ../s\n' > .gitmodules
mkdir s && echo 'gitdir: ../.git/modules/s' > s/.git && echo s > s/s
mkdir .GIT && echo x > .GIT/config && echo x > 'git~1' && mkdir -p sub/.Git. && echo x > sub/.Git./config
"""


async def test_what_the_agent_did_to_git_is_neither_run_nor_in_the_patch(
    bubblewrap: Sandbox, plain: BoxSpec, tmp_path: Path
):
    async with bubblewrap.open(plain) as box:
        await shell(box, GIT_TRAPS)
        changes = await box.changes()
    patch = unified_patch(plain.base, changes, lambda path: False)
    git_apply(plain.base, patch)
    (tmp_path / "empty").mkdir()
    left = between(tmp_path / "empty", plain.base)
    made = {str(c.path) for c in left if c.kind == "file"}
    assert made == {
        *("README", "run.sh", "pkg/a.py", "pkg/deep/b.py", ".gitattributes", ".gitignore", ".gitmodules"),
        *("nested/n", "s/s"),
    }
    assert (plain.base / "pkg" / "a.py").read_text() == "A = 2\n"
    link = [Change(path=Path("x/.GitModules"), kind="symlink", content=b"a")]
    assert unified_patch(plain.base, link, lambda path: False) == ""


def test_a_patch_fits_a_clean_repository_whatever_its_attributes_say(tmp_path: Path):
    source = write(tmp_path / "source", {"f": ("file", b"one\r\ntwo\r\n", 0o644)})
    run = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "f"], ["commit", "-qm", "f"]):
        subprocess.run([*run, *words], cwd=source, check=True)
    (source / ".gitattributes").write_text("* text eol=lf\n")
    for words in (["add", ".gitattributes"], ["commit", "-qm", "attributes"]):
        subprocess.run([*run, *words], cwd=source, check=True)
    base = tmp_path / "base"
    snapshot(source, "HEAD", base)
    patch = unified_patch(base, [Change(path=Path("f"), kind="file", content=b"one\r\n2\n")], lambda path: False)
    assert patch_changes(base, patch.encode()) == (Change(path=Path("f"), kind="file", content=b"one\r\n2\n"),)
    git_apply(base, patch)
    assert (base / "f").read_bytes() == b"one\r\n2\n"


def test_a_patch_that_does_not_fit_says_so(tmp_path: Path):
    base = write(tmp_path / "base", {"f": ("file", b"one\n", 0o644)})
    patch = unified_patch(base, [Change(path=Path("f"), kind="file", content=b"two\n")], lambda path: False)
    (base / "f").write_text("three\n")
    with pytest.raises(ValueError, match="does not fit"):
        patch_changes(base, patch.encode())
    with pytest.raises(ValueError, match="does not fit"):
        patch_changes(base, b"--- /dev/null\n+++ b/../out\n@@ -0,0 +1 @@\n+x\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]


@pytest.fixture
def memory() -> Iterator[None]:
    """Fails where more than 8 MiB were allocated at once."""
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def layer(tmp_path: Path, size: int, base_size: int) -> tuple[Path, Path]:
    upper, base = tmp_path / "upper", tmp_path / "base"
    for folder, length in ((upper, size), (base, base_size)):
        folder.mkdir()
        with (folder / "hole").open("wb") as file:
            file.truncate(length)
    return upper, base


@pytest.mark.usefixtures("memory")
def test_a_huge_hole_is_refused_unread(tmp_path: Path):
    upper, base = layer(tmp_path, 200 << 20, 5)
    with pytest.raises(TooLarge):
        read_changes(upper, base, 1 << 24)
    with pytest.raises(TooLarge, match="hole had"):
        unified_patch(upper, [Change(path=Path("hole"), kind="deleted")], lambda path: False, max_bytes=1 << 24)


@pytest.mark.usefixtures("memory")
def test_a_huge_file_that_was_only_touched_is_no_change(tmp_path: Path):
    upper, base = layer(tmp_path, 40 << 20, 40 << 20)
    assert read_changes(upper, base, 1 << 10) == ()
    with (upper / "hole").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    with pytest.raises(TooLarge):
        read_changes(upper, base, 1 << 10)


def test_more_paths_than_one_can_handle_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    upper, base = layer(tmp_path, 1, 1)
    for number in range(11):
        (upper / str(number)).touch()
    monkeypatch.setattr("sandbox.upper.MAX_CHANGES", 10)
    with pytest.raises(TooLarge, match="10 paths"):
        read_changes(upper, base, 1 << 10)
    with pytest.raises(TooLarge, match="15 bytes"):
        read_changes(upper, base, 15)  # the names have 16


def test_one_digest_for_the_same_changes():
    link = Change(path=Path("l"), kind="symlink", content=b"a", mode=0o777)
    file = Change(path=Path("f"), kind="file", content=b"a", mode=0o644)
    assert digest([link]) == digest([replace(link, mode=0o644)])
    assert digest([file, link]) == digest([link, file])
    assert len({digest([c]) for c in (link, file, replace(file, mode=0o600), replace(file, content=b""))}) == 4


async def test_a_closed_folder_that_became_a_link_leaves_what_it_points_at_alone(sandbox: Sandbox, spec: BoxSpec):
    (spec.base / "pkg" / "deep").chmod(0o555)
    changes = [
        Change(path=Path("pkg/deep"), kind="symlink", content=b"../open"),
        Change(path=Path("pkg/deep/b.py"), kind="deleted"),
        Change(path=Path("open"), kind="dir", mode=0o755),
    ]
    async with sandbox.open(spec) as box:
        await apply_changes(box, changes)
        assert await shell(box, "stat -c %a open; readlink pkg/deep") == "755\n../open\n"
