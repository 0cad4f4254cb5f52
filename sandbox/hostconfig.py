"""What a Docker daemon is told about a container: one description, its HostConfig the most of it."""

import resource
from pathlib import Path
from typing import Any

from sandbox.engine import AGENT_ID, KEEPER_ID, Bind, Container, Tmpfs


def description(container: Container, volumes: tuple[str, ...]) -> dict[str, Any]:
    """A container in the daemon's words; `volumes` are those that its image declares."""
    return {
        "Image": container.image,
        "Entrypoint": list(container.argv),
        "Cmd": [],
        "Env": [f"{name}={value}" for name, value in container.env.items()],
        "User": f"{KEEPER_ID}:{KEEPER_ID}",
        "WorkingDir": "/",
        "Hostname": "box",
        "Labels": dict(container.labels),
        "Healthcheck": {"Test": ["NONE"]},
        "NetworkDisabled": True,
        "HostConfig": _host_config(container, volumes),
    }


def _host_config(container: Container, volumes: tuple[str, ...]) -> dict[str, Any]:
    limits = container.limits
    memory = int(limits.memory_gib * (1 << 30))
    # What the image declares as a volume would be a folder of any size on the host's disk.
    shown = {str(one.target) for one in (*container.binds, *container.tmpfs)}
    instead = [Tmpfs(target=Path(one), size_mib=limits.disk_mib) for one in volumes if one.rstrip("/") not in shown]
    return {
        "NetworkMode": "none",
        "Init": True,
        "ReadonlyRootfs": True,
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"],
        # Without user namespaces, a box's root is to the host the owner of /proc/meminfo and the like, capabilities or
        # not, and could change their modes for all. Docker's own list of what is read-only lies in /proc too.
        "ReadonlyPaths": ["/proc"],
        "IpcMode": "private",
        "ShmSize": limits.disk_mib << 20,
        "Memory": memory,
        "MemorySwap": memory,
        "PidsLimit": limits.pids,
        "NanoCpus": int(limits.cpus * 1e9),
        "Ulimits": [
            _ulimit("nofile", resource.RLIMIT_NOFILE),
            _ulimit("nproc", resource.RLIMIT_NPROC),
            {"Name": "core", "Soft": 0, "Hard": 0},
        ],
        "LogConfig": {"Type": "none"},
        "Mounts": [_mount(bind) for bind in container.binds],
        "Tmpfs": {str(one.target): _tmpfs(one) for one in (*container.tmpfs, *instead)},
        **({"Runtime": container.runtime} if container.runtime else {}),
    }


def _ulimit(name: str, number: int) -> dict[str, Any]:
    """Our own hard limit: a daemon without rights may not give more."""
    _, hard = resource.getrlimit(number)
    return {"Name": name, "Soft": hard, "Hard": hard}


def _tmpfs(one: Tmpfs) -> str:
    # Where the image has such a folder, runc takes its mode instead; the agent shall own it at least.
    return f"rw,exec,size={one.size_mib}m,mode={one.mode:o},uid={AGENT_ID},gid={AGENT_ID}"


def _mount(bind: Bind) -> dict[str, Any]:
    private = {"Propagation": "rprivate"}
    source, target = str(bind.source), str(bind.target)
    return {"Type": "bind", "Source": source, "Target": target, "ReadOnly": not bind.writable, "BindOptions": private}
