"""The context of an image build: a tar file, same bytes for same contents, and the images that it starts from."""

import hashlib
import os
import re
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from sandbox.base import BuiltImage, SandboxError

ARG = re.compile(r"ARG\s+(\w+)=(\S+)", re.IGNORECASE)
FROM = re.compile(r"FROM\s+(?:--\S+\s+)*(\S+)(?:\s+AS\s+(\S+))?", re.IGNORECASE)
OTHER = re.compile(r"(?:COPY|ADD|RUN)\s.*?(?:--from=|--mount=\S*from=)([^\s,]+)", re.IGNORECASE)
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def write_context(image: BuiltImage, file: IO[bytes]) -> str:
    """Writes the tar and returns a digest of it, of the Dockerfile's path and of the network flag.

    Times and owners are left out, and so is what `.dockerignore` names. SandboxError where there is no such Dockerfile.
    """
    path = dockerfile(image)
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for source in sorted(_files(image.context, _ignored(image.context), path)):
            _add(tar, source, source.relative_to(image.context).as_posix())
    file.flush()
    file.seek(0)
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    digest.update(f"\0{image.dockerfile}\0{image.network}".encode())
    return digest.hexdigest()


def dockerfile(image: BuiltImage) -> Path:
    """Where the Dockerfile lies; SandboxError when that is not a file in the context."""
    path = image.context / image.dockerfile
    if not path.is_file() or not path.resolve().is_relative_to(image.context.resolve()):
        raise SandboxError(f"image: dockerfile={image.dockerfile}: want a file in context={image.context}")
    return path


def starts_from(text: str) -> tuple[str, ...]:
    """The images that a Dockerfile names, in its own order, without its own stages."""
    arguments: dict[str, str] = {}
    stages, found = {"scratch"}, list[str]()
    for line in _instructions(text):
        if (match := ARG.match(line)) and not found:
            arguments[match[1]] = match[2].strip("\"'")
        elif match := FROM.match(line):
            found += _outside(match[1], arguments, stages)
            stages.add((match[2] or "").lower())
        elif match := OTHER.match(line):
            found += _outside(match[1], arguments, stages)
    return tuple(dict.fromkeys(found))


def _outside(word: str, arguments: dict[str, str], stages: set[str]) -> list[str]:
    """The image that a word means; none for a stage, which has a name or a number."""
    name = VARIABLE.sub(lambda match: arguments.get(match[1] or match[2], match[0]), word)
    return [] if name.lower() in stages or name.isdigit() else [name]


def _instructions(text: str) -> Iterator[str]:
    """Lines with their continuations, without comments."""
    lines = [line.strip() for line in text.splitlines() if not line.lstrip().startswith("#")]
    yield from re.sub(r"\\\n", " ", "\n".join(lines)).splitlines()


def _files(folder: Path, ignored: "_Ignored", kept: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        if entry == kept or not ignored.matches(entry):
            yield entry
            if entry.is_dir() and not entry.is_symlink():
                yield from _files(entry, ignored, kept)
        elif entry.is_dir() and not entry.is_symlink() and (ignored.exceptions or entry in kept.parents):
            yield from _files(entry, ignored, kept)


def _add(tar: tarfile.TarFile, source: Path, name: str) -> None:
    """Adds one file, link or folder; other kinds are left out."""
    status = source.lstat()
    info = tarfile.TarInfo(name)
    info.mode = status.st_mode & 0o777
    if stat.S_ISREG(status.st_mode):
        info.size = status.st_size
        with source.open("rb") as content:
            tar.addfile(info, content)
    elif stat.S_ISLNK(status.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.fspath(source.readlink())
        tar.addfile(info)
    elif stat.S_ISDIR(status.st_mode):
        info.type = tarfile.DIRTYPE
        tar.addfile(info)


@dataclass(frozen=True)
class _Ignored:
    """The patterns of a `.dockerignore`; a later one wins, and `!` takes back."""

    context: Path
    patterns: tuple[tuple[re.Pattern[str], bool], ...]

    @property
    def exceptions(self) -> bool:
        """Whether something below an ignored folder may be wanted after all."""
        return any(not ignore for _, ignore in self.patterns)

    def matches(self, path: Path) -> bool:
        name = path.relative_to(self.context)
        names = [name.as_posix(), *(parent.as_posix() for parent in name.parents)]
        verdicts = [ignore for pattern, ignore in self.patterns if any(pattern.fullmatch(part) for part in names)]
        return bool(verdicts) and verdicts[-1]


def _ignored(context: Path) -> _Ignored:
    path = context / ".dockerignore"
    lines = path.read_text().splitlines() if path.is_file() else []
    words = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return _Ignored(context, tuple((_pattern(word.removeprefix("!")), not word.startswith("!")) for word in words))


def _pattern(word: str) -> re.Pattern[str]:
    """Go's file patterns: `*` and `?` within one name, `**/` for any number of folders."""
    clean = PurePosixPath("/", word.strip()).as_posix().lstrip("/")
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", clean)
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(known.get(part) or (part if part.startswith("[") else re.escape(part)) for part in parts))
