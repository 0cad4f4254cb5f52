"""What holds for boxes by Podman alone: its service, its users, and what it says where something is missing."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox import container, podmanconf, service, wire
from sandbox.base import BoxSpec, Limits, SandboxError, StoredImage, User
from sandbox.container import OWNER_LABEL
from sandbox.engine import KEEPER_ID
from sandbox.inside import Inside
from sandbox.podman import FIRST_ID, Podman, engine
from sandbox.profile import narrowed
from tests.sandbox.conftest import containers, remains

pytestmark = pytest.mark.podman
ROOT = Path(__file__).parent.parent.parent
TRAP = 'sleep 300 & setsid sleep 300 & trap "" TERM HUP INT; while :; do :; done'
OWNER = """
import asyncio, sys
from pathlib import Path
from sandbox.base import BoxSpec, StoredImage
from sandbox.podman import Podman, engine

async def main(storage, state, base):
    podman = Podman(image=StoredImage(name="localhost/lego-base:1"), storage=Path(storage), state=Path(state))
    async with podman.open(BoxSpec(base=Path(base))) as box:
        print(box.inside.pid, engine(podman).service.pid, flush=True)
        await box.exec(["sleep", "300"])

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def podman(podman_sandbox: Podman) -> Iterator[Podman]:
    yield podman_sandbox
    assert remains(podman_sandbox.state_folder()) == [] and containers(podman_sandbox) == []


@pytest.fixture
def boxed(base: Path) -> BoxSpec:
    return BoxSpec(base=base)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def statuses(inside: Inside, program: str) -> list[str]:
    """What /proc tells of the box's commands that have become this program."""
    found = [Path(f"/proc/{pid}/status").read_text() for pid in inside.commands()]
    return [status for status in found if status.startswith(f"Name:\t{program}\n")]


async def life_of(podman: Podman, spec: BoxSpec) -> None:
    async with podman.open(spec) as box:
        await box.exec(["true"])


async def until(condition, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.05)
    return True


async def test_fifty_timeouts_leave_no_process_and_the_next_command_runs(podman: Podman, boxed: BoxSpec):
    async with podman.open(boxed) as box:
        for _ in range(50):
            late = await box.exec(["sh", "-c", f"echo begun; {TRAP}"], timeout_s=0.3)
            assert (late.code, late.timed_out, late.seconds < 5) == (None, True, True)
            assert list(box.inside.commands()) == []
        count = await box.exec(["sh", "-c", "echo /proc/[0-9]*"])
        assert (count.code, len(count.stdout.split())) == (0, 3)  # init, `sleep` and this shell


async def test_a_command_survives_the_death_of_the_service_and_its_code_is_exact(podman: Podman, boxed: BoxSpec):
    running = engine(podman).service
    async with podman.open(boxed) as box:
        task = asyncio.create_task(box.exec(["sh", "-c", "echo a; sleep 1; echo b >&2; exit 32"]))
        await asyncio.sleep(0.5)
        first = running.pid
        assert first
        os.kill(first, signal.SIGKILL)
        result = await task
        assert (result.code, result.stdout, result.stderr) == (32, b"a\n", b"b\n")
        assert (await box.exec(["echo", "on"])).stdout == b"on\n"
        assert running.pid not in (None, first)


async def test_open_boxes_outlive_the_service_again_and_again(
    podman: Podman, boxed: BoxSpec, monkeypatch: pytest.MonkeyPatch
):
    running = engine(podman).service
    over = asyncio.Event()

    async def killer() -> None:
        while not over.is_set():
            await asyncio.sleep(0.7)
            if pid := running.pid:
                os.kill(pid, signal.SIGKILL)

    async def life(number: int) -> None:
        async with podman.open(boxed) as box:
            await together.wait()
            for turn in range(4):
                try:
                    assert (await box.exec(["sh", "-c", f"exit {number + turn}"])).code == number + turn
                except SandboxError as error:  # killed while it starts a command, conmon goes too
                    assert "does not tell how a command has ended" in str(error)

    monkeypatch.setattr(container, "EXIT_S", 1.0)
    together = asyncio.Barrier(3)
    async with asyncio.TaskGroup() as group:
        lives = [group.create_task(life(number)) for number in (1, 2)]
        await together.wait()
        group.create_task(killer())
        await asyncio.wait(lives)
        over.set()


async def test_a_box_whose_opening_meets_the_death_of_the_service_leaves_nothing(podman: Podman, boxed: BoxSpec):
    running = engine(podman).service
    for delay_ms in (1, 5, 10, 15, 20, 30, 50, 80, 120):
        running.socket_path()
        task = asyncio.create_task(life_of(podman, boxed))
        await asyncio.sleep(delay_ms / 1000)
        if pid := running.pid:
            os.kill(pid, signal.SIGKILL)
        with suppress(SandboxError):
            await task
    assert containers(podman) == []


async def test_a_killed_owner_takes_its_service_along_and_reap_removes_its_box_alone(
    podman: Podman, boxed: BoxSpec, base: Path
):
    command = [sys.executable, "-c", OWNER, str(podman.storage), str(podman.state), str(base)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    assert owner.stdout
    inside, its_service = map(int, owner.stdout.readline().split())
    async with podman.open(boxed) as living:
        owner.kill()
        owner.wait()
        assert await until(lambda: not alive(its_service)) and alive(inside)
        assert len(await engine(podman).listed(OWNER_LABEL)) == 2
        assert await podman.reap() == 1
        assert not alive(inside)
        assert (await living.exec(["echo", "lives"])).stdout == b"lives\n"
        assert await podman.reap() == 0


def test_an_ordinary_exit_ends_the_service_and_removes_its_files(podman: Podman):
    code = OWNER.replace('await box.exec(["sleep", "300"])', "pass")
    before = set(service._home().iterdir())
    done = subprocess.run(
        [sys.executable, "-c", code, str(podman.storage), str(podman.state), tempfile.gettempdir()],
        capture_output=True, text=True, cwd=ROOT, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not alive(int(done.stdout.split()[1])) and set(service._home().iterdir()) <= before


async def test_a_box_ends_itself_after_its_deadline_when_nobody_ends_it(
    podman: Podman, boxed: BoxSpec, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(container, "GRACE_S", -58.0)
    async with podman.open(replace(boxed, limits=Limits(deadline_s=60))) as box:
        begun = time.monotonic()
        with pytest.raises(SandboxError, match="ended"):
            await box.exec(["sleep", "300"])
        assert time.monotonic() - begun < 10
        with pytest.raises(SandboxError, match="ended"):
            await box.exec(["true"])
        assert await box.changes() == ()


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user has other ids")
async def test_processes_of_a_box_have_ids_that_nobody_has_on_this_host(podman: Podman, boxed: BoxSpec, base: Path):
    async with podman.open(boxed) as box:
        ids: dict[User, int] = {"agent": FIRST_ID + 1000, "root": FIRST_ID}
        for user, uid in ids.items():
            task = asyncio.create_task(box.exec(["sleep", "300"], user=user, timeout_s=1))
            assert await until(lambda: statuses(box.inside, "sleep"))
            (status,) = statuses(box.inside, "sleep")
            assert f"Uid:\t{uid}\t{uid}" in status and "CapBnd:\t0000000000000000" in status
            assert "NoNewPrivs:\t1" in status and "Seccomp:\t2" in status
            assert (await task).timed_out
        assert f"Uid:\t{FIRST_ID + KEEPER_ID}" in Path(f"/proc/{box.inside.pid}/status").read_text()
        assert (await box.exec(["sh", "-c", "echo x > README; rm -r pkg; touch new; stat -c %U . README"])).code == 0
    assert (base / "README").read_text() == "read me\n" and (base / "pkg").exists()


async def test_the_boxs_own_root_cannot_end_it_and_reads_no_file_of_agents_alone(podman: Podman, boxed: BoxSpec):
    async with podman.open(boxed) as box:
        assert (await box.exec(["sh", "-c", "(umask 077; echo secret > /tmp/mine); id -u"])).stdout == b"1000\n"
        root = await box.exec(["sh", "-c", "id -u; cat /tmp/mine; kill -9 1; kill -9 -1"], user="root")
        assert root.stdout == b"0\n" and b"denied" in root.stderr
        assert (await box.exec(["echo", "lives"])).stdout == b"lives\n"


async def test_a_service_that_runs_already_is_used_and_left_running(podman: Podman, boxed: BoxSpec):
    path = engine(podman).service.socket_path()
    other = replace(podman, socket=path, storage=None)
    async with other.open(boxed) as box:
        assert (await box.exec(["sh", "-c", "exit 3"])).code == 3
    assert engine(other).service.pid is None and engine(podman).service.pid


async def test_labels_of_a_spec_are_on_the_container(podman: Podman, boxed: BoxSpec):
    async with podman.open(replace(boxed, labels={"run": "seven"})):
        assert [one.labels["run"] for one in await engine(podman).listed("run")] == ["seven"]


async def test_many_boxes_at_once(podman: Podman, boxed: BoxSpec):
    together = asyncio.Barrier(16)

    async def life(number: int) -> None:
        async with podman.open(boxed) as box:
            assert (await box.exec(["sh", "-c", f"echo {number}"])).stdout == f"{number}\n".encode()
            await together.wait()
            assert (await box.exec(["sh", "-c", f"exit {number}"])).code == number

    async with asyncio.TaskGroup() as group:
        for number in range(16):
            group.create_task(life(number))


async def test_an_image_without_a_shell_is_named(podman: Podman, boxed: BoxSpec, tmp_path: Path):
    (tmp_path / "top").mkdir()
    (tmp_path / "top" / "file").write_text("")
    subprocess.run(["tar", "-C", tmp_path / "top", "-cf", tmp_path / "empty.tar", "."], check=True)
    await engine(podman).load(tmp_path / "empty.tar", "localhost/empty:1")
    with pytest.raises(SandboxError, match="sleep"):
        async with podman.open(replace(boxed, image=StoredImage(name="localhost/empty:1"))) as box:
            await box.exec(["true"])


def test_a_box_without_an_image_is_refused(boxed: BoxSpec):
    with pytest.raises(SandboxError, match=r"sandbox\.image: None, and a task without an image; Podman wants"):
        Podman().open(boxed)


async def test_where_podman_is_not_installed_the_message_has_the_command_that_gives_it(
    boxed: BoxSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r"Podman is not installed: apt-get install .*podman"):
        async with Podman(image=StoredImage(name="x"), storage=tmp_path / "none", runtime="runc").open(boxed):
            pass


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo podman version 3.4.4", r"podman version 3\.4\.4; want 4\.3"),
        ('[ "$1" = --version ] && echo podman version 4.3.1 || { echo no runtime >&2; exit 125; }', "no runtime"),
        ('[ "$1" = --version ] && echo podman version 4.3.1 || { echo newuidmap: no >&2; exit 1; }', "add-subuids"),
    ],
)
async def test_a_podman_that_cannot_serve_is_told_with_its_own_words(
    boxed: BoxSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
):
    (tmp_path / "podman").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "podman").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxError, match=words):
        async with Podman(image=StoredImage(name="x"), storage=tmp_path / "none").open(boxed):
            pass


async def test_a_socket_where_nobody_answers_is_told(boxed: BoxSpec, tmp_path: Path):
    with pytest.raises(SandboxError, match=r"no Podman service answers there.*podman system service --time=0"):
        async with Podman(image=StoredImage(name="x"), socket=tmp_path / "none.sock").open(boxed):
            pass


async def test_a_service_that_does_not_answer_is_not_asked_again_and_again(
    boxed: BoxSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(wire, "CALL_S", 0.3)
    silent = socket.socket(socket.AF_UNIX)
    silent.bind(str(tmp_path / "silent.sock"))
    silent.listen(100)
    begun = time.monotonic()
    with silent, pytest.raises(SandboxError, match="does not answer in time"):
        async with Podman(image=StoredImage(name="x"), socket=tmp_path / "silent.sock").open(boxed):
            pass
    assert time.monotonic() - begun < 1.5


def test_the_seccomp_profile_keeps_the_rest_of_podmans_own():
    rules = [
        {"names": ["read", "clone", "mount"], "action": "SCMP_ACT_ALLOW"},
        {"names": ["bpf"], "action": "SCMP_ACT_ALLOW", "includes": {"caps": ["CAP_SYS_ADMIN"]}},
    ]
    narrow = narrowed({"defaultAction": "SCMP_ACT_ERRNO", "archMap": [], "syscalls": rules})
    assert narrow["defaultAction"] == "SCMP_ACT_ERRNO" and narrow["syscalls"][0]["names"] == ["read"]
    refused = [name for rule in narrow["syscalls"] if rule["action"] == "SCMP_ACT_ERRNO" for name in rule["names"]]
    assert {"mount", "bpf", "unshare", "clone3", "keyctl"} <= set(refused) and "clone" not in refused


def test_crun_is_not_taken_where_it_refuses_the_hosts_control_groups(monkeypatch: pytest.MonkeyPatch):
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        assert podmanconf.default_runtime() is None
        return
    assert podmanconf.default_runtime() == "runc"
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match=r"apt-get install .* runc"):
        podmanconf.default_runtime()
