"""Whether a harness can run here, told before a model is loaded: by what the cache holds, and by a start in a box."""

import json
import platform
import re
import struct
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from harnesses import python
from harnesses.base import HOME, Command, Endpoint, Harness, HarnessNotFetched
from harnesses.facts import needed
from harnesses.packages import (
    INTERPRETED,
    Fetchable,
    HostPython,
    NpmTarball,
    NpmTree,
    Part,
    Wheel,
    WheelTree,
    folder_of,
    record_of,
)
from harnesses.reading import last_line
from sandbox.base import Box, BoxSpec, ExecResult, Image, Limits, Mount, Sandbox, SandboxError

START_S = 30.0
NOBODY = Endpoint(url="http://127.0.0.1:4000", key="none", model="policy", context_tokens=32768, output_tokens=2048)
"""For the settings of a command that only tells its version."""
_WRITES = 'for place in "$HOME" /tmp; do : > "$place/.lego-check" || exit 1; done'
HEAD_BYTES = 4096
_LACKS = 'for program in "$@"; do command -v "$program" > /dev/null || echo "$program"; done'
_ELF, _INTERPRETER = b"\x7fELF\x02\x01", 3
_GLIBC = re.compile(rb"GNU C Library [^\n]* version (\d+)\.(\d+)")


async def checked(
    harnesses: Iterable[Harness], cache: Path, sandbox: Sandbox | None, image: Image | None = None
) -> list[str]:
    """All that keeps these harnesses from running, each with what to do about it; empty where they can.

    With a sandbox, each is also started in a box, on `image`, which must be prepared.
    """
    found = []
    for harness in harnesses:
        wrong = list(problems(harness, cache))
        if not wrong and sandbox is not None and (fault := await start(harness, cache, sandbox, image)):
            wrong = [fault]
        found += [f"harness {harness.name}: {problem}" for problem in wrong]
    return found


def problems(harness: Harness, cache: Path) -> Iterator[str]:
    """What this machine's files tell. Starts nothing, and takes no longer than reading a record and a few names."""
    parts = harness.parts if isinstance(harness, Fetchable) else ()
    foreign = [part for part in parts if part.machine not in (INTERPRETED, platform.machine())]
    if foreign:
        yield f"{foreign[0].name} is made for {foreign[0].machine}, this machine is {platform.machine()}"
        return
    try:
        mounts = harness.mounts(cache)
    except HarnessNotFetched as error:
        yield str(error).removeprefix(f"harness {harness.name} ")
        return
    except OSError as error:
        yield f"{cache} cannot be read ({error.strerror}): name another folder with --cache"
        return
    if isinstance(harness, Fetchable):
        yield from _of_fetched(harness, cache)
        return
    for mount in mounts:
        if not mount.source.exists():
            yield f"{mount.source} is missing, which its box shows as {mount.target}"


def _of_fetched(harness: Fetchable, cache: Path) -> Iterator[str]:
    yield from _of_record(harness, cache)
    for part in harness.parts:
        yield from _of_part(part, harness, cache)
    yield from _of_program(harness, cache)


def _again(harness: Fetchable, cache: Path, broken: Path) -> str:
    return f"remove {broken} and run `python -m harnesses.fetch {harness.name} --cache {cache}`"


def _of_record(harness: Fetchable, cache: Path) -> Iterator[str]:
    """What `fetch` wrote down against what is pinned now."""
    path = record_of(harness, cache)
    remedy = _again(harness, cache, path)
    try:
        record = json.loads(path.read_bytes())
        version, pins = record["version"], dict(record["parts"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        yield f"{path} cannot be read ({error}): {remedy}"
        return
    if version != harness.version:
        yield f"{path} is of version {version}, wanted {harness.version}: {remedy}"
    for part in harness.parts:
        found = str(pins.get(folder_of(part, cache).name))
        if not found.endswith(_pin(part)):
            yield f"{path} has {found} for {part.name} {part.version}, wanted {_pin(part)}: {remedy}"


def _pin(part: Part) -> str:
    """The hash that the record ends its line with; nothing for what is copied from the machine, which has none."""
    match part:
        case NpmTarball():
            return part.sha512
        case HostPython():
            return ""
        case _:
            return part.sha256


def _of_part(part: Part, harness: Fetchable, cache: Path) -> Iterator[str]:
    folder = folder_of(part, cache)
    remedy = _again(harness, cache, folder)
    for name in _files(part):
        try:
            whole = (folder / name).is_dir() or (folder / name).stat().st_size > 0
        except OSError as error:
            yield f"{folder / name} cannot be read ({error.strerror}): {remedy}"
        else:
            if not whole:
                yield f"{folder / name} is empty: {remedy}"
    if isinstance(part, WheelTree):
        yield from _of_library(part, folder_of(part.python, cache) / "clib/libc.so.6")


def _files(part: Part) -> Sequence[str]:
    """Files and folders that an installed part surely has, relative to its folder."""
    match part:
        case NpmTarball():
            return [rule.split(" -> ")[1] for rule in part.keep]
        case Wheel():
            return part.keep
        case NpmTree():
            return [f"node_modules/{part.name}/package.json"]
        case WheelTree():
            return [f"{part.name.replace('-', '_')}-{part.version}.dist-info/METADATA"]
        case HostPython():
            return ["bin/python", f"clib/{python.LOADER}", "clib/libc.so.6", f"lib/python{part.version}"]


def _of_library(part: WheelTree, library: Path) -> Iterator[str]:
    """The C library that the wheels run with is the one that their interpreter was copied with."""
    wanted = ".".join(map(str, part.glibc))
    found = glibc_of(library) if library.is_file() else None
    if found is None or found < part.glibc:
        said = "no glibc" if found is None else f"glibc {'.'.join(map(str, found))}"
        yield (
            f"{part.name} {part.version} needs glibc {wanted} or newer, {library} is {said}: "
            f"copy a Python {part.python.version} from a newer system"
        )


def glibc_of(library: Path) -> tuple[int, int] | None:
    """The version that a `libc.so.6` says it is; None for another C library."""
    found = _GLIBC.search(library.read_bytes())
    return (int(found[1]), int(found[2])) if found else None


def _of_program(harness: Fetchable, cache: Path) -> Iterator[str]:
    program = Path(_says_version(harness, [folder_of(part, cache) for part in harness.parts])[0])
    if program.is_file() and not program.stat().st_mode & 0o111:
        yield f"{program} is not executable: {_again(harness, cache, _home(program, harness, cache))}"


def _home(program: Path, harness: Fetchable, cache: Path) -> Path:
    """The folder of the part that a program belongs to."""
    return next(f for f in (folder_of(part, cache) for part in harness.parts) if program.is_relative_to(f))


def _says_version(harness: Fetchable, folders: Sequence[Path]) -> tuple[str, ...]:
    """As `starts`, but for harnesses of wheels, whose import takes seconds: `fetch` has seen it."""
    if isinstance(harness.parts[-1], WheelTree):
        return python.tells_version(folders, harness.parts[-1].name)
    return harness.starts(folders)


async def start(harness: Harness, cache: Path, sandbox: Sandbox, image: Image | None = None) -> str | None:
    """What keeps the harness from starting in a box, and what to do; None where it answers with its pinned version.

    Opens one box on an empty folder, and writes the harness's own files in it.
    """
    with tempfile.TemporaryDirectory() as base:
        spec = BoxSpec(
            base=Path(base), image=image, mounts=harness.mounts(cache), limits=Limits(deadline_s=3 * START_S)
        )
        try:
            async with sandbox.open(spec) as box:
                return await _in_box(harness, cache, box, spec.mounts)
        except (SandboxError, ValueError) as error:
            shown = ", ".join(f"{mount.source} as {mount.target}" for mount in spec.mounts)
            return f"no box can be opened that shows {shown or 'nothing'}: {error}"


async def _in_box(harness: Harness, cache: Path, box: Box, mounts: Sequence[Mount]) -> str | None:
    command = harness.command("Say your version.", NOBODY)
    writes = await box.exec(("/bin/sh", "-c", _WRITES), env=command.env, timeout_s=START_S)
    if writes.code != 0:
        return f"its box has no {HOME} and /tmp to write in ({_last(writes)}): let no mount and no image cover them"
    lacks = await box.exec(("/bin/sh", "-c", _LACKS, "sh", *needed(harness)), env=command.env, timeout_s=START_S)
    if lacks.stdout.strip():
        names = ", ".join(lacks.stdout.decode(errors="replace").split())
        return f"it cannot work without {names}, which its box does not have: install {names} in the image"
    for path, content in command.files.items():
        await box.put(path, content)
    if isinstance(harness, Fetchable):
        folders = [folder_of(part, cache) for part in harness.parts]
        argv = _says_version(harness, folders)
        answer = await box.exec([_shown(word, mounts) for word in argv], env=command.env, timeout_s=START_S)
        return await _fault(harness, cache, Path(argv[0]), answer, box)
    return await _findable(command, box)


async def _findable(command: Command, box: Box) -> str | None:
    """A harness without a version to ask for must at least have its program in the box."""
    script = 'place=$(command -v "$0") && test -x "$place"'
    found = await box.exec(("/bin/sh", "-c", script, command.argv[0]), env=command.env, timeout_s=START_S)
    return None if found.code == 0 else f"{command.argv[0]} is no program in its box: mount it, or use an image with it"


def _shown(word: str, mounts: Sequence[Mount]) -> str:
    """A path of the cache as the box shows it; any other word as it is."""
    place = next((m for m in mounts if word.startswith("/") and Path(word).is_relative_to(m.source)), None)
    return word if place is None else str(place.target / Path(word).relative_to(place.source))


async def _fault(harness: Fetchable, cache: Path, program: Path, answer: ExecResult, box: Box) -> str | None:
    """What is wrong with the answer of a program of the cache to the question for its version."""
    said = (answer.stdout + answer.stderr).decode(errors="replace").split()
    if answer.code == 0 and any(word.rstrip(".,") == harness.version for word in said):
        return None
    if answer.timed_out:
        return f"{program} did not answer within {START_S:g} s: is this machine busy, or its memory full?"
    loader = await _lacking_loader(program, box)
    if loader is not None:
        return (
            f"{program} needs glibc and its loader {loader}, which the box does not have: use an image with glibc "
            "(Debian, Ubuntu, Fedora; not Alpine), or a harness that brings its own, as codex and mini do"
        )
    if b"GLIBC_" in answer.stderr:
        return f"{program} needs a newer glibc than its box has ({_last(answer)}): use a newer image, or system"
    if answer.code == 0:
        told = f"answers {' '.join(said)[:80] or 'nothing'!r}, wanted {harness.version}"
    else:
        told = f"does not start (status {answer.code}: {_last(answer)})"
    return f"{program} {told}: {_again(harness, cache, _home(program, harness, cache))}"


async def _lacking_loader(program: Path, box: Box) -> str | None:
    """The loader of a program, where the box does not have it: the kernel then says that the program is not there."""
    with program.open("rb") as file:
        loader = loader_of(file.read(HEAD_BYTES))
    if loader is None:
        return None
    there = await box.exec(("/bin/sh", "-c", 'test -e "$0"', loader), timeout_s=START_S)
    return None if there.code == 0 else loader


def loader_of(head: bytes) -> str | None:
    """The loader that a program for 64-bit Linux names in its first bytes; None for a static one, or none at all."""
    if not head.startswith(_ELF) or len(head) < 64:
        return None
    (table,) = struct.unpack_from("<Q", head, 32)
    size, count = struct.unpack_from("<HH", head, 54)
    for place in range(table, min(table + size * count, len(head) - 40 + 1), size or 1):
        kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", head, place)
        if kind == _INTERPRETER:
            return head[offset : offset + length].rstrip(b"\0").decode(errors="replace")
    return None


def _last(result: ExecResult) -> str:
    return last_line(result.stderr) or last_line(result.stdout) or "it printed nothing"
