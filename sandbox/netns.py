"""A listening socket inside a container's network namespace, which has no other way in or out.

Root enters the namespace in a thread that is thrown away. An ordinary user must enter the container's user namespace
too, which no process with threads can: a small helper does, and sends the socket back.
"""

import asyncio
import ctypes
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from sandbox.base import SandboxError

CLONE_NEWNET = 0x40000000
BACKLOG = 128
HELPER_S = 20.0
HELPER = f"""
import _socket, os, sys
way = _socket.socket(fileno=int(sys.argv[1]))
s = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
s.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
try:
    s.bind(("127.0.0.1", int(sys.argv[2])))
    s.listen({BACKLOG})
except OSError as error:
    sys.exit(error.errno)
way.sendmsg([b"x"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, s.fileno().to_bytes(4, sys.byteorder))])
"""


async def listen_inside(pid: int, port: int) -> socket.socket:
    """A socket that listens on 127.0.0.1:`port` where process `pid` does; OSError, or SandboxError for what lacks."""
    return await asyncio.to_thread(_by_thread if os.geteuid() == 0 else _by_helper, pid, port)


def _by_thread(pid: int, port: int) -> socket.socket:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_enter_and_listen, pid, port).result()


def _enter_and_listen(pid: int, port: int) -> socket.socket:
    """Leaves this thread in the other namespace: it must end with this call."""
    fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(fd, CLONE_NEWNET) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
    finally:
        os.close(fd)
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def _by_helper(pid: int, port: int) -> socket.socket:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        enter = ["nsenter", "-t", str(pid), "-U", "-n", "--preserve-credentials"]
        python = [os.path.realpath(sys.executable), "-I", "-S", "-c", HELPER, str(theirs.fileno()), str(port)]
        try:
            done = subprocess.run(
                [*enter, *python],
                pass_fds=[theirs.fileno()],
                capture_output=True,
                timeout=HELPER_S,
                check=False,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise SandboxError(
                "nsenter is missing: install util-linux, as with `apt-get install util-linux`"
            ) from error
        if done.stderr:
            raise SandboxError(f"cannot enter the box's network: {done.stderr.decode(errors='replace').strip()}")
        if done.returncode:
            raise OSError(done.returncode, os.strerror(done.returncode))
        return socket.socket(fileno=socket.recv_fds(ours, 1, 1)[1][0])
