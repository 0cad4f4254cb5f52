import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox.base import BoxSpec, Change, Sandbox
from sandbox.gitsnap import digest, select, unified_patch
from sandbox.laying import apply_changes
from sandbox.upper import TooLarge

EDITS = r"""
set -e
echo "A = 2" > pkg/a.py
touch README                      # no change
chmod 600 run.sh
rm link && ln -s /etc/passwd link
mkdir -p new/empty && echo n > new/n && chmod 755 new/n
printf '\377\000' > new/bytes
ln -s ../../.. new/up
mkfifo new/pipe
rm -r pkg/deep
echo replaced > pkg/deep
mkdir .git && echo hook > .git/hook
touch -- -f 'a
b' "$(printf 'x\377')"
"""


def as_rows(changes: tuple[Change, ...]) -> list[tuple[str, str]]:
    return [(str(change.path), change.kind) for change in changes]


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every entry of a folder with its mode and content."""
    rows = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = os.fsencode(path.readlink()) if path.is_symlink() else b"" if path.is_dir() else path.read_bytes()
        rows[str(path.relative_to(folder))] = (status.st_mode, content)
    return rows


async def test_every_kind_of_change_is_read_and_the_base_stays(sandbox: Sandbox, spec: BoxSpec):
    before = tree(spec.base)
    async with sandbox.open(spec) as box:
        result = await box.exec(["sh", "-c", EDITS])
        assert result.code == 0, result.stderr
        changes = await box.changes()
    assert tree(spec.base) == before
    assert as_rows(changes) == [
        ("-f", "file"),
        (".git", "dir"),
        (".git/hook", "file"),
        ("a\nb", "file"),
        ("link", "symlink"),
        ("new", "dir"),
        ("new/bytes", "file"),
        ("new/empty", "dir"),
        ("new/n", "file"),
        ("new/up", "symlink"),
        ("pkg/a.py", "file"),
        ("pkg/deep", "file"),
        ("pkg/deep/b.py", "deleted"),
        ("run.sh", "file"),
        ("x\udcff", "file"),
    ]
    by_path = {str(change.path): change for change in changes}
    assert (by_path["run.sh"].mode, by_path["new/n"].mode) == (0o600, 0o755)
    assert by_path["link"].content == b"/etc/passwd" and by_path["new/bytes"].content == b"\xff\0"


async def test_a_folder_made_anew_hides_what_was_in_it(sandbox: Sandbox, spec: BoxSpec):
    async with sandbox.open(spec) as box:
        await box.exec(["sh", "-c", "rm -r pkg && mkdir -p pkg/deep && echo 'A = 1' > pkg/a.py && echo c > pkg/deep/c"])
        assert as_rows(await box.changes()) == [("pkg/deep/b.py", "deleted"), ("pkg/deep/c", "file")]
        await box.exec(["rm", "-r", "pkg"])
        gone = ["pkg", "pkg/a.py", "pkg/deep", "pkg/deep/b.py"]
        assert as_rows(await box.changes()) == [(path, "deleted") for path in gone]


async def test_renamed_folders_are_deletions_and_files(sandbox: Sandbox, spec: BoxSpec):
    async with sandbox.open(spec) as box:
        await box.exec(["mv", "pkg", "lib"])
        rows = as_rows(await box.changes())
        assert ("lib/deep/b.py", "file") in rows and ("pkg/deep/b.py", "deleted") in rows


async def test_what_the_box_made_unreadable_is_read(sandbox: Sandbox, spec: BoxSpec):
    async with sandbox.open(spec) as box:
        await box.exec(["sh", "-c", "mkdir d; echo 1 > d/f; chmod 0 d/f d"])
        changes = {str(change.path): change for change in await box.changes()}
        assert changes["d/f"].content == b"1\n" and changes["d/f"].mode == changes["d"].mode == 0
        assert (await box.exec(["stat", "-c", "%a", "d"])).stdout == b"0\n"


async def test_too_much_or_too_deep_is_an_error_of_its_own(sandbox: Sandbox, spec: BoxSpec):
    async with sandbox.open(spec) as box:
        await box.exec(["sh", "-c", "truncate -s 300G hole || truncate -s 100M hole"])
        with pytest.raises(TooLarge, match="more than 1000 bytes"):
            await box.changes(1000)
        await box.exec(["sh", "-c", "rm hole; head -c 900 /dev/zero > f"])
        assert len(await box.changes(1000)) == 1
        assert (await box.exec(["mkdir", "-p", "d/" * 300])).code == 0
        with pytest.raises(TooLarge, match="deep"):
            await box.changes()
        await box.exec(["rm", "-r", "d"])
        assert (await box.exec(["mkdir", "-p", f"{'d' * 200}/" * 12])).code == 0
        with pytest.raises(TooLarge, match="paths of more than"):
            await box.changes()


async def test_changes_can_be_read_while_programs_write(sandbox: Sandbox, spec: BoxSpec, tmp_path: Path):
    (tmp_path / "secret").write_text("host secret")
    swap = f"(while :; do rm -rf s; mkdir s; touch s/secret; rm -rf s; ln -s {tmp_path} s; done) 2>/dev/null &"
    async with sandbox.open(spec) as box:
        await box.exec(["sh", "-c", swap])
        for _ in range(60):
            assert all(b"host secret" not in change.content for change in await box.changes())


async def test_a_change_set_put_into_a_fresh_box_gives_the_same_tree(sandbox: Sandbox, spec: BoxSpec):
    async with sandbox.open(spec) as box:
        await box.exec(
            ["sh", "-c", EDITS + "rm README; mkdir README; touch README/in; chmod 555 README; chmod 700 pkg"]
        )
        changes = await box.changes()
    async with sandbox.open(spec) as fresh:
        await apply_changes(fresh, changes)
        assert await fresh.changes() == changes
    async with sandbox.open(spec) as untouched:
        await apply_changes(untouched, ())
        assert await untouched.changes() == ()


async def test_a_change_set_cannot_leave_its_folder(sandbox: Sandbox, spec: BoxSpec):
    async with sandbox.open(spec) as box:
        for path in ("../out", "/etc/x", "a/../../b", "."):
            with pytest.raises(ValueError, match="path="):
                await apply_changes(box, (Change(path=Path(path), kind="file"),))
        through = (Change(path=Path("l"), kind="symlink", content=b"/tmp"), Change(path=Path("l/x"), kind="file"))
        await apply_changes(box, through[:1])
        assert (await box.exec(["ls", "/tmp"])).stdout == b""


def test_what_is_excluded_cannot_be_changed_on_a_detour():
    changes = (
        Change(path=Path("conftest.py"), kind="dir"),
        Change(path=Path("conftest.py/x"), kind="file"),
        Change(path=Path("src/a.py"), kind="file"),
        Change(path=Path("tests"), kind="symlink", content=b"src"),
        Change(path=Path("tests/test_a.py"), kind="deleted"),
    )
    kept = select(changes, lambda path: path.name == "conftest.py" or path.name.startswith("test_"))
    assert as_rows(kept) == [("src/a.py", "file")]


async def test_a_deleted_folder_keeps_the_files_that_a_filter_protects(sandbox: Sandbox, spec: BoxSpec):
    async with sandbox.open(spec) as box:
        await box.exec(["rm", "-r", "pkg"])
        changes = select(await box.changes(), lambda path: path.name == "b.py")
    async with sandbox.open(spec) as fresh:
        await apply_changes(fresh, changes)
        assert await fresh.get(Path("/repo/pkg/deep/b.py")) == b"B = 2\n"
        assert as_rows(await fresh.changes()) == [("pkg/a.py", "deleted")]


async def test_the_patch_is_what_git_applies_and_always_the_same(sandbox: Sandbox, spec: BoxSpec, tmp_path: Path):
    async with sandbox.open(spec) as box:
        await box.exec(["sh", "-c", EDITS + "echo '* -diff filter=evil' > .gitattributes"])
        changes = await box.changes()
    patch = unified_patch(spec.base, changes, lambda path: path.name == ".gitattributes")
    assert patch == unified_patch(spec.base, tuple(reversed(changes)), lambda path: path.name == ".gitattributes")
    assert "-A = 1\n+A = 2\n" in patch and "GIT binary patch" in patch and ".git/hook" not in patch
    assert "gitattributes" in unified_patch(spec.base, changes, lambda path: False)
    assert "-A = 1\n+A = 2\n" in unified_patch(spec.base, changes, lambda path: False)
    assert unified_patch(spec.base, (), lambda path: False) == ""
    done = await run_git_apply(sandbox, spec, patch)
    wanted = [c for c in changes if c.kind != "dir" and ".git" not in c.path.parts and c.path.name != ".gitattributes"]
    plain = [c for c in wanted if c.path.name != "run.sh"]  # git knows no mode 600, only "not executable"
    assert {digest([replace(c, mode=executable(c))]) for c in plain} <= {
        digest([replace(c, mode=executable(c))]) for c in done
    }


def executable(change: Change) -> int:
    return stat.S_IXUSR & change.mode


async def run_git_apply(sandbox: Sandbox, spec: BoxSpec, patch: str) -> tuple[Change, ...]:
    async with sandbox.open(spec) as fresh:
        result = await fresh.exec(["git", "apply", "-"], stdin=patch.encode())
        assert result.code == 0, result.stderr
        return await fresh.changes()


def test_a_digest_tells_change_sets_apart():
    one = Change(path=Path("a"), kind="file", content=b"x")
    others = (
        replace(one, path=Path("b")),
        replace(one, kind="symlink"),
        replace(one, content=b"y"),
        replace(one, mode=0o755),
    )
    assert len({digest([change]) for change in (one, *others)}) == 5
    assert digest([one, others[0]]) == digest([others[0], one])
