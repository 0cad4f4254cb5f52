"""Runs a command so that it and all it starts die with the driver: `python -I guard.py [--grace S] -- CMD...`.

Stdin must be a pipe whose other end only the driver holds: its end of file means the driver is gone, however it died.
Orphans of the tree come back to this process (it is their subreaper), so new sessions and double forks do not escape.
On SIGTERM, SIGINT, SIGHUP, end of file or the command's end, the tree gets SIGTERM, a grace, then SIGKILL; SIGUSR1 and
the driver's end cut the grace short. Exit status: the command's, or 128 + the signal that killed it. Not covered:
SIGKILL of this process itself (then only the command dies at once), and processes of another user.
"""

import ctypes
import os
import select
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
HURRY = signal.SIGUSR1
"""Asks for an end without grace."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LOOK_S = 1.0
"""How often the parent is looked at: the second watch, for a pipe end that leaked into a process that lives on."""
KILL_S = 10.0
"""How long a killed tree may take to vanish."""


def command(argv: list[str], *, grace_s: float = 10.0) -> list[str]:
    """The guarded form of `argv`; start it with a pipe as stdin and in its own session."""
    return [sys.executable, "-I", str(Path(__file__).resolve()), "--grace", str(grace_s), "--", *argv]


def main(args: list[str]) -> int:
    """Runs the guarded command to its end and returns the exit status."""
    grace_s, argv = _parse(args)
    if not _is_pipe(0):
        sys.exit("guard: stdin must be a pipe held by the driver")
    driver = os.getppid()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    wakeup = _wake_on_signals()
    child = _start(argv)
    reaped = _Reaper(child)
    hurried = _watch(wakeup, driver, reaped)
    _send(signal.SIGTERM)
    if not hurried:
        _wait_alone(time.monotonic() + grace_s, reaped, lambda: HURRY in _read(wakeup) or os.getppid() != driver)
    _kill_tree(reaped)
    return reaped.status if reaped.status is not None else 128 + signal.SIGKILL


class _Reaper:
    """Collects ended processes; keeps the exit status of the command."""

    def __init__(self, child: int) -> None:
        self.child = child
        self.status: int | None = None
        self.alone = False
        """No process of the tree is left."""

    def collect(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.alone = True
                return
            if pid == 0:
                return
            if pid == self.child:
                code = os.waitstatus_to_exitcode(status)
                self.status = code if code >= 0 else 128 - code


def _parse(args: list[str]) -> tuple[float, list[str]]:
    usage = "usage: guard.py [--grace SECONDS] -- CMD [ARG...]"
    grace_s = 10.0
    if args[:1] == ["--grace"] and len(args) > 1:
        grace_s, args = float(args[1]), args[2:]
    if args[:1] != ["--"] or len(args) < 2:
        sys.exit(usage)
    return grace_s, args[1:]


def _is_pipe(fd: int) -> bool:
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def _wake_on_signals() -> int:
    """Makes signals readable as bytes on the returned descriptor."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    for number in (*STOP_SIGNALS, HURRY, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return read


def _start(argv: list[str]) -> int:
    guard = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        for number in (*STOP_SIGNALS, HURRY, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(128 + signal.SIGKILL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"guard: cannot run {argv[0]}: {error.strerror}\n".encode())
    os._exit(127)


def _watch(wakeup: int, driver: int, reaped: _Reaper) -> bool:
    """Waits for the command's end, a stop signal, or the driver's end; True if there is no time for grace."""
    while True:
        ready, _, _ = select.select([0, wakeup], [], [], LOOK_S)
        asked = _read(wakeup)
        gone = (0 in ready and os.read(0, 4096) == b"") or os.getppid() != driver
        reaped.collect()
        if reaped.status is not None or gone or any(number in asked for number in (*STOP_SIGNALS, HURRY)):
            return HURRY in asked


def _read(wakeup: int) -> bytes:
    """The numbers of the signals that came since the last call."""
    try:
        return os.read(wakeup, 4096)
    except BlockingIOError:
        return b""


def _kill_tree(reaped: _Reaper) -> None:
    deadline = time.monotonic() + KILL_S
    while not reaped.alone and time.monotonic() < deadline:
        _send(signal.SIGKILL)
        _wait_alone(time.monotonic() + 0.05, reaped, lambda: False)
    if not reaped.alone:
        os.write(2, f"guard: processes outlived SIGKILL by {KILL_S:g} s: {_descendants()}\n".encode())


def _wait_alone(deadline: float, reaped: _Reaper, hurried: Callable[[], bool]) -> None:
    while True:
        reaped.collect()
        if reaped.alone or time.monotonic() >= deadline or hurried():
            return
        time.sleep(0.02)


def _send(number: int) -> None:
    for pid in _descendants():
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def _descendants() -> list[int]:
    """All processes below this one, parents first."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            children.setdefault(_parent(folder), []).append(int(folder.name))
    found = list(children.get(os.getpid(), ()))
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_bytes().rpartition(b")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return -1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
