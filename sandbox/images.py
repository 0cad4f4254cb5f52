"""Images in an engine's store, each named after a digest of what it is made from; nothing is fetched but by `prepare`.

A folder's digest is taken from the names, kinds, modes, owners, sizes and times of change of all that is in it: any
write changes the last, and nothing has to be read. What a Dockerfile builds from is read in full.
"""

import asyncio
import hashlib
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath

from sandbox.base import (
    BuiltImage,
    FolderImage,
    Image,
    Limits,
    Progress,
    RegistryImage,
    SandboxError,
    StoredImage,
    no_progress,
)
from sandbox.context import dockerfile, starts_from, write_context
from sandbox.engine import BOX_LABEL, OWNER_LABEL, Container, Engine
from sandbox.spool import alone, spool, tar
from sandbox.state import remove_tree, this_owner

FOLDER = "localhost/lego-folder"
BUILT = "localhost/lego-built"
DIGITS = 32

_digests: dict[FolderImage | BuiltImage, str] = {}
"""What `prepare` or the first `resolve` of this process saw: thousands of boxes do not look again."""


async def prepare(engine: Engine, images: Iterable[Image], progress: Progress = no_progress) -> None:
    """Brings every image into the store that is not there yet; those that are built come last.

    Two at once, also of two processes, do the work once.
    """
    wanted = sorted(dict.fromkeys(images), key=lambda image: isinstance(image, BuiltImage))
    for done, image in enumerate(wanted):
        said = partial(_say, progress, done, len(wanted), _words(image))
        said(0, 0, "looking")
        match image:
            case StoredImage():
                await resolve(engine, image)
            case RegistryImage():
                await _pull(engine, image.reference, said)
            case FolderImage():
                await _import(engine, image, said)
            case BuiltImage():
                await _build(engine, image, said)
    progress(len(wanted), len(wanted), "all images are there")


async def resolve(engine: Engine, image: Image) -> str:
    """The id of an image in the store; SandboxError with the command that would bring it, if it is not there."""
    name = await _name(engine, image)
    found = await engine.image_id(name)
    if found is None:
        raise SandboxError(f"{_words(image)} is not in the engine's store; `{_remedy(engine, image, name)}` brings it")
    return found


async def extract(engine: Engine, image: Image, folder: PurePosixPath, into: Path) -> Path:
    """Copies a folder of an image out to a folder below `into`, for `BoxSpec.base`, and returns where it lies.

    All files are ours, without setuid bits; devices, sockets and pipes are left out. A copy that is there is kept.
    """
    found = await resolve(engine, image)
    target = into / hashlib.sha256(f"{found}\0{folder}".encode()).hexdigest()[:DIGITS]
    async with alone(str(target)):
        if not target.exists():
            part = target.with_name(f"{target.name}.part")
            await asyncio.to_thread(remove_tree, part)  # of a run that was killed
            part.mkdir(parents=True)
            try:
                await _copy_out(engine, found, folder, part)
                part.rename(target)
            finally:
                await asyncio.to_thread(remove_tree, part)
    return target


def _words(image: Image) -> str:
    """An image as its user knows it."""
    match image:
        case FolderImage():
            return f"image of the folder {image.path}"
        case StoredImage():
            return f"image {image.name}"
        case RegistryImage():
            return f"image {image.reference}"
        case BuiltImage():
            return f"image built from {image.context / image.dockerfile}"


def _remedy(engine: Engine, image: Image, name: str) -> str:
    match image:
        case FolderImage():
            return f"tar -C {image.path} -c . | {engine.command} import - {name}"
        case BuiltImage():
            network = "" if image.network else "--network none "
            return f"{engine.command} build {network}-t {name} -f {image.context / image.dockerfile} {image.context}"
        case StoredImage() | RegistryImage():
            return f"{engine.command} pull {name}"


def _say(progress: Progress, done: int, total: int, words: str, part: int, parts: int, what: str) -> None:
    """One image's own progress as part of that of all."""
    progress(done, total, f"{words}: {what}" + (f" {part}/{parts}" if parts else ""))


async def _name(engine: Engine, image: Image, *, again: bool = False) -> str:
    """What an image is called in the store; `again` looks at its files once more."""
    if isinstance(image, StoredImage):
        return image.name
    if isinstance(image, RegistryImage):
        return image.reference
    if again or image not in _digests:
        _digests[image] = await asyncio.to_thread(_digest, image)
    digest = _digests[image]
    if isinstance(image, FolderImage):
        return f"{FOLDER}:{digest[:DIGITS]}"
    bases = [await engine.image_id(base) or "" for base in _bases(image)]
    return f"{BUILT}:{hashlib.sha256(' '.join([digest, *bases]).encode()).hexdigest()[:DIGITS]}"


def unusable(image: Image | None) -> str | None:
    """What is wrong with an image that no engine has to be asked about; None where nothing is."""
    try:
        if isinstance(image, FolderImage):
            _check_folder(image.path)
        elif isinstance(image, BuiltImage):
            dockerfile(image)
    except SandboxError as error:
        return str(error)
    return None


def _digest(image: FolderImage | BuiltImage) -> str:
    if isinstance(image, FolderImage):
        return _folder_digest(image.path)
    with spool() as (file, _):
        return write_context(image, file)


def _folder_digest(path: Path) -> str:
    _check_folder(path)
    digest = hashlib.sha256(os.fsencode(path.resolve()))
    for name, status in _entries(path):
        facts = (status.st_mode, status.st_uid, status.st_gid, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        digest.update(b"\0" + os.fsencode(name) + repr(facts).encode())
    return digest.hexdigest()


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        raise SandboxError(f"image: path={path}: no such folder; want an unpacked root file system")


def _entries(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as scan:
        entries = sorted(scan, key=lambda entry: entry.name)
    for entry in entries:
        yield entry.path, entry.stat(follow_symlinks=False)
        if entry.is_dir(follow_symlinks=False):
            yield from _entries(Path(entry.path))


async def _pull(engine: Engine, reference: str, progress: Progress) -> None:
    async with alone(reference):
        if await engine.image_id(reference) is None:
            await engine.pull(reference, progress)
            await _check(engine, reference)


async def _import(engine: Engine, image: FolderImage, progress: Progress) -> None:
    name = await _name(engine, image, again=True)
    async with alone(name):
        if await engine.image_id(name) is None:
            progress(0, 0, "importing")
            # As an ordinary user we own what root shall own in the box.
            owner = ["--numeric-owner"] if os.geteuid() == 0 else ["--owner=0", "--group=0"]
            with spool() as (file, path):
                await tar("--create", "--one-file-system", *owner, "-C", str(image.path), ".", stdout=file)
                await engine.load(path, name)
            await _check(engine, name)


async def _build(engine: Engine, image: BuiltImage, progress: Progress) -> None:
    for base in _bases(image):
        if image.network:
            await _pull(engine, base, progress)
        elif await engine.image_id(base) is None:
            raise SandboxError(
                f"{_words(image)}: its FROM image {base} is not in the engine's store and network=False; prepare "
                f"RegistryImage(reference={base!r}) along with it, or run `{engine.command} pull {base}`"
            )
    name = await _name(engine, image, again=True)
    async with alone(name):
        if await engine.image_id(name) is None:
            progress(0, 0, "building")
            with spool() as (file, path):
                await asyncio.to_thread(write_context, image, file)
                await engine.build(path, image.dockerfile, name, network=image.network, progress=progress)
            await _check(engine, name)


def _bases(image: BuiltImage) -> tuple[str, ...]:
    return starts_from(dockerfile(image).read_text())


async def _check(engine: Engine, name: str) -> None:
    """A daemon that dies in the middle may look like one that is done."""
    if await engine.image_id(name) is None:
        raise SandboxError(f"the engine said it was done with {name}, but `{engine.command} images` does not have it")


async def _copy_out(engine: Engine, image: str, folder: PurePosixPath, target: Path) -> None:
    """Copies through a container that never runs."""
    made = await engine.create(_never_run(image))
    try:
        with spool() as (file, path):
            await engine.archive(made, Path(folder), path)
            options = ("--strip-components=1", "--no-same-owner", "--same-permissions", "--delay-directory-restore")
            await tar("--extract", *options, "-C", str(target), stdin=file)
    finally:
        await engine.remove(made)
    await asyncio.to_thread(_tame, target)


def _never_run(image: str) -> Container:
    """A container to copy files from."""
    name = f"lego-copy-{secrets.token_hex(6)}"
    return Container(
        name=name,
        image=image,
        argv=("true",),
        env={},
        binds=(),
        overlay=None,
        tmpfs=(),
        limits=Limits(),
        labels={OWNER_LABEL: this_owner(), BOX_LABEL: name},
        runtime=None,
    )


def _tame(folder: Path) -> None:
    """Leaves files, folders and links that we may read and write, and nothing that gives rights."""
    for path, status in list(_entries(folder)):
        if stat.S_ISDIR(status.st_mode):
            Path(path).chmod(stat.S_IMODE(status.st_mode) & 0o777 | 0o700)
        elif stat.S_ISREG(status.st_mode):
            Path(path).chmod(stat.S_IMODE(status.st_mode) & 0o777 | 0o600)
        elif not stat.S_ISLNK(status.st_mode):
            Path(path).unlink()
