"""What container boxes share and no engine is needed for: scripts, streams, owners, work seen to its end."""

import asyncio
import os
import stat
import subprocess
from pathlib import Path

import pytest

from sandbox.base import BoxSpec
from sandbox.cgroup import groups_of
from sandbox.container import BOX_LABEL, check
from sandbox.engine import AGENT_ID
from sandbox.exchange import Exchange
from sandbox.mounts import IDS, bind_mapped, mount_overlay, owners_map, unmount
from sandbox.script import Streams, command_script, get_script, put_script
from sandbox.unbroken import unbroken

ROOT = os.geteuid() == 0
ODD = ["", " ", "'", '"', "$HOME", "`id`", "-n", "a\nb", "\\", "*", "é", os.fsdecode(b"\xff\xfe"), "!", "~", "#x"]


def ran(tmp_path: Path, script: bytes, stdin: bytes = b"") -> tuple[int, bytes, bytes]:
    """Exit code, output and errors of a script, by files in the places of pipes."""
    (tmp_path / "in").write_bytes(stdin)
    (tmp_path / "run").write_bytes(script)
    done = subprocess.run(["/bin/sh", tmp_path / "run"], env={"PATH": os.defpath}, timeout=20)
    return done.returncode, (tmp_path / "out").read_bytes(), (tmp_path / "err").read_bytes()


@pytest.fixture
def streams(tmp_path: Path) -> Streams:
    nowhere = Path("/dev/null")
    return Streams(stdin=tmp_path / "in", stdout=tmp_path / "out", stderr=tmp_path / "err", taken=nowhere, go=nowhere)


def test_words_of_any_bytes_arrive_as_they_are(tmp_path: Path, streams: Streams):
    script = command_script(streams, ["printf", "<%s>", *ODD], {}, tmp_path)
    assert ran(tmp_path, script)[:2] == (0, b"".join(b"<%s>" % os.fsencode(word) for word in ODD))


@pytest.mark.parametrize("name", ["NAME", "a.b", "with-dash", "1x"])
@pytest.mark.parametrize("value", ["", "it's", "a\nb", os.fsdecode(b"\xff")])
def test_variables_of_any_name_and_value_arrive(tmp_path: Path, streams: Streams, name: str, value: str):
    code, out, _ = ran(tmp_path, command_script(streams, ["env", "-0"], {name: value}, tmp_path))
    assert code == 0 and os.fsencode(f"{name}={value}") in out.split(b"\0")


def test_a_program_with_an_equals_sign_is_refused_only_where_it_would_be_taken_for_a_variable(streams: Streams):
    assert command_script(streams, ["a=b"], {"X": "1"}, Path("/"))
    with pytest.raises(ValueError, match=r"argv\[0\]='a=b'"):
        command_script(streams, ["a=b"], {"x.y": "1"}, Path("/"))


@pytest.mark.parametrize(
    ("argv", "cwd", "code"), [(["no-such"], "/", 127), (["/etc"], "/", 126), (["true"], "/no", 127)]
)
def test_what_cannot_be_run_is_told_as_shells_do(tmp_path: Path, streams: Streams, argv, cwd: str, code: int):
    found, out, err = ran(tmp_path, command_script(streams, argv, {}, Path(cwd)))
    assert (found, out) == (code, b"") and err


def test_a_folder_that_is_a_file_cannot_be_worked_in(tmp_path: Path, streams: Streams):
    (tmp_path / "file").write_text("")
    assert ran(tmp_path, command_script(streams, ["true"], {}, tmp_path / "file"))[0] == 126


def test_a_command_is_the_first_to_go_when_memory_runs_out(tmp_path: Path, streams: Streams):
    script = command_script(streams, ["cat", "/proc/self/oom_score_adj"], {}, tmp_path)
    assert int(ran(tmp_path, script)[1]) == 500


def test_a_put_replaces_links_and_folders_and_leaves_no_draft(tmp_path: Path, streams: Streams):
    top = tmp_path / "top"
    (top / "folder" / "deep").mkdir(parents=True)
    (top / "victim").write_text("as it was")
    (top / "link").symlink_to("victim")
    for name in ("folder", "link", "new/it's", "-n"):
        assert ran(tmp_path, put_script(streams, top / name, 0o750), b"\0\xff")[0] == 0
        assert (top / name).read_bytes() == b"\0\xff" and stat.S_IMODE((top / name).lstat().st_mode) == 0o750
    assert (top / "victim").read_text() == "as it was"
    assert sorted(path.name for path in top.iterdir()) == ["-n", "folder", "link", "new", "victim"]


def test_a_put_that_fails_says_why_and_leaves_no_draft(tmp_path: Path, streams: Streams):
    (tmp_path / "file").write_text("")
    code, _, err = ran(tmp_path, put_script(streams, tmp_path / "file" / "x", 0o644), b"x")
    assert code != 0 and b"file" in err
    full = Path("/dev/full")
    assert ran(tmp_path, put_script(streams, full / "x", 0o644), b"x")[0] != 0


@pytest.mark.parametrize(("name", "code"), [("none", 2), ("folder", 21), ("pipe", 21), ("file", 0), ("link", 0)])
def test_a_get_reads_regular_files_and_a_byte_more_than_it_may(tmp_path: Path, streams: Streams, name: str, code: int):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    assert ran(tmp_path, get_script(streams, tmp_path / name, 3))[:2] == (code, b"" if code else b"1234")


async def test_a_stream_is_read_to_what_was_written_whoever_still_holds_it(tmp_path: Path):
    exchange = Exchange(tmp_path, None)
    with exchange.opened(lambda streams: b"script", "agent", b"input", 4) as files:
        folder = tmp_path / files.script.parent.name
        assert (folder / "in").read_bytes() == b"input" and (folder / "run").read_bytes() == b"script"
        for text in ("ab", "cdef"):
            subprocess.run(["sh", "-c", f"printf {text} >{folder}/out"], check=True, timeout=5)
        holder = subprocess.Popen(["sleep", "60"], stdout=(folder / "out").open("wb"))
        try:
            assert files.stdout.finish() == b"abcd" and files.stdout.truncated
            assert files.stderr.finish() == b"" and not files.stderr.truncated
        finally:
            holder.kill()
            holder.wait()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not ROOT, reason="only root can give files away")
@pytest.mark.parametrize(("user", "owner"), [("agent", 301000), ("root", 300000)])
async def test_files_of_a_command_are_its_users_alone(tmp_path: Path, user, owner: int):
    with Exchange(tmp_path, 300000).opened(lambda streams: b"", user, b"", 9) as files:
        for path in (tmp_path / files.script.parent.name).iterdir():
            assert path.stat().st_uid == owner and path.stat().st_mode & 0o077 == 0


def test_owners_are_swapped_so_that_roots_files_are_the_agents():
    rows = [tuple(map(int, line.split())) for line in owners_map(200000).splitlines()]
    mapped = {disk + i: host + i for disk, host, count in rows for i in range(count)}
    assert len(mapped) == len(set(mapped.values())) == IDS
    assert mapped[0] == 200000 + AGENT_ID and mapped[AGENT_ID] == 200000 and mapped[33] == 200033


@pytest.mark.skipif(not ROOT, reason="only root can mount")
def test_a_base_of_root_is_shown_as_the_agents_and_cannot_be_changed_itself(tmp_path: Path):
    for name in ("base/deep", "lower", "rw/upper", "rw/work", "with, and:\\ in it"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "base" / "file").write_text("base")
    lower, merged = tmp_path / "lower", tmp_path / "with, and:\\ in it"
    try:
        bind_mapped(tmp_path / "base", lower, 300000)
        assert (lower / "file").stat().st_uid == 300000 + AGENT_ID and (tmp_path / "base" / "file").stat().st_uid == 0
        with pytest.raises(OSError, match="Read-only"):
            (lower / "file").write_text("changed")
        mount_overlay(merged, lower=lower, upper=tmp_path / "rw" / "upper", work=tmp_path / "rw" / "work")
        (merged / "file").write_text("changed")
        assert (tmp_path / "base" / "file").read_text() == "base"
        assert (tmp_path / "rw" / "upper" / "file").stat().st_uid == 300000 + AGENT_ID
    finally:
        for place in (merged, lower):
            unmount(place)


@pytest.mark.skipif(not ROOT, reason="only root can mount")
def test_paths_with_commas_and_colons_can_be_mounted(tmp_path: Path):
    top = tmp_path / "a,b:c\\d"
    for name in ("lower", "upper", "work", "merged"):
        (top / name).mkdir(parents=True)
    try:
        mount_overlay(top / "merged", lower=top / "lower", upper=top / "upper", work=top / "work")
        (top / "merged" / "x").write_text("")
        assert (top / "upper" / "x").exists()
    finally:
        unmount(top / "merged")


@pytest.mark.skipif(not ROOT, reason="only root can mount")
def test_what_a_link_leads_to_is_not_unmounted(tmp_path: Path):
    (tmp_path / "mounted").mkdir()
    (tmp_path / "link").symlink_to("mounted")
    bind_mapped(tmp_path, tmp_path / "mounted", 300000)
    try:
        unmount(tmp_path / "link")
        assert (tmp_path / "mounted").is_mount()
    finally:
        unmount(tmp_path / "mounted")


def test_groups_that_are_ours_too_are_not_taken_for_a_containers():
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            assert groups_of(process.pid).folders == {}
        finally:
            process.kill()


async def test_a_cancellation_waits_for_work_that_must_be_seen_to_its_end():
    done = asyncio.Event()

    async def work() -> str:
        await asyncio.sleep(0.1)
        done.set()
        return "result"

    task = asyncio.create_task(unbroken(work()))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.sleep(0.01)
    task.cancel()
    assert not done.is_set() and not task.done()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done.is_set() and await unbroken(work()) == "result"


def test_labels_of_ours_cannot_be_given(tmp_path: Path):
    check(BoxSpec(base=tmp_path, labels={"run": "7"}))
    with pytest.raises(ValueError, match=r"labels: 'lego\.box'"):
        check(BoxSpec(base=tmp_path, labels={BOX_LABEL: "x"}))
