import asyncio
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox.base import BoxSpec, Mount, SandboxError
from sandbox.bubble import Bubblewrap
from sandbox.rootfs import python, python_home


async def run_python(box, code: str):
    return await box.exec([python(), "-I", "-c", code])


async def test_the_host_is_not_visible(sandbox: Bubblewrap, spec: BoxSpec, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("42")
    async with sandbox.open(spec) as box:
        assert (await box.exec(["cat", str(secret)])).code == 1
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


async def test_only_the_work_folder_home_and_temporary_folders_can_be_written(sandbox: Bubblewrap, spec: BoxSpec):
    attempt = """
import os, sys
for top, folders, files in os.walk("/"):
    folders[:] = [name for name in folders if not (top == "/proc" and (name.isdigit() or "self" in name))]
    folders[:] = [name for name in folders if os.path.join(top, name) not in ("/usr", sys.base_prefix)]
    for path in [top, *(os.path.join(top, name) for name in files)]:
        if not os.path.islink(path) and os.access(path, os.W_OK):
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
    devices = {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "ptmx")}
    async with sandbox.open(spec) as box:
        found = set((await run_python(box, attempt)).stdout.decode().splitlines())
        places = ("/repo", "/tmp", "/home/agent", "/dev/shm")
        assert set(places) <= found
        assert {path for path in found if not path.startswith((*places, "/dev/pts"))} <= devices
        for path in ("/proc/sys/kernel/core_pattern", "/usr/x", str(Path(python()).parent / "x")):
            assert (await box.exec(["sh", "-c", f"echo x > {path}"])).code != 0


async def test_programs_can_be_run_from_temporary_folders(sandbox: Bubblewrap, spec: BoxSpec):
    async with sandbox.open(spec) as box:
        for folder in ("/tmp", "/home/agent", "/repo"):
            await box.put(Path(folder, "tool"), b"#!/bin/sh\necho hello\n", 0o755)
            assert (await box.exec([f"{folder}/tool"])).stdout == b"hello\n"


async def test_the_first_process_cannot_be_traced_read_or_killed(sandbox: Bubblewrap, spec: BoxSpec):
    attack = """
import ctypes, os, signal
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
    os.kill(1, number)
"""
    async with sandbox.open(spec) as box:
        result = await run_python(box, attack)
        assert (result.stdout, result.code) == (b"", 0), result.stderr
        assert (await box.exec(["echo", "alive"])).stdout == b"alive\n"


async def test_dangerous_kernel_calls_are_refused(sandbox: Bubblewrap, spec: BoxSpec):
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
    async with sandbox.open(spec) as box:
        result = await run_python(box, code)
        assert (result.stdout, result.code) == (b"", 0), result.stderr
        assert (await box.exec(["unshare", "-U", "true"])).code != 0
        assert (await run_python(box, "import threading; t = threading.Thread(); t.start(); t.join()")).code == 0
        status = (await box.exec(["cat", "/proc/self/status"])).stdout.decode()
        for line in ("CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"):
            assert line in status


async def test_nested_user_namespaces_are_refused_without_the_filter_too(
    sandbox: Bubblewrap, spec: BoxSpec, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sandbox.bubble.filter_bytes", lambda machine: None)
    async with sandbox.open(spec) as box:
        assert b"Seccomp:\t0" in (await box.exec(["cat", "/proc/self/status"])).stdout
        assert (await box.exec(["unshare", "-U", "true"])).code != 0


async def test_a_listener_serves_the_box_from_outside_and_nothing_else_is_reachable(sandbox: Bubblewrap, spec: BoxSpec):
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
            result = await box.exec([python(), "-I", "-c", client, port], timeout_s=20)
            assert result.stdout == b"b'hello box\\n'\n", result
        with pytest.raises(ValueError, match="port=80:"):
            await box.listen(80)
        taken = await box.listen(8081)
        with pytest.raises(SandboxError, match="in use"):
            await box.listen(8081)
        taken.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", 8081), 0.5)


async def test_mounts_are_shown_read_only_and_hidden_folders_are_empty(state: Path, base: Path, tmp_path: Path):
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "version").write_text("7\n")
    mount = Mount(source=tmp_path / "tool", target=Path("/opt/tool"))
    sandbox = Bubblewrap(state=state, hide=(Path("/usr/share/doc"),))
    async with sandbox.open(BoxSpec(base=base, mounts=(mount,))) as box:
        assert await box.get(Path("/opt/tool/version")) == b"7\n"
        assert (await box.exec(["touch", "/opt/tool/new"])).code != 0
        assert (await box.exec(["ls", "/usr/share/doc"])).stdout == b""


async def test_boxes_of_one_base_do_not_see_each_other_and_many_run_at_once(sandbox: Bubblewrap, spec: BoxSpec):
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
    assert lives == [(f"{n}\n{n}\n2\n".encode(), f"{n}\n".encode()) for n in range(12)]
    assert (spec.base / "README").read_text() == "read me\n"


def test_a_spec_that_cannot_be_is_refused_with_the_name_of_its_field(sandbox: Bubblewrap, spec: BoxSpec, base: Path):
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
            sandbox.open(wrong)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of somebody else")
def test_a_base_of_another_user_is_refused(sandbox: Bubblewrap, spec: BoxSpec):
    os.chown(spec.base, 65534, 65534)
    with pytest.raises(ValueError, match="belongs to uid 65534"):
        sandbox.open(spec)
