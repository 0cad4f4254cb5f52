"""What Podman's service is told about a container: one description, in which nothing is left to a host's settings."""

import os
import resource
from collections.abc import Mapping
from pathlib import Path

from sandbox.base import Limits
from sandbox.container import KEEPERS
from sandbox.engine import AGENT_ID, KEEPER_ID, Bind, Container
from sandbox.mounts import IDS
from sandbox.podmanconf import own_limit
from sandbox.profile import profile_path
from sandbox.rootfs import HIDDEN_PROC

FIRST_ID = 200_000
"""The host's id of a container's root, where we are root ourselves."""
PERIOD_US = 100_000


def description(container: Container) -> dict[str, object]:
    """What the service is told; every value that a host's configuration could change is named."""
    limits, memory = container.limits, int(container.limits.memory_gib * 2**30)
    return {
        "name": container.name,
        "image": container.image,
        "entrypoint": [container.argv[0]],
        "command": list(container.argv[1:]),
        "env": dict(container.env),
        "labels": dict(container.labels),
        "user": f"{KEEPER_ID}:{KEEPER_ID}",
        "hostname": "box",
        "init": True,
        "systemd": "false",
        "healthconfig": {"Test": ["NONE"]},
        "stop_timeout": 0,
        "netns": {"nsmode": "none"},
        "use_image_resolve_conf": True,
        "cap_drop": ["ALL"],
        "no_new_privileges": True,
        "seccomp_profile_path": str(profile_path()),
        "mask": [f"/proc/{name}" for name in HIDDEN_PROC],
        "selinux_opts": ["disable"] if Path("/sys/fs/selinux/enforce").exists() else [],
        "read_only_filesystem": True,
        "image_volume_mode": "ignore",
        "log_configuration": {"driver": "none"},
        "oci_runtime": container.runtime or "",
        "shm_size": limits.disk_mib << 20,
        "resource_limits": {
            "memory": {"limit": memory, "swap": memory},
            "pids": {"limit": limits.pids},
            "cpu": {"period": PERIOD_US, "quota": int(limits.cpus * PERIOD_US)},
        },
        "r_limits": [{"type": name, "soft": value, "hard": value} for name, value in ulimits(limits).items()],
        **users(),
        **_files(container),
    }


def ulimits(limits: Limits) -> dict[str, int]:
    """All of them: to name one drops the defaults of the others."""
    tasks = own_limit(resource.RLIMIT_NPROC)
    if os.geteuid() != 0:  # the kernel counts by user namespace, so this holds where control groups are not ours
        tasks = min(tasks, limits.pids - KEEPERS)
    return {"nofile": own_limit(resource.RLIMIT_NOFILE), "nproc": tasks, "core": 0}


def users() -> dict[str, Mapping[str, object]]:
    """For root, ids of the host that nobody has; for an ordinary user, its own id as the agent's."""
    if os.geteuid() != 0:
        return {"userns": {"nsmode": "keep-id", "value": f"uid={AGENT_ID},gid={AGENT_ID}"}}
    ids = [{"container_id": 0, "host_id": FIRST_ID, "size": IDS}]
    maps = {"UIDMap": ids, "GIDMap": ids, "HostUIDMapping": False, "HostGIDMapping": False}
    return {"userns": {"nsmode": "private"}, "idmappings": maps}


def _files(container: Container) -> dict[str, object]:
    mounts = [_bind(bind) for bind in container.binds]
    for one in container.tmpfs:
        options = [f"size={one.size_mib}m", f"mode={one.mode:o}", "exec", "nosuid", "nodev", "notmpcopyup"]
        mounts.append({"type": "tmpfs", "source": "tmpfs", "destination": str(one.target), "options": options})
    if container.overlay is None:
        return {"mounts": mounts}
    over = container.overlay
    options = [f"upperdir={over.upper}", f"workdir={over.work}"]
    return {
        "mounts": mounts,
        "overlay_volumes": [{"source": str(over.lower), "destination": str(over.target), "options": options}],
    }


def _bind(bind: Bind) -> dict[str, object]:
    options = ["rbind", "rw" if bind.writable else "ro", "nosuid", "nodev", "rprivate"]
    return {"type": "bind", "source": str(bind.source), "destination": str(bind.target), "options": options}
