"""Tasks in Harbor's format, a folder each: task.toml, instruction.md, environment/, tests/test.sh.

What an agent works on is the WORKDIR of the task's image, or the folder `base/` beside task.toml where there is one.
Nothing else of the folder is in its box: no test and no solution. What task.toml asks for and no box here has
(GPUs, services, secrets, several steps) is refused; internet access is not given, whatever it says.
"""

import fnmatch
import hashlib
import logging
import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lego.errors import UsageError, VerdictError
from lego.tasks.script_verifier import check_script
from lego.tasks.task import Script, Task, TaskSet
from sandbox.base import BuiltImage, Image, Limits, Progress, RegistryImage, Sandbox, StoredImage, User

log = logging.getLogger(__name__)
HOST_WORKDIR = PurePosixPath("/app")
"""Where a task without an image works when it names no place, as most images of Harbor's tasks do."""
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Nothing = Annotated[list[Any] | dict[str, Any] | None, Field(max_length=0)]
"""A field that asks for what no box here has: it may be there, but empty."""
_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*([KMGT])i?B?$", re.IGNORECASE)
_MIB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Verifier(_Table):
    timeout_sec: Seconds = 600.0
    user: Literal["root", "agent", 0, 1000] | None = None
    env: Nothing = None
    environment_mode: Literal["shared"] = "shared"
    collect: Nothing = None


class _Agent(_Table):
    timeout_sec: Seconds | None = None
    user: Literal["agent", 1000] | None = None


class _Environment(_Table):
    docker_image: str | None = None
    workdir: PurePosixPath | None = None
    os: Literal["linux"] = "linux"
    cpus: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    memory_mb: Annotated[int, Field(gt=0)] | None = None
    storage_mb: Annotated[int, Field(gt=0)] | None = None
    memory: Annotated[str, Field(pattern=_SIZE)] | None = None
    storage: Annotated[str, Field(pattern=_SIZE)] | None = None
    allow_internet: bool = False
    network_mode: str | None = None
    build_timeout_sec: Seconds = 600.0
    gpus: Literal[0] | None = None
    gpu_types: Nothing = None
    tpu: Nothing = None
    env: Nothing = None
    mcp_servers: Nothing = None
    skills_dir: Literal[""] | None = None
    healthcheck: Nothing = None


class _Metadata(_Table):
    """What people say about the task, of which one field is read."""

    model_config = ConfigDict(extra="allow", frozen=True)
    harness: Annotated[str, Field(min_length=1)] | None = None


class _TaskToml(_Table):
    """What task.toml may say. Most of the first few tell people about the task and are not read."""

    version: str | None = None
    schema_version: str | None = None
    metadata: _Metadata = _Metadata()
    task: dict[str, Any] = Field(default_factory=dict)
    source: str | None = None
    solution: dict[str, Any] = Field(default_factory=dict)
    artifacts: list[Any] = Field(default_factory=list)
    verifier: _Verifier = _Verifier()
    agent: _Agent = _Agent()
    environment: _Environment = _Environment()
    steps: Nothing = None


@runtime_checkable
class ImageStore(Protocol):
    """A sandbox with images of its own, as container engines have."""

    async def extract(self, image: Image, folder: PurePosixPath, into: Path) -> Path:
        """Copies a folder of an image out to a folder below `into`; returns where it lies."""
        ...


@dataclass(frozen=True, kw_only=True)
class HarborTasks:
    """A folder of tasks in Harbor's format."""

    path: Path
    """The folder: `NAME/task.toml` each."""
    heldout: tuple[str, ...] = ()
    """Names of the tasks that are not trained on; `*` stands for anything."""
    network: bool = False
    """Whether, before the run, images may be fetched from a registry and RUN steps of Dockerfiles may reach out."""
    host: bool = False
    """Run on this host's own /usr, with bubblewrap, whatever image a task names; each task then needs a `base/`."""
    max_patch_bytes: int = 1 << 24
    """A larger change is a failure and is not run."""

    async def build(self, cache: Path, sandbox: Sandbox, progress: Progress) -> TaskSet:
        """All tasks in the order of their names, their images prepared; UsageError names file and field."""
        files = sorted(self.path.glob("*/task.toml"))
        if not files:
            raise UsageError(f"tasks.path: no NAME/task.toml below {self.path}")
        self._check_names([file.parent.name for file in files])
        given = {file: _parsed(file) for file in files}
        _warn_of_internet(given)
        if not self.host and not isinstance(sandbox, ImageStore):
            raise UsageError(
                f"tasks.host: False, but {type(sandbox).__name__} has no images; wanted Podman or Docker as sandbox, "
                "or host True and a folder base/ in each task"
            )
        images = {} if self.host else {file: self._image(file, toml) for file, toml in given.items()}
        await sandbox.prepare(dict.fromkeys(images.values()), progress)
        tasks = []
        for done, (file, toml) in enumerate(given.items(), 1):
            tasks.append(await self._task(file, toml, images.get(file), cache, sandbox))
            progress(done, len(files), "reading tasks")
        return TaskSet(tuple(tasks))

    def _check_names(self, names: list[str]) -> None:
        for pattern in self.heldout:
            if not fnmatch.filter(names, pattern):
                raise UsageError(f"tasks.heldout: {pattern!r} names no task in {self.path}; there are {names[:5]}")

    def _image(self, file: Path, toml: _TaskToml) -> Image:
        name, context = toml.environment.docker_image, file.parent / "environment"
        if name is not None:
            return RegistryImage(reference=name) if self.network else StoredImage(name=name)
        if not (context / "Dockerfile").is_file():
            raise UsageError(
                f"{file}: environment.docker_image: not given, and no environment/Dockerfile beside it; "
                "on this host's /usr it runs with tasks.host True"
            )
        return BuiltImage(context=context.resolve(), network=self.network)

    async def _task(self, file: Path, toml: _TaskToml, image: Image | None, cache: Path, sandbox: Sandbox) -> Task:
        folder, environment = file.parent, toml.environment
        workdir = _workdir(file, environment, on_host=self.host)
        script = Script(
            folder=(folder / "tests").resolve(), timeout_s=toml.verifier.timeout_sec, user=_user(toml.verifier.user)
        )
        try:
            check_script(Path(workdir), script)
        except VerdictError as error:
            raise UsageError(f"{file}: {error}") from error
        base = (folder / "base").resolve()
        if not base.is_dir():
            if image is None or not isinstance(sandbox, ImageStore):
                raise UsageError(f"{file}: no folder base/ beside it, which tasks.host True needs")
            base = await sandbox.extract(image, workdir, cache / "harbor")
        held = any(fnmatch.fnmatchcase(folder.name, pattern) for pattern in self.heldout)
        return Task(
            id=folder.name,
            package=self.path.resolve().name,
            split="heldout" if held else "train",
            digest=_digest(folder, image, workdir),
            base=base,
            instruction=_instruction(folder / "instruction.md"),
            verifier=script,
            image=image,
            workdir=Path(workdir),
            limits=_limits(environment),
            harness_s=toml.agent.timeout_sec,
            harness=toml.metadata.harness,
            max_patch_bytes=self.max_patch_bytes,
        )


def _parsed(file: Path) -> _TaskToml:
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (file.parent / "environment" / name).exists():
            raise UsageError(f"{file.parent / 'environment' / name}: services beside the box are not supported")
    try:
        return _TaskToml.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    except ValidationError as error:
        told = [f"{'.'.join(map(str, one['loc']))}: {one['input']!r}, {one['msg']}" for one in error.errors()]
        raise UsageError(f"{file}: {'; '.join(told)}") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise UsageError(f"{file}: {error}") from error


def _warn_of_internet(given: dict[Path, _TaskToml]) -> None:
    names = [file.parent.name for file, toml in given.items() if _wants_internet(toml.environment)]
    if names:
        log.warning("%d tasks may use the internet, which no box has: %s", len(names), ", ".join(names[:5]))


def _wants_internet(environment: _Environment) -> bool:
    return environment.allow_internet or environment.network_mode not in (None, "no-network", "none")


def _workdir(file: Path, environment: _Environment, *, on_host: bool) -> PurePosixPath:
    """Where the agent works: what task.toml says, or else the last WORKDIR of the Dockerfile."""
    found = environment.workdir
    dockerfile = file.parent / "environment" / "Dockerfile"
    if found is None and environment.docker_image is None and dockerfile.is_file():
        found = _last_workdir(dockerfile)
    if found is None and on_host:
        return HOST_WORKDIR
    if found is None or not found.is_absolute():
        raise UsageError(
            f"{file}: environment.workdir: {found}, wanted an absolute path, here or as WORKDIR in the last stage of "
            "environment/Dockerfile"
        )
    return found


def _last_workdir(dockerfile: Path) -> PurePosixPath | None:
    found = None
    for number, line in enumerate(dockerfile.read_text(encoding="utf-8").splitlines(), 1):
        word, _, rest = line.strip().partition(" ")
        if word.upper() == "FROM":
            found = None
        elif word.upper() == "WORKDIR":
            if "$" in rest:
                raise UsageError(f"{dockerfile}:{number}: {line.strip()}: name it in task.toml as environment.workdir")
            found = (found or PurePosixPath("/")) / rest.strip().strip("\"'")
    return found


def _instruction(file: Path) -> str:
    text = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
    if not text:
        raise UsageError(f"{file}: missing or empty, wanted what the agent shall do")
    return text


def _user(name: str | int | None) -> User:
    """Who runs test.sh. Root has no rights over the agent's files here, so only a task that names it gets it."""
    return "root" if name in ("root", 0) else "agent"


def _limits(environment: _Environment) -> Limits | None:
    """What the task says of its box; None where it says nothing, so that the recipe's limits hold."""
    memory_mib = environment.memory_mb or _mib(environment.memory)
    disk_mib = environment.storage_mb or _mib(environment.storage)
    given = {
        "memory_gib": memory_mib and memory_mib / 1024,
        "disk_mib": disk_mib and max(int(disk_mib), 1),
        "cpus": environment.cpus,
    }
    named: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return Limits(**named) if named else None


def _mib(size: str | None) -> float | None:
    """A size such as 2G or 512M, in MiB."""
    match = _SIZE.fullmatch(size) if size is not None else None
    return float(match[1]) * _MIB[match[2].upper()] if match else None


def _digest(folder: Path, image: Image | None, workdir: PurePosixPath) -> str:
    """SHA-256 over all of a task but its solution. What a tag of a registry points at is not in it."""
    total = hashlib.sha256(f"{image}\0{workdir}".encode())
    for path in _files(folder):
        kind, content = (b"l", os.fsencode(path.readlink())) if path.is_symlink() else (b"f", path.read_bytes())
        mode = b"x" if not path.is_symlink() and os.access(path, os.X_OK) else b"-"
        name = os.fsencode(path.relative_to(folder))
        total.update(b"%d %s%d %s%s" % (len(name), name, len(content), kind + mode, content))
    return total.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if (path.is_symlink() or path.is_file()) and path.relative_to(folder).parts[0] != "solution":
            yield path
