"""How Podman is set up for this process: its program, OCI runtime, storage folder and configuration."""

import hashlib
import os
import re
import resource
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sandbox.base import SandboxError
from sandbox.mounts import unmount
from sandbox.state import private_folder, remove_tree

INSTALL = "apt-get install --no-install-recommends podman runc crun uidmap catatonit conmon"
OLDEST = (4, 3)
VERSION_S = 60.0
EXEC_KEPT_S = 5
"""How long Podman keeps a command's exit code, and conmon's process for it, after its end."""
CLEANUP_S = 2.0 * EXEC_KEPT_S
LONGEST_RUNROOT = 50
DEFAULT_FILES = 16384
STORAGE_NOTE = "storage"
FOREIGN = ("CONTAINER_HOST", "CONTAINERS_CONF_OVERRIDE", "NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID")
"""Variables that would lead our service to somebody else's."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Where images and containers lie (None: where this user's own do), and the runtime (None: Podman's choice)."""

    storage: Path | None
    runtime: str | None

    def options(self) -> list[str]:
        """Words that point the `podman` command at the storage folder."""
        if self.storage is None:
            return []
        graph, run = self.storage.absolute() / "graph", volatile_folder(self.storage) / "run"
        return ["--root", str(graph), "--runroot", str(run), "--storage-driver", "overlay"]

    def command_line(self) -> str:
        """`podman` as people call it to see the same images."""
        return " ".join(["podman", *self.options()])

    def environment(self, folder: Path) -> dict[str, str]:
        """Ours, with a configuration in `folder` instead of the host's."""
        path = folder / "containers.conf"
        path.write_text(_containers_conf(self))
        return {key: value for key, value in os.environ.items() if key not in FOREIGN} | {"CONTAINERS_CONF": str(path)}

    def release(self) -> None:
        """Undoes what Podman keeps mounted and writes elsewhere for the storage folder, which may then be removed.

        Waits for the last clean-ups by conmon, which make folders anew.
        """
        if self.storage is not None:
            graph, deadline = self.storage.absolute() / "graph", time.monotonic() + CLEANUP_S
            while processes_with(f"{graph}\0") and time.monotonic() < deadline:
                time.sleep(0.05)
            if os.geteuid() == 0:
                unmount(graph / "overlay")
            remove_tree(volatile_folder(self.storage))


def processes_with(words: str) -> list[int]:
    """Those with these words in their command line, where each ends with a NUL."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if os.fsencode(words) in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def program() -> str:
    """The path of `podman`. SandboxError tells how to get it, or a newer one."""
    path = shutil.which("podman")
    if path is None:
        raise SandboxError(f"Podman is not installed: {INSTALL}")
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=VERSION_S).stdout
    numbers = tuple(int(number) for number in re.findall(r"\d+", said)[:2])
    if numbers < OLDEST:
        raise SandboxError(f"{path} is {said.strip() or 'silent'}; want 4.3 or newer: {INSTALL}")
    return path


def default_runtime() -> str | None:
    """runc on hosts that do not have control groups of version 2 alone, which crun refuses; else Podman's choice."""
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        return None
    if shutil.which("runc") is None:
        raise SandboxError(f"this host has control groups of version 1, which crun refuses, and no runc: {INSTALL}")
    return "runc"


def own_limit(kind: int) -> int:
    """A limit for containers that does not exceed what this process may itself set."""
    hard = resource.getrlimit(kind)[1]
    return DEFAULT_FILES if hard == resource.RLIM_INFINITY else min(DEFAULT_FILES, hard)


def volatile_folder(storage: Path) -> Path:
    """Where Podman keeps what does not outlive a restart of the host; by name of the storage, so that all find it."""
    uid = os.geteuid()
    name = f"lego-{uid}-{hashlib.sha256(str(storage.absolute()).encode()).hexdigest()[:8]}"
    for place in _volatile_places():
        if len(os.fsencode(place / name / "run")) <= LONGEST_RUNROOT:
            return place / name
    raise SandboxError(f"no folder for what Podman keeps until a restart: no /run/user/{uid}, and /tmp is not writable")


def _volatile_places() -> list[Path]:
    places = (Path("/run"), Path(f"/run/user/{os.geteuid()}"), Path(tempfile.gettempdir()), Path("/tmp"))
    return [place for place in places if os.access(place, os.W_OK)]


def _containers_conf(setup: Setup) -> str:
    """Limits that this process may hand on, no log and no events, and conmon processes that do not stay for minutes."""
    files, tasks = (own_limit(kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    systemd = Path("/run/systemd/system").is_dir() and (os.geteuid() == 0 or "DBUS_SESSION_BUS_ADDRESS" in os.environ)
    lines = [
        "[containers]",
        f'default_ulimits=["nofile={files}:{files}","nproc={tasks}:{tasks}"]',
        'netns="none"', 'log_driver="none"', 'base_hosts_file="none"',
        "[engine]",
        f'cgroup_manager="{"systemd" if systemd else "cgroupfs"}"',
        'events_logger="none"',
        f"exit_command_delay={EXEC_KEPT_S}",
    ]  # fmt: skip
    if setup.runtime is not None and "/" not in setup.runtime:
        lines.append(f'runtime="{setup.runtime}"')
    if setup.storage is not None:
        lines += _storage_lines(setup.storage)
    return "\n".join(lines) + "\n"


def _storage_lines(storage: Path) -> list[str]:
    volatile = private_folder(volatile_folder(storage))
    (volatile / STORAGE_NOTE).write_text(str(storage.absolute()))  # for people who find the folder
    networks = storage.absolute() / "networks"
    engine = [f'tmp_dir="{volatile / "libpod"}"']
    return [*engine, "[network]", 'network_backend="netavark"', f'network_config_dir="{networks}"']
