import asyncio
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox.base import BoxSpec, Mount, Sandbox, SandboxError
from sandbox.bubble import Bubblewrap
from sandbox.interpreter import python as host_python
from sandbox.rootfs import python_home
from tests.sandbox.conftest import process_count


async def test_the_host_is_not_visible(sandbox: Sandbox, spec: BoxSpec, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("42")
    async with sandbox.open(spec) as box:
        assert (await box.exec(["cat", str(secret)])).code == 1
        assert (await box.exec(["sh", "-c", "ls -A /home/agent /tmp"])).stdout.split() == [b"/home/agent:", b"/tmp:"]
        assert (await box.exec(["id", "-u"])).stdout == b"1000\n"
        assert await process_count(box) <= 4


async def test_a_box_without_an_image_shows_system_folders_and_our_interpreter(bubblewrap: Bubblewrap, plain: BoxSpec):
    async with bubblewrap.open(plain) as box:
        top = (await box.exec(["ls", "-A", "/"])).stdout.decode().split()
        home = python_home()
        shown = {home.parts[1]} if home else set()
        links = {"bin", "sbin", "lib", "lib64", "lib32", "libx32"}
        assert set(top) - links == {"dev", "etc", "home", "proc", "repo", "tmp", "usr", "var"} | shown
        assert set((await box.exec(["ls", "/home", "/tmp", "/var"])).stdout.decode().split()) == {
            "/home:", "agent", "/tmp:", "/var:", "tmp",
        }  # fmt: skip
        assert (await box.exec(["hostname"])).stdout == b"box\n"
        assert (await box.exec(["id", "-un"])).stdout == b"agent\n"
        if home:
            for folder in list(home.parents)[:-1]:
                inside = (await box.exec(["ls", "-A", str(folder)])).stdout.decode().split()
                assert len(inside) == 1, f"{folder} shows {inside}"


WALK = """
import os, sys
for top, folders, files in os.walk("/"):
    folders[:] = [name for name in folders if not (top == "/proc" and (name.isdigit() or "self" in name))]
    skipped = ("/usr", "/sys", "/.lego", sys.base_prefix)
    folders[:] = [name for name in folders if os.path.join(top, name) not in skipped]
    for path in [top, *(os.path.join(top, name) for name in files)]:
        masked = path.startswith("/proc/") and os.path.samefile(path, "/dev/null")
        if not os.path.islink(path) and not masked and os.access(path, os.W_OK):
            try:
                # permission bits are not all: a mount may refuse
                if os.path.isdir(path):
                    os.rmdir(path + "/none")
                else:
                    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
            except FileNotFoundError:
                print(path)
            except OSError:
                pass
            else:
                print(path)
"""


async def test_only_the_work_folder_home_and_temporary_folders_can_be_written(
    sandbox: Sandbox, spec: BoxSpec, python: str
):
    devices = {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "console")}
    async with sandbox.open(spec) as box:
        walk = await box.exec([python, "-I", "-c", WALK])
        found = set(walk.stdout.decode().splitlines())
        places = ("/repo", "/tmp", "/home/agent", "/dev/shm")
        assert set(places) <= found, walk
        # A container's streams are pipes of the host under /run/lego, which its own command may write. What is written
        # to /proc/pressure only asks to be told of it.
        free = (*places, "/var/tmp", "/dev/pts", "/dev/mqueue", "/run/lego/", "/proc/pressure/")
        assert {path for path in found if not path.startswith(free)} <= devices
        for path in ("/proc/sys/kernel/core_pattern", "/usr/x", "/etc/passwd", "/x"):
            assert (await box.exec(["sh", "-c", f"echo x > {path}"])).code != 0


async def test_programs_can_be_run_from_temporary_folders(sandbox: Sandbox, spec: BoxSpec):
    async with sandbox.open(spec) as box:
        for folder in ("/tmp", "/home/agent", "/repo"):
            await box.put(Path(folder, "tool"), b"#!/bin/sh\necho hello\n", 0o755)
            assert (await box.exec([f"{folder}/tool"])).stdout == b"hello\n"


async def test_the_first_process_cannot_be_traced_read_or_killed(sandbox: Sandbox, spec: BoxSpec, python: str):
    attack = """
import contextlib, ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
for path in ("/proc/1/mem", "/proc/1/environ", "/proc/1/maps", "/proc/1/fd/3", "/proc/1/root/etc/passwd"):
    try:
        open(path, "rb").read(1)
        print("read", path)
    except OSError:
        pass
if libc.ptrace(16, 1, 0, 0) == 0: print("traced")
if libc.syscall(438, os.pidfd_open(1), 3, 0) >= 0: print("took a file")
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGSEGV):
    with contextlib.suppress(PermissionError):
        os.kill(1, number)
"""
    async with sandbox.open(spec) as box:
        result = await box.exec([python, "-I", "-c", attack])
        assert (result.stdout, result.code) == (b"", 0), result.stderr
        assert (await box.exec(["echo", "alive"])).stdout == b"alive\n"


async def test_a_command_has_no_capabilities_and_gains_none(sandbox: Sandbox, spec: BoxSpec):
    async with sandbox.open(spec) as box:
        status = (await box.exec(["cat", "/proc/self/status"])).stdout.decode()
        for line in ("CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"):
            assert line in status


async def test_dangerous_kernel_calls_are_refused(bubblewrap: Bubblewrap, plain: BoxSpec):
    # number, arguments: unshare, setns, mount, keyctl, bpf, perf_event_open, io_uring_setup, TIOCSTI, clone(NEWUSER)
    calls = (
        "(272, 0x10000000), (308, 0, 0), (165, 0, 0, 0, 0, 0), (250, 0, 0), (321, 0, 0, 0), (298, 0, 0, 0, 0, 0), "
        "(425, 1, 0), (16, 0, 0x5412, 0), (56, 0x10000000 | 17, 0, 0, 0, 0)"
    )
    code = f"""
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for call in ({calls}):
    if libc.syscall(*call) != -1 or ctypes.get_errno() != errno.EPERM: print(call, ctypes.get_errno())
"""
    thread = "import threading; t = threading.Thread(); t.start(); t.join()"
    async with bubblewrap.open(plain) as box:
        result = await box.exec([host_python(), "-I", "-c", code])
        assert (result.stdout, result.code) == (b"", 0), result.stderr
        assert (await box.exec(["unshare", "-U", "true"])).code != 0
        assert (await box.exec([host_python(), "-I", "-c", thread])).code == 0


async def test_new_namespaces_and_the_kernels_keys_are_refused(sandbox: Sandbox, spec: BoxSpec, python: str):
    """In a user namespace of its own a program has all capabilities, and in a process namespace no kill finds it."""
    # unshare(NEWUSER), unshare(NEWPID), clone(NEWUSER), add_key, keyctl: keys of a user are shared by all boxes
    code = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
calls = [(272, 0x10000000), (272, 0x20000000), (56, 0x10000000 | 17, 0, 0, 0, 0)]
calls += [(248, b"user", b"k", b"x", 1, -4), (250, 0, -4)]
for call in calls:
    if libc.syscall(*call) != -1 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
        print(call, ctypes.get_errno())
import threading; t = threading.Thread(target=print, args=("thread",)); t.start(); t.join()
"""
    async with sandbox.open(spec) as box:
        result = await box.exec([python, "-I", "-c", code])
        assert (result.stdout, result.code) == (b"thread\n", 0), result


async def test_a_program_cannot_read_its_input_again_by_name_or_take_back_what_was_put_out(
    sandbox: Sandbox, spec: BoxSpec
):
    files = " ".join(f"/run/lego/{number}/{name}" for number in range(4) for name in ("in", "run"))
    again = f"cat >/dev/null; exec </dev/null; cat {files} 2>/dev/null"
    back = "chmod 600 /dev/fd/1; timeout 1 cat /dev/fd/1 || echo refused; echo more >/dev/stdout"
    async with sandbox.open(spec) as box:
        for _ in range(2):
            result = await box.exec(["sh", "-c", f"{again}; echo out; {back}"], stdin=b"secret")
            if os.geteuid() == 0:  # a pipe of our own user is that of a bubblewrap box too
                assert result.stdout == b"out\nrefused\nmore\n", result
            assert b"secret" not in result.stdout


async def test_nested_user_namespaces_are_refused_without_the_filter_too(
    bubblewrap: Bubblewrap, plain: BoxSpec, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sandbox.bubble.filter_bytes", lambda machine: None)
    async with bubblewrap.open(plain) as box:
        assert b"Seccomp:\t0" in (await box.exec(["cat", "/proc/self/status"])).stdout
        assert (await box.exec(["unshare", "-U", "true"])).code != 0


async def test_a_listener_serves_the_box_from_outside_and_nothing_else_is_reachable(
    sandbox: Sandbox, spec: BoxSpec, python: str
):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello " + await reader.readline())
        await writer.drain()
        writer.close()

    client = """
import socket, sys
def ask(address):
    with socket.create_connection(address, 3) as s:
        s.sendall(b"box\\n")
        return s.makefile("rb").read()
print(ask(("127.0.0.1", 8080)))
for address in (("127.0.0.1", int(sys.argv[1])), ("192.0.2.1", 80), ("8.8.8.8", 53)):
    try:
        print("reached", address, ask(address))
    except OSError:
        pass
try:
    socket.create_server(("127.0.0.1", 8080))
    print("took the port")
except OSError:
    pass
"""
    on_host = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with on_host, sandbox.open(spec) as box:
        server = await asyncio.start_server(answer, sock=await box.listen(8080))
        async with server:
            port = str(on_host.sockets[0].getsockname()[1])
            result = await box.exec([python, "-I", "-c", client, port], timeout_s=20)
            assert result.stdout == b"b'hello box\\n'\n", result
        with pytest.raises(ValueError, match="port=80:"):
            await box.listen(80)
        taken = await box.listen(8081)
        with pytest.raises(SandboxError, match="in use"):
            await box.listen(8081)
        taken.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", 8081), 0.5)


async def test_mounts_are_shown_read_only(sandbox: Sandbox, spec: BoxSpec, tmp_path: Path):
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "version").write_text("7\n")
    folder = Mount(source=tmp_path / "tool", target=Path("/opt/tool"))
    file = Mount(source=tmp_path / "tool" / "version", target=Path("/opt/version"))
    async with sandbox.open(replace(spec, mounts=(folder, file))) as box:
        assert await box.get(Path("/opt/tool/version")) == await box.get(Path("/opt/version")) == b"7\n"
        for script in ("touch /opt/tool/new", "echo 8 > /opt/tool/version", "echo 8 > /opt/version", "rm /opt/version"):
            assert (await box.exec(["sh", "-c", script])).code != 0
    assert (tmp_path / "tool" / "version").read_text() == "7\n"


async def test_hidden_folders_are_empty(state: Path, plain: BoxSpec):
    sandbox = Bubblewrap(state=state, hide=(Path("/usr/share/doc"),))
    async with sandbox.open(plain) as box:
        assert (await box.exec(["ls", "-A", "/usr/share/doc"])).stdout == b""


async def test_boxes_of_one_base_do_not_see_each_other_and_many_run_at_once(sandbox: Sandbox, spec: BoxSpec):
    inside = asyncio.Barrier(12)

    async def life(number: int) -> tuple[bytes, bytes]:
        async with sandbox.open(spec) as box:
            server = await box.listen(9000)
            await box.exec(["sh", "-c", f"echo {number} > README; echo {number} > /tmp/x"])
            await inside.wait()
            seen = await box.exec(["sh", "-c", "cat README /tmp/x; set -- /proc/[0-9]*; echo $#"])
            server.close()
            return seen.stdout, (await box.changes())[0].content

    lives = await asyncio.gather(*(life(number) for number in range(12)))
    count = lives[0][0].split()[-1].decode()
    assert int(count) <= 4
    assert lives == [(f"{n}\n{n}\n{count}\n".encode(), f"{n}\n".encode()) for n in range(12)]
    assert (spec.base / "README").read_text() == "read me\n"


async def test_a_spec_that_cannot_be_is_refused_with_the_name_of_its_field(sandbox: Sandbox, spec: BoxSpec, base: Path):
    inside = Mount(source=base, target=Path("/repo/x"))
    missing = Mount(source=base / "none", target=Path("/opt/x"))
    bad = {
        "base=": replace(spec, base=base / "none"),
        "workdir=": replace(spec, workdir=Path("repo")),
        "target=/repo/x": replace(spec, mounts=(inside,)),
        "source=": replace(spec, mounts=(missing,)),
        "pids=0": replace(spec, limits=replace(spec.limits, pids=0)),
    }
    for message, wrong in bad.items():
        with pytest.raises(ValueError, match=message):
            await open_and_close(sandbox, wrong)


async def open_and_close(sandbox: Sandbox, spec: BoxSpec) -> None:
    async with sandbox.open(spec):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of somebody else")
def test_a_base_of_another_user_is_refused(bubblewrap: Bubblewrap, plain: BoxSpec):
    os.chown(plain.base, 65534, 65534)
    with pytest.raises(ValueError, match="belongs to uid 65534"):
        bubblewrap.open(plain)


async def test_devices_work_and_are_nobodys_to_change(sandbox: Sandbox, spec: BoxSpec):
    """The agent of a box of root may be the host's root to these files, which needs no capability to change modes."""
    nodes = [Path("/dev", name) for name in ("null", "zero", "full", "random", "urandom", "tty")]
    files = [*nodes, Path("/proc/meminfo"), Path("/proc/uptime")]
    before = [file.stat().st_mode for file in files]
    async with sandbox.open(spec) as box:
        works = await box.exec(["sh", "-c", "echo x > /dev/null && head -c 3 /dev/zero | wc -c"])
        assert works.stdout.split() == [b"3"], works
        for file in files:
            assert (await box.exec(["chmod", "600", str(file)])).code != 0, file
        assert [file.stat().st_mode for file in files] == before
