"""What can be done to a running `lego.train` from outside: its parts are found among its processes, and harmed."""

import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from lego.rollout.trial import PORT

PIDFD_GETFD = 438
STALL_S = 4.0
"""How long a slow engine says nothing."""
DROPS_S = 1.0
"""How long no connection to an engine lasts: one that breaks once was likely idle."""


def tree(driver: int) -> list[psutil.Process]:
    """All processes below the driver; none where it is gone."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(driver).children(recursive=True)
    return []


def alive(process: psutil.Process) -> bool:
    """Whether it runs, and is not just waited for."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def words(process: psutil.Process) -> list[str]:
    """Its command line; none of a process that is gone."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def ranks(driver: int) -> list[psutil.Process]:
    """The trainer's ranks."""
    return [one for one in tree(driver) if words(one)[1:3] == ["-m", "lego.learn.worker"]]


def servers(driver: int) -> list[psutil.Process]:
    """vLLM, without what it started and what guards it."""
    return [one for one in tree(driver) if words(one)[1:4] == ["-P", "-m", "lego.engine.vllmcli"]]


def agents(driver: int) -> list[psutil.Process]:
    """Harnesses at work in their boxes."""
    return [one for one in tree(driver) if words(one)[:1] == ["/opt/codex/bin/codex"]]


def boxes(driver: int) -> list[psutil.Process]:
    """The processes that are boxes, an agent's or a verdict's."""
    return [one for one in tree(driver) if Path(next(iter(words(one)), "")).name == "bwrap"]


def killed(found: Callable[[int], list[psutil.Process]]) -> Callable[[int], bool]:
    """A blow that kills the first of these processes; it is told whether there was one."""

    def kill(driver: int) -> bool:
        for process in found(driver):
            with suppress(psutil.NoSuchProcess):
                process.kill()
                return True
        return False

    return kill


def kill_driver(driver: int) -> bool:
    """The driver is gone at once, as by `kill -9`."""
    os.kill(driver, signal.SIGKILL)
    return True


def stall_engine(driver: int) -> bool:
    """vLLM stands still for a while, all of it; False without a server."""
    standing = [one for server in servers(driver) for one in (server, *server.children(recursive=True))]
    try:
        for one in standing:
            one.suspend()
        time.sleep(STALL_S if standing else 0)
    finally:
        for one in standing:
            with suppress(psutil.NoSuchProcess):
                one.resume()
    return bool(standing)


def drop_engine(driver: int) -> bool:
    """Every connection of driver and engine breaks, again and again for a while; False where there is none."""
    ports = [int(words(one)[words(one).index("--port") + 1]) for one in servers(driver)]
    end, found = time.monotonic() + DROPS_S, False
    while time.monotonic() < end:
        found |= _shut(driver, lambda ours, peer: peer in ports, most=1000)
        time.sleep(0.02)
    return found


def drop_agent(driver: int) -> bool:
    """A connection of a harness and its proxy breaks; False where there is none."""
    return _shut(driver, lambda ours, peer: ours == PORT, most=1)


def _shut(driver: int, wanted: Callable[[int, int], bool], most: int) -> bool:
    """Shuts connections of the driver whose own and other port are wanted."""
    done = 0
    with _sockets(driver) as found:
        for one in found:
            with suppress(OSError):  # it listens, or is no TCP socket, or broke by itself
                if done < most and one.family == socket.AF_INET and wanted(one.getsockname()[1], one.getpeername()[1]):
                    one.shutdown(socket.SHUT_RDWR)
                    done += 1
    return done > 0


@contextmanager
def _sockets(process: int) -> Iterator[list[socket.socket]]:
    """Another process's sockets, as ours. OSError where the kernel does not let us."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle, found = os.pidfd_open(process), list[socket.socket]()
    try:
        for link in Path(f"/proc/{process}/fd").iterdir():
            with suppress(FileNotFoundError):
                if not str(link.readlink()).startswith("socket:"):
                    continue
                copy = libc.syscall(PIDFD_GETFD, handle, int(link.name), 0)
                if copy >= 0:
                    found.append(socket.socket(fileno=copy))
                elif ctypes.get_errno() != 9:  # EBADF: closed meanwhile
                    raise OSError(ctypes.get_errno(), f"pidfd_getfd of {process}")
        yield found
    finally:
        for one in found:
            one.close()
        os.close(handle)
