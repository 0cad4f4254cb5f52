"""Boxes by Podman for an ordinary user, made for the test with the subordinate ids that it needs."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.sandbox.test_ordinary_user import private_parent
from tools.base_image import TAR, ensure

pytestmark = [
    pytest.mark.podman,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a user; as one, the other Podman tests hold"),
    pytest.mark.skipif(shutil.which("useradd") is None, reason="no useradd here (apt-get install passwd)"),
    pytest.mark.skipif(shutil.which("newuidmap") is None, reason="no newuidmap here (apt-get install uidmap)"),
]
ROOT = Path(__file__).parent.parent.parent
# A mount namespace in which other users may enter the folders above our code and our Python, such as /root.
VIEW = """
set -e
mount --make-rprivate /
mount -t tmpfs -o mode=0755 lego-view /mnt
for folder in $FOLDERS; do
  mkdir -p /mnt$folder/upper /mnt$folder/work
  mount -t overlay -o lowerdir=$folder,upperdir=/mnt$folder/upper,workdir=/mnt$folder/work lego-view $folder
done
exec "$@"
"""
LIFE = """
import asyncio, json, socket, sys
from dataclasses import asdict, replace
from pathlib import Path
from sandbox.base import BoxSpec, Limits, Mount, SandboxError, StoredImage
from sandbox.podman import Podman, engine, release

async def main(home, tar):
    podman = Podman(image=StoredImage(name="localhost/base:1"), storage=home / "storage", state=home / "state")
    if not tar:
        async with podman.open(BoxSpec(base=home / "base")):
            return None
    await engine(podman).load(Path(tar), "localhost/base:1")
    found = {}
    mount = Mount(source=home / "base" / "kept", target=Path("/opt/kept"))
    async with podman.open(BoxSpec(base=home / "base", mounts=(mount,))) as box:
        async def sh(script, **how):
            result = await box.exec(["sh", "-c", script], **how)
            return [result.code, result.stdout.decode(), result.timed_out]
        found["codes"] = [(await sh(f"exit {code}"))[0] for code in (0, 1, 32, 137)]
        found["ids"] = [(await sh("id -u", user=user))[1].strip() for user in ("agent", "root")]
        found["mount"] = await sh("cat /opt/kept; echo x > /opt/kept")
        found["work"] = await sh("echo new > kept; rm gone; touch /tmp/x /home/agent/x; echo x > /etc/passwd")
        await box.put(Path("/repo/sub/put"), b"put")
        found["get"] = (await box.get(Path("/repo/sub/put"))).decode()
        found["changes"] = [[str(one.path), one.kind] for one in await box.changes()]
        found["late"] = await sh('sleep 300 & setsid sleep 300 & trap "" TERM; while :; do :; done', timeout_s=1)
        found["left"] = len(list(box.inside.commands()))
        found["network"] = await sh("cut -d: -f1 /proc/net/dev | tail -n +3 | tr -d ' '")
        with await box.listen(8000) as listener:
            client = "import socket; socket.create_connection(('127.0.0.1', 8000)).sendall(b'hello')"
            found["client"] = (await box.exec(["python3", "-c", client])).code
            listener.setblocking(True)
            found["heard"] = listener.accept()[0].recv(9).decode()
        await sh("umask 077; mkdir -p /repo/roots/deep; echo x > /repo/roots/deep/x", user="root")
    found["capabilities"] = asdict(podman.probe())
    found["boxes"] = [path.name for path in (home / "state").glob("box-*")]
    found["containers"] = len(await engine(podman).listed("lego.owner"))
    release(podman)
    return found

try:
    print(json.dumps(asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))))
except SandboxError as error:
    sys.exit(str(error))
"""


def processes_of(uid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError):
            found += [int(path.name)] if path.stat().st_uid == uid else []
    return found


@pytest.fixture
def user() -> Iterator[tuple[str, int, Path]]:
    """Name, uid and home of a new user; all of it is gone after the test."""
    home, name = Path(tempfile.mkdtemp(prefix="lego-rootless-")), f"lego-{os.getpid()}"
    if subprocess.run(["useradd", "-M", "-d", home, "-s", "/bin/sh", name], check=False).returncode:
        pytest.skip("this host lets us make no user")
    uid = int(subprocess.run(["id", "-u", name], check=True, capture_output=True, text=True).stdout)
    os.chown(home, uid, uid)
    yield name, uid, home
    for pid in processes_of(uid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    subprocess.run(["userdel", "-f", name], check=True, capture_output=True)
    shutil.rmtree(home)


def ran(user: tuple[str, int, Path], tar: Path | None) -> subprocess.CompletedProcess[str]:
    name, _, home = user
    needed = [private_parent(path) for path in (ROOT, Path(sys.prefix), Path(sys.base_prefix).resolve())]
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    env["FOLDERS"] = " ".join(sorted({str(folder) for folder in needed if folder}))
    become = ["setpriv", f"--reuid={name}", f"--regid={name}", "--init-groups"]
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", VIEW, "sh", *become, sys.executable, "-c", LIFE, home, str(tar or "")],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_an_ordinary_user_has_whole_boxes_and_is_told_which_limits_do_not_hold(user: tuple[str, int, Path]):
    name, uid, home = user
    ids = "700000-765535"
    subprocess.run(["usermod", "--add-subuids", ids, "--add-subgids", ids, name], check=True)
    (home / "base").mkdir()
    for file in ("kept", "gone"):
        (home / "base" / file).write_text("old\n")
    for path in (home / "base", *(home / "base").iterdir()):
        os.chown(path, uid, uid)
    ensure(TAR)
    shutil.copy(TAR, home / "base.tar")
    done = ran(user, home / "base.tar")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["codes"] == [0, 1, 32, 137] and found["ids"] == ["1000", "0"]
    assert found["mount"][:2] == [2, "old\n"] and found["work"][0] != 0
    assert (home / "base" / "kept").read_text() == "old\n" and found["get"] == "put"
    assert found["changes"] == [["gone", "deleted"], ["kept", "file"], ["sub", "dir"], ["sub/put", "file"]]
    assert found["late"] == [None, "", True] and found["left"] == 0
    assert found["network"][1].split() == ["lo"] and (found["client"], found["heard"]) == (0, "hello")
    held = found["capabilities"]
    assert held["rootless"] and held["overlay"] and held["netns"] and held["pids"] and not held["disk"]
    if held["cgroup"] == "none":
        assert not held["memory"] and not held["cpus"]
    assert (found["boxes"], found["containers"]) == ([], 0)


def test_a_user_without_subordinate_ids_is_told_the_command_that_gives_them(user: tuple[str, int, Path]):
    name, uid, home = user
    for file in ("/etc/subuid", "/etc/subgid"):
        lines = Path(file).read_text().splitlines(keepends=True) if Path(file).exists() else []
        if kept := [line for line in lines if line.startswith(f"{name}:")]:
            first, count = map(int, kept[0].split(":")[1:])
            option = "--del-subuids" if file.endswith("uid") else "--del-subgids"
            subprocess.run(["usermod", option, f"{first}-{first + count - 1}", name], check=True)
    (home / "base").mkdir()
    os.chown(home / "base", uid, uid)
    done = ran(user, None)
    assert done.returncode == 1 and "usermod --add-subuids" in done.stderr
