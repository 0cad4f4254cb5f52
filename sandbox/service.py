"""Podman's own service, which we start as a child on a private socket, and start again when it is gone.

Containers do not need it: they go on without. It ends with this process, however that ends: a guard holds the reading
end of a pipe of ours, and kills the service when the kernel closes the other.
"""

import atexit
import os
import secrets
import select
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

from sandbox.base import SandboxError
from sandbox.mounts import IDS
from sandbox.podmanconf import Setup, processes_with, program
from sandbox.state import BoxFolder, owner_lives, private_folder, remove_tree, this_owner, usual_folder

IDLE_S = 600
"""The service of a process whose guard was killed too ends after this time."""
STARTS, START_S = 5, 60.0
STOP_S = 5.0
LONGEST_SOCKET = 100
SOCKET = "podman.sock"
PREFIX = "svc-"
GUARD = 'exec 2> /dev/null; read -r _; kill -s TERM -- "-$1"; sleep 3; kill -s KILL -- "-$1"'
"""A service that is told to end in the middle of a start may hang for ever, with locks that all others wait for."""


class Service:
    """One service of this process. `socket_path` starts it where it does not run."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._inner: int | None = None

    @property
    def pid(self) -> int | None:
        """Of the running service."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def socket_path(self) -> Path:
        """A socket where the service answers. Blocks while it starts; SandboxError says why it cannot."""
        with self._lock:
            if self._folder is None:
                self._folder = _new_folder()
                atexit.register(self.stop)
            path = self._folder / SOCKET
            if self.pid is None or not _answers(path):
                self._end()
                if not any(self._start(self._folder, path) for _ in range(STARTS)):
                    raise SandboxError("Podman's service is killed again and again while it starts")
                self._check_ids()
            return path

    def stop(self) -> None:
        """Ends the service and removes its files."""
        with self._lock:
            self._end()
            if self._folder is not None:
                remove_tree(self._folder)
                self._folder = None

    def sweep(self, container: str) -> None:
        """Removes what a service that was killed while it made a container has left of it: no service knows that."""
        if self._folder is not None:
            command = [*self._podman(), "rm", "--force", "--ignore", container]
            env = self.setup.environment(self._folder)
            subprocess.run(command, env=env, capture_output=True, check=False, start_new_session=True)

    def as_root(self, command: list[str]) -> list[str]:
        """A command with the rights of Podman's root: for an ordinary user over the ids that are subordinate to it."""
        if os.geteuid() == 0:
            return command
        inside = self._mapped_process()
        if inside is None:
            return [*self._podman(), "unshare", *command]
        return ["nsenter", "-t", inside, "-U", "--preserve-credentials", *command]

    def read_number(self, path: Path) -> int:
        """What a file of Podman's holds. Blocks; OSError where it cannot be read."""
        if os.geteuid() == 0:
            return int(path.read_text())
        cat = self.as_root(["cat", str(path)])
        done = subprocess.run(cat, capture_output=True, text=True, check=False, start_new_session=True)
        if done.returncode and "No such file" in done.stderr:
            raise FileNotFoundError(done.stderr)
        if done.returncode:
            raise PermissionError(done.stderr.strip())
        return int(done.stdout)

    def _podman(self) -> list[str]:
        return [program(), *self.setup.options()]

    def _start(self, folder: Path, path: Path) -> bool:
        """Waits until the service answers; False if somebody killed it before."""
        path.unlink(missing_ok=True)
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [*self._podman(), "system", "service", f"--time={IDLE_S}", f"unix://{path}"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.setup.environment(folder),
                start_new_session=True, cwd="/",
            )  # fmt: skip
        self._guard = subprocess.Popen(
            ["sh", "-c", GUARD, "sh", str(self._process.pid)], stdin=subprocess.PIPE, start_new_session=True, cwd="/"
        )
        deadline = time.monotonic() + START_S
        while not _answers(path):
            if self._process.poll() is not None or time.monotonic() > deadline:
                killed = (self._process.returncode or 0) < 0
                self._end()
                if killed:
                    return False
                raise SandboxError(_explain((folder / "log").read_text(errors="replace")))
            time.sleep(0.01)
        return True

    def _end(self) -> None:
        """The guard goes first: it must not see the service's number given to another process."""
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.kill()
            self._guard.wait()
            self._guard.stdin.close()
        if self._process is not None:
            self._signal(self._process)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._guard = self._process = None

    def _signal(self, process: subprocess.Popen[bytes]) -> None:
        """Tells the service to end; an ordinary user's is two processes, which do not tell each other."""
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        elif self._inner is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._inner, signal.SIGTERM)
        if self._inner is not None:
            os.close(self._inner)
            self._inner = None

    def _mapped_process(self) -> str | None:
        """The pid of a process of the service that is in Podman's own user namespace; None where there is none."""
        own, pid = _user_namespace("self"), self.pid
        if pid is None:
            return None
        lists = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
        return next((one for children in lists for one in children if _user_namespace(one) != own), None)

    def _check_ids(self) -> None:
        """Without subordinate ids Podman starts all the same, and fails later in words that do not help."""
        inside = None if os.geteuid() == 0 else self._mapped_process()
        if inside is not None:
            self._inner = os.pidfd_open(int(inside))
            lines = Path(f"/proc/{inside}/uid_map").read_text().splitlines()
            count = sum(int(line.split()[2]) for line in lines)
            if count < IDS:
                self._end()
                raise SandboxError(_too_few_ids(f"{count} of {IDS} ids are mapped"))


def reap_services() -> None:
    """Ends services whose process is dead, and removes their files.

    Such a service was told to end, but may hang there for ever, and hold locks that all others of its storage wait for.
    """
    for path in _home().glob(f"{PREFIX}*"):
        if not owner_lives(path.name.removeprefix(PREFIX)):
            with suppress(FileNotFoundError), BoxFolder(path).claimed() as ours:  # somebody else may be reaping too
                if ours:
                    for pid in processes_with(f"unix://{path}/"):
                        _end_other(pid)
                    remove_tree(path)


def _end_other(pid: int) -> None:
    """Ends a process that is no child of ours; kills it when it does not heed."""
    with suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(fd, signal.SIGTERM)
            gone = select.poll()
            gone.register(fd, select.POLLIN)
            if not gone.poll(STOP_S * 1000):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        finally:
            os.close(fd)


def _home() -> Path:
    return private_folder(usual_folder("podman"))


def _new_folder() -> Path:
    """A folder for one service, with a path short enough for a socket."""
    path = _home() / f"{PREFIX}{this_owner()}-{secrets.token_hex(2)}"
    if len(os.fsencode(path / SOCKET)) > LONGEST_SOCKET:
        raise SandboxError(f"{path}: too long for a socket; set TMPDIR to a shorter folder")
    path.mkdir(mode=0o700)
    return path


def _answers(path: Path) -> bool:
    """Whether somebody listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(os.fsencode(path))
        except OSError:
            return False
        return True


def _user_namespace(pid: str) -> int:
    return Path(f"/proc/{pid}/ns/user").stat().st_ino


def _explain(log: str) -> str:
    """What to do about a service that did not start."""
    said = "\n".join(log.strip().splitlines()[-5:]) or "Podman said nothing"
    if "newuidmap" in log or "subuid" in log or "user namespace" in log:
        return _too_few_ids(said)
    return f"Podman's service did not start: {said}"


def _too_few_ids(reason: str) -> str:
    return (
        f"Podman cannot make containers for uid {os.geteuid()}, which has too few subordinate ids ({reason}): "
        "apt-get install uidmap; usermod --add-subuids 100000-165535 --add-subgids 100000-165535 USER; "
        "podman system migrate"
    )
