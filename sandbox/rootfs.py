"""What a bubblewrap box sees: the arguments that lay out its file system, from a spec.

System folders come read-only from the host with an `/etc` of our own, or all from an unpacked image; the rest is
private memory.
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
from sandbox.base import BoxSpec, FolderImage, Image, Mount, SandboxError
from sandbox.interpreter import INIT as FOREIGN_INIT
from sandbox.interpreter import PLACE, foreign, python
from sandbox.state import BoxFolder, remove_tree

HOME = Path("/home/agent")
UID = 1000
INIT = "/etc/lego-init.pyc"
SYSTEM_LINKS = ("bin", "sbin", "lib", "lib64", "lib32", "libx32")
HIDDEN_PROC = (
    "acpi", "asound", "driver", "fs", "pressure", "scsi", "tty",
    "kcore", "keys", "kmsg", "kpagecgroup", "kpagecount", "kpageflags", "latency_stats", "mtrr", "pagetypeinfo",
    "slabinfo", "sysrq-trigger", "timer_list", "vmallocinfo",
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

OVER_AN_IMAGE = ("hosts", "hostname", "resolv.conf")
"""What a box's network, which is none, must say for itself; the rest of /etc is the image's."""
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": str(HOME),
    "USER": "agent",
    "LOGNAME": "agent",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "TMPDIR": "/tmp",
}


def python_home() -> Path | None:
    """The folder of that interpreter where the box must be shown it; None where /usr has it."""
    home = Path(sys.base_prefix).resolve()
    return None if home.is_relative_to("/usr") else home


def check(spec: BoxSpec) -> None:
    """Refuses a spec that cannot be a box of any backend; ValueError names the field."""
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
        _check_mount(mount, spec.workdir)
    for name in ("memory_gib", "pids", "cpus", "disk_mib", "deadline_s"):
        if not getattr(spec.limits, name) > 0:
            raise ValueError(f"limits: {name}={getattr(spec.limits, name)}: want more than 0")


def _check_mount(mount: Mount, workdir: Path) -> None:
    if not mount.source.exists():
        raise ValueError(f"mounts: source={mount.source} does not exist")
    if not mount.target.is_absolute() or mount.target.is_relative_to(workdir):
        raise ValueError(f"mounts: target={mount.target}: want an absolute path outside workdir={workdir}")


def folder_of(image: Image) -> Path:
    """The root file system of an image on this host; SandboxError for what bubblewrap cannot unpack by itself."""
    if not isinstance(image, FolderImage):
        raise SandboxError(
            f"bubblewrap has no store of images and cannot use {image}: unpack it to a folder, as with "
            "`podman create --name box IMAGE; mkdir DIR; podman export box | tar -x -C DIR; podman rm box` "
            "(`docker` for `podman` where that is the engine), and give FolderImage(path=DIR)"
        )
    if not any((image.path / name).is_symlink() or (image.path / name).exists() for name in ("bin/sh", "usr/bin/sh")):
        raise SandboxError(f"image: path={image.path} is no unpacked root file system: it has no bin/sh")
    return image.path.resolve()


def owns_kernel_files() -> bool:
    """Whether programs of our boxes are the owner of /dev/null, /proc/meminfo and the like, as the host's root is.

    They need no capability to change the modes of those, for the whole host: a read-only mount forbids that.
    """
    return Path("/proc/meminfo").stat().st_uid == os.geteuid()


def first_process(image: Image | None) -> list[str]:
    """The command that starts `boxinit` in the box, without its arguments."""
    command, init = ([python()], INIT) if image is None else (foreign().command, str(FOREIGN_INIT))
    return [*command, "-I", "-S", "-B", init]


def layout(spec: BoxSpec, folder: BoxFolder, files: Path, hide: tuple[Path, ...]) -> list[str]:
    """bwrap's arguments for the file system; later ones cover earlier ones."""
    empty = str(files / "empty")
    size = ["--size", str(spec.limits.disk_mib << 20)]
    args = [*(_host_system(files) if spec.image is None else _image_system(folder_of(spec.image), files))]
    args += ["--proc", "/proc", *_hidden_proc(empty)]
    args += ["--dev", "/dev", *_own_devices(folder), "--perms", "1777", *size, "--tmpfs", "/dev/shm"]
    args += ["--remount-ro", "/dev", *(["--remount-ro", "/proc"] if owns_kernel_files() else [])]
    args += ["--perms", "1777", *size, "--tmpfs", "/tmp", *size, "--tmpfs", str(HOME)]
    args += ["--symlink", "/tmp", "/var/tmp"] if spec.image is None else [*size, "--tmpfs", "/var/tmp"]
    for mount in spec.mounts:
        args += ["--ro-bind", str(mount.source), str(mount.target)]
    for path in hide:
        args += ["--ro-bind", empty, str(path)]
    args += ["--overlay-src", str(spec.base), "--overlay", str(folder.upper), str(folder.work), str(spec.workdir)]
    return [*args, "--remount-ro", "/"]


def _own_devices(folder: BoxFolder) -> Iterator[str]:
    """Covers the host's devices, whose modes its root may change in a box too, by nodes that the agent does not own."""
    for node in sorted(folder.devices.iterdir()) if folder.devices.is_dir() else ():
        yield from ("--dev-bind", str(node), f"/dev/{node.name}")


@functools.cache
def _host_system(files: Path) -> tuple[str, ...]:
    """The host's own programs under an /etc that tells nothing of the host."""
    args = ["--ro-bind", "/usr", "/usr"]
    for name in SYSTEM_LINKS:
        args += _system(Path("/", name))
    args += ["--ro-bind", str(files / "etc"), "/etc", "--ro-bind-try", "/etc/alternatives", "/etc/alternatives"]
    args += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--dir", "/var"]
    home = python_home()
    return (*args, "--ro-bind", str(home), str(home)) if home else tuple(args)


def _image_system(image: Path, files: Path) -> list[str]:
    """The whole image; a layer of private memory above it takes the places of mounts that the image does not have."""
    args = ["--overlay-src", str(image), "--overlay-src", str(files / "over"), "--tmp-overlay", "/"]
    for mount in foreign().mounts:
        args += ["--ro-bind", str(mount.source), str(mount.target)]
        if (mount.source / "site-packages").is_dir():
            args += ["--ro-bind", str(files / "empty"), str(mount.target / "site-packages")]
    return [*args, "--ro-bind", str(files / "init.pyc"), str(FOREIGN_INIT)]


def _system(path: Path) -> list[str]:
    """/bin and the like: the same link as on the host, or the folder itself."""
    if path.is_symlink():
        return ["--symlink", str(path.readlink()), str(path)]
    return ["--ro-bind", str(path), str(path)] if path.is_dir() else []


@functools.cache
def _hidden_proc(empty: str) -> tuple[str, ...]:
    """Covers kernel files that permission bits alone do not keep from a box.

    Programs in a box of the host's root are still uid 0 to these files: they could write
    /proc/sys/kernel/core_pattern, and so run programs on the host.
    """
    args = ["--ro-bind", "/proc/sys", "/proc/sys"]
    for name in HIDDEN_PROC:
        path = Path("/proc", name)
        if path.exists():
            args += ["--ro-bind", empty if path.is_dir() else "/dev/null", str(path)]
    return tuple(args)


def environment(extra: Mapping[str, str] | None) -> dict[bytes, bytes]:
    """A command's whole environment: ours, then what the caller adds; nothing of the host's."""
    pairs = {**ENVIRONMENT, **(extra or {})}
    for key, value in pairs.items():
        if not key or "=" in key or "\0" in key + value:
            raise ValueError(f"env: {key!r}={value!r}: a name may not hold '=', and neither may hold a NUL")
    return {os.fsencode(key): os.fsencode(value) for key, value in pairs.items()}


def files_folder(state: Path) -> Path:
    """What all boxes share: their /etc, the compiled first process; made once per state folder and code version."""
    path = state / f"files-{_digest()}"
    return path if path.is_dir() else _make_files(path)


@functools.cache
def _digest() -> str:
    parts = [sys.version, repr(sorted(ETC.items())), Path(boxinit.__file__).read_text(), Path(__file__).read_text()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _make_files(path: Path) -> Path:
    """Builds it beside and renames, so that two runs at once do not disturb each other."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        _write_files(draft)
        draft.rename(path)
    except OSError as error:
        remove_tree(draft)
        if not path.is_dir():
            raise SandboxError(f"{path}: cannot write the files that boxes share: {error}") from error
    return path


def _write_files(top: Path) -> None:
    for folder in ("empty", "etc/alternatives", "over/etc", "over" + str(PLACE)):
        (top / folder).mkdir(parents=True)
    for name, content in ETC.items():
        (top / "etc" / name).write_text(content)
    for name in OVER_AN_IMAGE:
        (top / "over" / "etc" / name).write_text(ETC[name])
    for place in (top / "init.pyc", top / INIT.lstrip("/")):
        py_compile.compile(boxinit.__file__, cfile=str(place), doraise=True)
