import asyncio
import os
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox.base import Limits, SandboxError
from sandbox.docker import SOCKET, DockerEngine, _first_id, connected, unreachable
from sandbox.engine import AGENT_ID, KEEPER_ID, Bind, Container, Exec, ExecState, Tmpfs
from tools.base_image import NAME

pytestmark = pytest.mark.docker


def description(shared: Path, **changes) -> Container:
    """A container that shows a host folder at /shared and ends after a minute."""
    one = Container(
        name="lego-test",
        image=NAME,
        argv=("sleep", "60"),
        env={"GIVEN": "to all"},
        binds=(Bind(source=shared, target=Path("/shared"), writable=True),),
        overlay=None,
        tmpfs=(Tmpfs(target=Path("/tmp"), size_mib=8),),
        limits=Limits(memory_gib=0.25, pids=64, cpus=0.5),
        labels={"lego.test": "1"},
        runtime=None,
    )
    return replace(one, **changes)


@asynccontextmanager
async def started(engine: DockerEngine, container: Container) -> AsyncIterator[str]:
    made = await engine.create(container)
    try:
        await engine.start(made)
        yield made
    finally:
        await engine.remove(made)


async def run(engine: DockerEngine, container: str, script: str, user="agent") -> ExecState:
    """The end of a shell script in the container."""
    made = await engine.exec(container, Exec(argv=("sh", "-c", script), env={"MINE": "one"}, user=user))
    async with asyncio.timeout(20):
        while (state := await engine.state(made)).code is None:  # noqa: ASYNC110 - the daemon sets no event of ours
            await asyncio.sleep(0.02)
    return state


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


async def test_a_command_has_its_user_environment_and_exact_exit_code(docker_engine: DockerEngine, shared: Path):
    async with started(docker_engine, description(shared)) as container:
        for user, uid in (("agent", AGENT_ID), ("root", 0)):
            assert (await run(docker_engine, container, f"id -u > /shared/{uid}; exit 7", user)).code == 7
            assert (shared / str(uid)).read_text() == f"{uid}\n"
        assert (await run(docker_engine, container, 'echo "$GIVEN $MINE" > /shared/env; kill -9 $$')).code == 137
        assert (shared / "env").read_text() == "to all one\n"


async def test_a_command_is_known_by_the_hosts_number_while_it_runs(docker_engine: DockerEngine, shared: Path):
    async with started(docker_engine, description(shared)) as container:
        made = await docker_engine.exec(container, Exec(argv=("sleep", "30"), env={}, user="agent"))
        state = await docker_engine.state(made)
        assert state.code is None
        cmdline = Path(f"/proc/{state.pid}/cmdline")
        async with asyncio.timeout(10):
            while cmdline.read_bytes().startswith(b"runc"):  # noqa: ASYNC110 - it is about to become the command
                await asyncio.sleep(0.01)
        assert cmdline.read_bytes() == b"sleep\x0030\0"
        with pytest.raises(SandboxError, match=r"cannot run nosuch: .*not found"):
            await docker_engine.exec(container, Exec(argv=("nosuch",), env={}, user="agent"))


async def test_the_first_process_is_under_an_init_and_belongs_to_nobody(docker_engine: DockerEngine, shared: Path):
    async with started(docker_engine, description(shared)) as container:
        script = "cat /proc/1/comm; for p in /proc/[0-9]*; do stat -c %u $p; done | sort -u; (setsid true &)"
        await run(docker_engine, container, f"({script}) > /shared/out; kill -9 1 2> /shared/err", "root")
        assert (shared / "out").read_text().split() == ["docker-init", "0", str(KEEPER_ID)]
        assert "not permitted" in (shared / "err").read_text()


async def test_nothing_is_left_to_reach_out_with(docker_engine: DockerEngine, shared: Path):
    script = """
    ls /sys/class/net; grep -E 'CapEff|NoNewPrivs|Seccomp:' /proc/self/status | tr -s '\\t' ' '
    touch /usr/x 2>/dev/null || echo read-only
    cp /bin/true /tmp/mine && /tmp/mine && echo runs
    dd if=/dev/zero of=/tmp/fill bs=1M count=20 2>/dev/null; stat -c %s /tmp/fill
    """
    async with started(docker_engine, description(shared)) as container:
        await run(docker_engine, container, f"({script}) > /shared/out", "root")
    lines = (shared / "out").read_text().splitlines()
    assert lines[:6] == ["lo", "CapEff: 0000000000000000", "NoNewPrivs: 1", "Seccomp: 2", "read-only", "runs"]
    assert 7 << 20 < int(lines[6]) <= 8 << 20


async def test_memory_and_processes_are_limited(docker_engine: DockerEngine, shared: Path):
    async with started(docker_engine, description(shared)) as container:
        assert (await run(docker_engine, container, "python3 -c 'x = bytearray(1 << 30)'")).code == 137
        script = "for i in $(seq 100); do sleep 5 & done 2>&1 | grep -q 'annot fork'"
        assert (await run(docker_engine, container, script)).code == 0


async def test_volumes_of_an_image_are_not_writable_disk(docker_engine: DockerEngine, shared: Path):
    client = docker_engine.client
    made = await client.containers.container(await docker_engine.create(description(shared))).commit(
        repository="localhost/volume",
        tag="1",
        changes='VOLUME /usr/share/dict2\nENTRYPOINT ["false"]\nHEALTHCHECK CMD true',
    )
    await docker_engine.remove("lego-test")
    assert made["Id"]
    async with started(
        docker_engine, description(shared, image="localhost/volume:1", limits=Limits(disk_mib=8))
    ) as container:
        assert (await run(docker_engine, container, "head -c 20M /dev/zero > /usr/share/dict2/x", "root")).code == 1
        assert not (await client.volumes.list())["Volumes"]


async def test_containers_are_found_by_label_and_removed_quietly(docker_engine: DockerEngine, shared: Path):
    made = await docker_engine.create(description(shared))
    found = await docker_engine.listed("lego.test")
    assert [(one.id, one.labels["lego.test"]) for one in found] == [(made, "1")]
    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(docker_engine.remove(made))
    await docker_engine.remove(made)
    assert await docker_engine.listed("lego.test") == []


async def test_an_image_that_is_not_there_is_not_pulled(docker_engine: DockerEngine, shared: Path):
    with pytest.raises(SandboxError, match=r"cannot create a container of localhost/none:1: .*localhost/none:1"):
        await docker_engine.create(description(shared, image="localhost/none:1"))
    assert await docker_engine.image_id("localhost/none:1") is None


async def test_a_runtime_that_the_daemon_does_not_have_is_named(docker_engine: DockerEngine, shared: Path):
    with pytest.raises(SandboxError, match="runsc"):
        await docker_engine.create(description(shared, runtime="runsc"))


async def test_a_pull_that_fails_says_what_the_daemon_said(docker_engine: DockerEngine):
    with pytest.raises(SandboxError, match=r"cannot pull localhost:9/none:1 .*docker -H unix://.* pull localhost:9"):
        await docker_engine.pull("localhost:9/none:1", lambda done, total, what: None)


def test_a_daemon_that_remaps_users_tells_which_and_a_rootless_one_is_refused(tmp_path: Path):
    info = {"DockerRootDir": "/var/lib/docker/200000.200000", "SecurityOptions": ["name=seccomp,profile=default"]}
    assert _first_id(info, SOCKET) == 0
    assert _first_id(info | {"SecurityOptions": ["name=userns"]}, SOCKET) == 200000
    with pytest.raises(SandboxError, match=f"the Docker daemon at {SOCKET} is rootless.*use Podman"):
        _first_id(info | {"SecurityOptions": ["name=rootless"]}, SOCKET)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "no Docker daemon: there is no socket {path}; run `systemctl start docker`"),
        (lambda path: path.touch(), "no Docker daemon answers at {path}; run `systemctl restart docker`"),
    ],
    ids=["no socket", "nobody there"],
)
async def test_without_a_daemon_the_message_says_what_to_do(tmp_path: Path, make, words: str):
    path = tmp_path / "docker.sock"
    make(path)
    with pytest.raises(SandboxError, match=words.format(path=path)):
        async with connected(path):
            pass


def test_without_rights_on_the_socket_the_message_names_its_group():
    # Folders of pytest are closed to others.
    with tempfile.TemporaryDirectory() as place, socket.socket(socket.AF_UNIX) as listening:
        path = Path(place, "docker.sock")
        path.parent.chmod(0o711)
        listening.bind(str(path))
        os.chown(path, 0, 4)
        path.chmod(0o660)
        assert "run `sudo usermod -aG adm $USER`" in as_somebody_else(lambda: unreachable(path))


def as_somebody_else(call) -> str:
    """What an ordinary user gets; os.access looks at the real uid, so a process of its own is needed."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setresgid(1234, 1234, 1234)
        os.setresuid(1234, 1234, 1234)
        os.write(theirs, call().encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(theirs)
    with os.fdopen(ours) as answer:
        return answer.read()
