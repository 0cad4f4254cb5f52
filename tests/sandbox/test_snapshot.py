"""Clean repositories, made by real git from repositories that hide the fix wherever git can keep one."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox.base import Box, BoxSpec, Change, Sandbox, SandboxError
from sandbox.snapshot import Snapshot, snapshot

FIX = "THE FIX\n"


def git(folder: Path, *args: str, stdin: bytes = b"") -> str:
    """Real git as a user would run it, without this machine's settings."""
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
    name = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")
    done = subprocess.run(["git", *name, *args], cwd=folder, input=stdin, env=env, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode(errors="surrogateescape").strip()


def commit(folder: Path, message: str) -> str:
    git(folder, "add", "-A", "-f")
    git(folder, "commit", "-q", "--allow-empty", "-m", message)
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A repository with one commit, tagged `base`."""
    folder = tmp_path / "source"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "trunk")
    (folder / "pkg").mkdir()
    (folder / "pkg" / "a.py").write_text("A = 1\n")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("pkg/a.py")
    commit(folder, "base")
    git(folder, "tag", "base")
    return folder


def hide_the_fix(folder: Path) -> set[str]:
    """Puts later work where SWE-bench images had it; returns the ids that must not be found."""
    file = folder / "pkg" / "a.py"
    git(folder, "checkout", "-q", "-b", "later")
    file.write_text(FIX)
    ids = {commit(folder, "fix"), git(folder, "rev-parse", "HEAD^{tree}"), git(folder, "rev-parse", "HEAD:pkg/a.py")}
    git(folder, "tag", "-a", "v2", "-m", "with the fix")
    git(folder, "checkout", "-q", "trunk")
    file.write_text(FIX + "stashed\n")
    git(folder, "stash", "-q")
    ids |= {git(folder, "rev-parse", "stash@{0}"), git(folder, "rev-parse", "stash@{0}:pkg/a.py")}
    file.write_text(FIX + "reset away\n")
    ids |= {commit(folder, "lost"), git(folder, "rev-parse", "HEAD:pkg/a.py")}
    git(folder, "reset", "-q", "--hard", "base")
    ids.add(git(folder, "hash-object", "-w", "--stdin", stdin=(FIX + "dangling").encode()))
    git(folder, "remote", "add", "origin", str(folder))
    git(folder, "fetch", "-q", "origin", "later")
    git(folder, "update-ref", "ORIG_HEAD", "later")
    git(folder, "update-ref", "refs/remotes/origin/later", "later")
    assert (folder / ".git" / "FETCH_HEAD").exists() and (folder / ".git" / "ORIG_HEAD").exists()
    return ids


def everything(folder: Path) -> str:
    """All that git would show of a repository."""
    commands = (
        ("rev-list", "--all", "--reflog", "--objects"),
        ("fsck", "--unreachable", "--no-reflogs", "--full", "--strict"),
        ("cat-file", "--batch-all-objects", "--batch-check"),
        ("for-each-ref",),
        ("remote", "-v"),
        ("reflog", "--all"),
        ("config", "--local", "--list"),
    )
    return "\n".join(git(folder, *command) for command in commands)


def files(folder: Path) -> dict[bytes, tuple[int, bytes]]:
    """Every file and link outside .git: whether it is a link or executable, and its bytes."""
    rows = {}
    for path in folder.rglob("*"):
        if path.is_symlink():
            rows[os.fsencode(path.relative_to(folder))] = (2, os.fsencode(path.readlink()))
        elif path.is_file() and ".git" not in path.relative_to(folder).parts:
            rows[os.fsencode(path.relative_to(folder))] = (path.stat().st_mode >> 6 & 1, path.read_bytes())
    return rows


def blobs(folder: Path, name: str) -> dict[bytes, tuple[int, bytes]]:
    """The same, as the commit has it."""
    rows = {}
    for row in git(folder, "ls-tree", "-r", "-z", name).split("\0")[:-1]:
        meta, _, path = row.partition("\t")
        mode, kind, ident = meta.split()
        if kind == "blob":
            raw = subprocess.run(["git", "cat-file", "blob", ident], cwd=folder, capture_output=True, check=True).stdout
            rows[os.fsencode(path)] = ({"100644": 0, "100755": 1, "120000": 2}[mode], raw)
    return rows


def test_nothing_later_than_the_base_commit_can_be_found(source: Path, tmp_path: Path):
    ids = hide_the_fix(source)
    assert all(ident in everything(source) for ident in ids), "the recipe must hide it where git can find it"
    made = snapshot(source, "base", tmp_path / "out")
    seen = everything(tmp_path / "out")
    assert not [ident for ident in ids if ident in seen]
    assert "unreachable" not in seen and "dangling" not in seen and "remote" not in seen
    assert git(tmp_path / "out", "for-each-ref", "--format=%(refname)") == "refs/heads/main"
    assert git(tmp_path / "out", "rev-list", "--all", "--reflog") == made.commit
    with_fix = [path for path in (tmp_path / "out").rglob("*") if path.is_file() and b"FIX" in path.read_bytes()]
    assert with_fix == []
    assert sorted(p.name for p in (tmp_path / "out" / ".git").iterdir()) == [
        "HEAD", "config", "index", "info", "objects", "refs"
    ]  # fmt: skip


def test_the_tree_is_the_commits_and_git_agrees(source: Path, tmp_path: Path):
    hide_the_fix(source)
    (source / "pkg" / "a.py").write_text("not committed\n")
    out = tmp_path / "out"
    snapshot(source, "base", out)
    assert files(out) == blobs(source, "base")
    assert git(out, "status", "--porcelain", "--ignored") == ""
    (out / "pkg" / "a.py").write_text("A = 2\n")
    assert "-A = 1\n+A = 2" in git(out, "diff")


def test_the_commit_is_the_same_wherever_and_whenever_it_is_made(source: Path, tmp_path: Path):
    one = snapshot(source, "base", tmp_path / "one")
    git(source, "commit", "-q", "--amend", "-m", "another message")
    git(tmp_path, "clone", "-q", "--bare", str(source), "bare")
    old = os.umask(0o077)
    try:
        two = snapshot(tmp_path / "bare", "HEAD", tmp_path / "two")
    finally:
        os.umask(old)
    # Noted once from git 2.39: another git, another machine must come to the same.
    assert one == two == Snapshot(commit="9ed0474110223e66234a6ef9630ded2db20974ec", submodules=())
    for path in (tmp_path / "two", *(tmp_path / "two").rglob("*")):
        mode = path.lstat().st_mode & 0o777
        assert mode in ((0o755,) if path.is_dir() else (0o644, 0o755, 0o444, 0o777)), path


ODD = [b"a\xff", b"new\nline", b'quo"te', b"-rf", b"tab\t", b"back\\slash", b" space ", b"Case", b"case", "ü".encode()]


def test_odd_names_line_ends_attributes_and_pointers_come_out_as_they_are(source: Path, tmp_path: Path):
    for name in ODD:
        (source / os.fsdecode(name)).write_bytes(name)
    (source / "crlf.txt").write_bytes(b"one\r\ntwo\nthree\r\n")
    (source / "utf16.txt").write_bytes(b"text")
    (source / "ident.c").write_bytes(b"$Id$ $Format:%H$\n")
    (source / "big.bin").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    (source / "ignored.log").write_bytes(b"tracked all the same\n")
    (source / "loop").symlink_to("loop")
    (source / "out").symlink_to("/etc/passwd")
    commit(source, "odd files")
    (source / ".gitignore").write_text("*.log\n")
    (source / ".gitattributes").write_text(
        "*.txt text eol=crlf\nutf16.txt working-tree-encoding=UTF-16\nident.c ident export-subst\n"
        "*.bin filter=lfs diff=lfs -text\npkg export-ignore\n"
    )
    # What was committed before its attributes: git itself would now show some files as changed.
    git(source, "add", ".gitignore", ".gitattributes")
    git(source, "commit", "-q", "-m", "attributes")
    out = tmp_path / "out"
    snapshot(source, "HEAD", out)
    assert files(out) == blobs(source, "HEAD")
    assert {*ODD} < files(out).keys()
    for path in out.rglob("*"):
        if path.is_file() and not path.is_symlink() and ".git" not in path.parts:
            os.utime(path)
    assert git(out, "status", "--porcelain") == ""


def test_programs_of_the_source_do_not_run(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (source / ".gitattributes").write_text("* filter=evil diff=evil\n")
    commit(source, "attributes")
    trap = tmp_path / "trap"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/sprung\ncat\n")
    trap.chmod(0o755)
    for hook in ("post-checkout", "post-index-change", "reference-transaction", "pre-commit"):
        (source / ".git" / "hooks").mkdir(exist_ok=True)
        (source / ".git" / "hooks" / hook).symlink_to(trap)
    for key in ("core.fsmonitor", "filter.evil.smudge", "filter.evil.clean", "diff.evil.textconv", "core.sshCommand"):
        git(source, "config", key, str(trap))
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text(f"[core]\n\tfsmonitor = {trap}\n\thooksPath = {source}/.git/hooks\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    (tmp_path / "sprung").unlink(missing_ok=True)
    snapshot(source, "HEAD", tmp_path / "out")
    assert not (tmp_path / "sprung").exists()


def test_a_linked_work_tree_a_shallow_clone_and_sha256_are_read(source: Path, tmp_path: Path):
    hide_the_fix(source)
    git(source, "worktree", "add", "-q", str(tmp_path / "linked"), "base")
    git(tmp_path, "clone", "-q", "--depth", "1", "--branch", "base", f"file://{source}", "shallow")
    wanted = snapshot(source, "base", tmp_path / "0")
    assert snapshot(tmp_path / "linked", "HEAD", tmp_path / "1") == wanted
    assert snapshot(tmp_path / "shallow", "HEAD", tmp_path / "2") == wanted
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q", "--object-format=sha256")
    (other / "f").write_text("x")
    commit(other, "x")
    assert len(snapshot(other, "HEAD", tmp_path / "3").commit) == 64
    assert git(tmp_path / "3", "status", "--porcelain") == "" and files(tmp_path / "3") == {b"f": (0, b"x")}


def test_objects_borrowed_by_the_source_are_copied(source: Path, tmp_path: Path):
    odd = tmp_path / 'a "b:c'
    git(tmp_path, "clone", "-q", "--shared", str(source), str(odd))
    snapshot(odd, "HEAD", tmp_path / "out")
    assert not list((tmp_path / "out").rglob("alternates"))
    source.rename(tmp_path / "gone")
    assert git(tmp_path / "out", "fsck", "--full") == "" and files(tmp_path / "out")


def test_submodules_are_empty_folders_and_are_named(source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    git(source, "submodule", "--quiet", "add", str(source), "lib/sub")
    commit(source, "with a submodule")
    made = snapshot(source, "HEAD", tmp_path / "out")
    assert made.submodules == (Path("lib/sub"),) and "lib/sub" in caplog.text
    assert list((tmp_path / "out" / "lib" / "sub").iterdir()) == []
    assert git(tmp_path / "out", "status", "--porcelain") == ""


def test_what_cannot_be_is_said_and_leaves_nothing(source: Path, tmp_path: Path):
    (tmp_path / "plain").mkdir()
    out = tmp_path / "new" / "out"
    for repository, name, told in (
        (tmp_path / "none", "HEAD", "repository="),
        (tmp_path / "plain", "HEAD", "not a git repository"),
        (source / "pkg", "HEAD", "not a git repository"),
        (source, "f" * 40, "no such commit"),
        (source, "HEAD:pkg", "no such commit"),
        (source, "--all", "no such commit"),
    ):
        with pytest.raises(ValueError, match=told):
            snapshot(repository, name, out)
    with pytest.raises(ValueError, match="exists already"):
        snapshot(source, "base", tmp_path / "plain")
    assert not out.parent.exists()


def test_a_clone_without_all_objects_fetches_nothing_and_says_so(source: Path, tmp_path: Path):
    git(source, "config", "uploadpack.allowFilter", "true")
    git(tmp_path, "clone", "-q", "--no-checkout", "--filter=blob:none", f"file://{source}", "partial")
    with pytest.raises(SandboxError, match="git fetch --refetch"):
        snapshot(tmp_path / "partial", "HEAD", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["partial", "source"]


def test_a_tree_made_to_leave_its_folder_is_refused(source: Path, tmp_path: Path):
    blob = git(source, "hash-object", "-w", "--stdin", stdin=b"x")
    inner = git(source, "mktree", stdin=f"100644 blob {blob}\tconfig\n".encode())
    for name in ("..", ".git", ".GIT"):
        tree = git(source, "mktree", stdin=f"040000 tree {inner}\t{name}\n".encode())
        bad = git(source, "commit-tree", tree, "-m", "bad")
        with pytest.raises(SandboxError, match=r"read-tree|invalid path"):
            snapshot(source, bad, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_killed_run_leaves_no_folder_of_that_name_and_the_next_clears_up(source: Path, tmp_path: Path):
    for number in range(2000):
        (source / f"file{number}").write_text(str(number))
    commit(source, "many")
    out = tmp_path / "out"
    script = "import sys; from pathlib import Path; from sandbox.snapshot import snapshot; "
    script += "snapshot(Path(sys.argv[1]), 'HEAD', Path(sys.argv[2]))"
    argv = [sys.executable, "-c", script, str(source), str(out)]
    process = subprocess.Popen(argv, cwd=Path(__file__).parents[2], start_new_session=True)
    end = time.monotonic() + 30
    while not list(tmp_path.glob(".out.*/file1")) and time.monotonic() < end:
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not out.exists() and len(list(tmp_path.glob(".out.*"))) == 1
    snapshot(source, "HEAD", out)
    assert list(tmp_path.glob(".out.*")) == [] and len(files(out)) == 2003


async def shell(box: Box, line: str) -> str:
    result = await box.exec(["sh", "-c", line])
    assert result.code == 0, result.stderr
    return result.stdout.decode()


async def test_git_works_in_a_box_and_the_agents_commits_do_not_matter(
    source: Path, tmp_path: Path, sandbox: Sandbox, spec: BoxSpec
):
    clean = tmp_path / "clean"
    snapshot(source, "base", clean)
    async with sandbox.open(replace(spec, base=clean)) as box:
        assert await shell(box, "git status --porcelain") == ""
        before = await box.changes()
        assert [change.path for change in before if ".git" not in change.path.parts] == []
        assert "+A = 2" in await shell(box, "echo 'A = 2' > pkg/a.py && git diff")
        own = "git -c user.name=x -c user.email=x@y"
        await shell(box, f"{own} commit -qam mine && git gc -q && git stash list && git checkout -q -b b")
        changes = await box.changes()
    outside = [change for change in changes if ".git" not in change.path.parts]
    assert outside == [Change(path=Path("pkg/a.py"), kind="file", content=b"A = 2\n")]
