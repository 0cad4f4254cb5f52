"""What a bubblewrap box sees: the arguments that lay out its file system, from a spec.

System folders come read-only from the host, `/etc` from a small folder of our own; the rest is private memory.
"""

import functools
import hashlib
import os
import py_compile
import secrets
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from sandbox import boxinit
from sandbox.base import BoxSpec, SandboxError
from sandbox.state import BoxFolder, remove_tree

HOME = Path("/home/agent")
UID = 1000
INIT = "/etc/lego-init.pyc"
SYSTEM_LINKS = ("bin", "sbin", "lib", "lib64", "lib32", "libx32")
HIDDEN_PROC = (
    "acpi", "asound", "driver", "fs", "pressure", "scsi", "tty",
    "kcore", "keys", "latency_stats", "mtrr", "slabinfo", "sysrq-trigger", "timer_list",
)  # fmt: skip

ETC = {
    "passwd": f"root:x:0:0:root:/root:/bin/sh\nagent:x:{UID}:{UID}:agent:{HOME}:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
    "group": f"root:x:0:\nagent:x:{UID}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost box\n",
    "hostname": "box\n",
    "resolv.conf": "",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "ld.so.cache": "",
}

ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": str(HOME),
    "USER": "agent",
    "LOGNAME": "agent",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "TMPDIR": "/tmp",
}


def python() -> str:
    """The interpreter that runs the box's first process: ours, without its virtual environment."""
    return os.path.realpath(sys.executable)


def python_home() -> Path | None:
    """The folder of that interpreter where the box must be shown it; None where /usr has it."""
    home = Path(sys.base_prefix).resolve()
    return None if home.is_relative_to("/usr") else home


def check(spec: BoxSpec) -> None:
    """Refuses a spec that cannot be laid out; ValueError names the field."""
    if not spec.base.is_dir():
        raise ValueError(f"base={spec.base}: not a folder")
    if spec.base.stat().st_uid != os.geteuid():
        owner = spec.base.stat().st_uid
        raise ValueError(
            f"base={spec.base}: belongs to uid {owner}; want uid {os.geteuid()}, so that boxes can change it"
        )
    if not spec.workdir.is_absolute() or len(spec.workdir.parts) < 2:
        raise ValueError(f"workdir={spec.workdir}: want an absolute path below /")
    for mount in spec.mounts:
        if not mount.source.exists():
            raise ValueError(f"mounts: source={mount.source} does not exist")
        if not mount.target.is_absolute() or mount.target.is_relative_to(spec.workdir):
            raise ValueError(f"mounts: target={mount.target}: want an absolute path outside workdir={spec.workdir}")
    for name in ("memory_gib", "pids", "cpus", "disk_mib", "deadline_s"):
        if not getattr(spec.limits, name) > 0:
            raise ValueError(f"limits: {name}={getattr(spec.limits, name)}: want more than 0")


def layout(spec: BoxSpec, folder: BoxFolder, etc: Path, hide: tuple[Path, ...]) -> list[str]:
    """bwrap's arguments for the file system; later ones cover earlier ones."""
    size = str(spec.limits.disk_mib << 20)
    args = ["--ro-bind", "/usr", "/usr"]
    for name in SYSTEM_LINKS:
        args += _system(Path("/", name))
    args += ["--ro-bind", str(etc), "/etc", "--ro-bind-try", "/etc/alternatives", "/etc/alternatives"]
    args += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    args += ["--proc", "/proc", *_hidden_proc(etc)]
    args += ["--dev", "/dev", "--perms", "1777", "--size", size, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    args += ["--perms", "1777", "--size", size, "--tmpfs", "/tmp", "--size", size, "--tmpfs", str(HOME)]
    args += ["--dir", "/var", "--symlink", "/tmp", "/var/tmp"]
    if home := python_home():
        args += ["--ro-bind", str(home), str(home)]
    for mount in spec.mounts:
        args += ["--ro-bind", str(mount.source), str(mount.target)]
    for path in hide:
        args += ["--ro-bind", str(etc / "empty"), str(path)]
    args += ["--overlay-src", str(spec.base), "--overlay", str(folder.upper), str(folder.work), str(spec.workdir)]
    return [*args, "--remount-ro", "/"]


def _system(path: Path) -> list[str]:
    """/bin and the like: the same link as on the host, or the folder itself."""
    if path.is_symlink():
        return ["--symlink", str(path.readlink()), str(path)]
    return ["--ro-bind", str(path), str(path)] if path.is_dir() else []


def _hidden_proc(etc: Path) -> Iterator[str]:
    """Covers kernel files that permission bits alone do not keep from a box.

    Programs in a box of the host's root are still uid 0 to these files: they could write
    /proc/sys/kernel/core_pattern, and so run programs on the host.
    """
    yield from ("--ro-bind", "/proc/sys", "/proc/sys")
    for name in HIDDEN_PROC:
        path = Path("/proc", name)
        if path.exists():
            yield from ("--ro-bind", str(etc / "empty") if path.is_dir() else "/dev/null", str(path))


def environment(extra: Mapping[str, str] | None) -> dict[bytes, bytes]:
    """A command's whole environment: ours, then what the caller adds; nothing of the host's."""
    pairs = {**ENVIRONMENT, **(extra or {})}
    for key, value in pairs.items():
        if not key or "=" in key or "\0" in key + value:
            raise ValueError(f"env: {key!r}={value!r}: a name may not hold '=', and neither may hold a NUL")
    return {os.fsencode(key): os.fsencode(value) for key, value in pairs.items()}


def etc_folder(state: Path) -> Path:
    """The box's /etc with the compiled first process in it; made once per state folder and code version."""
    path = state / f"etc-{_digest()}"
    return path if path.is_dir() else _make_etc(path)


@functools.cache
def _digest() -> str:
    parts = [sys.version, repr(sorted(ETC.items())), Path(boxinit.__file__).read_text()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _make_etc(path: Path) -> Path:
    """Builds it beside and renames, so that two runs at once do not disturb each other."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        for folder in ("alternatives", "empty"):
            (draft / folder).mkdir(parents=True)
        for name, content in ETC.items():
            (draft / name).write_text(content)
        py_compile.compile(boxinit.__file__, cfile=str(draft / Path(INIT).name), doraise=True)
        draft.rename(path)
    except OSError as error:
        remove_tree(draft)
        if not path.is_dir():
            raise SandboxError(f"{path}: cannot write the box's /etc: {error}") from error
    return path
