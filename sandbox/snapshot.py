"""The clean repository: the exact tree of one commit under one fixed commit, and nothing else that git could show.

Neither configuration, hooks, filters nor attributes of the source run: its object store is read, the rest is new.
"""

import logging
import os
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sandbox.base import SandboxError
from sandbox.git import AS_THEY_ARE, git, quoted
from sandbox.state import OWNER_WORDS, owner_lives, remove_tree, this_owner

log = logging.getLogger(__name__)

BRANCH = "main"
SECONDS = 946684800
"""When the one commit was made and all files were last changed: the first second of 2000."""
MESSAGE = b"Start\n"
PERSON = {
    f"GIT_{role}_{field}": value
    for role in ("AUTHOR", "COMMITTER")
    for field, value in (("NAME", "lego"), ("EMAIL", "lego@localhost"), ("DATE", f"{SECONDS} +0000"))
}
# A copy of the folder, or its sight through an overlay and a user namespace, has other inodes, owners and change times.
CONFIG = """[core]
\trepositoryformatversion = %d
\tfilemode = true
\tbare = false
\tlogallrefupdates = true
\tcheckStat = minimal
\ttrustctime = false
"""
OTHER_FORMAT = "[extensions]\n\tobjectFormat = %s\n"
GITLINK = b"160000"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What was written."""

    commit: str
    """Id of the one commit: the same on every machine for the same tree."""
    submodules: tuple[Path, ...]
    """Folders that are left empty, because other repositories would fill them."""


@dataclass(frozen=True)
class _Source:
    """Where a repository keeps its objects, and the full id of the wanted commit."""

    objects: Path
    format: str
    commit: str


def snapshot(repository: Path, commit: str, out: Path) -> Snapshot:
    """Makes the new folder `out`; it has this name once it is whole and checked.

    `repository` may be a work tree, a linked one, or bare, and shallow if it has the commit. ValueError names the
    argument that cannot be, SandboxError says what git misses.
    """
    if out.exists() or out.is_symlink():
        raise ValueError(f"out={out}: exists already; nothing is written over")
    source = _source(repository, commit)
    _clear_drafts(out)
    draft = out.with_name(f".{out.name}.{this_owner()}-{secrets.token_hex(4)}")
    draft.mkdir(parents=True)
    try:
        made = _make(source, draft)
        draft.rename(out)
    except BaseException:
        remove_tree(draft)
        raise
    if made.submodules:
        names = ", ".join(map(str, made.submodules))
        log.warning("%s has submodules, which are empty folders in the snapshot: %s", repository, names)
    return made


def _source(repository: Path, commit: str) -> _Source:
    if not repository.is_dir():
        raise ValueError(f"repository={repository}: not a folder")
    top = repository.resolve()
    env = {"GIT_CEILING_DIRECTORIES": str(top.parent)}
    asked = ("-c", "safe.directory=*", "rev-parse", "--path-format=absolute")
    try:
        told = git(top, *asked, "--show-object-format", "--git-path", "objects", env=env)
    except SandboxError as error:
        raise ValueError(f"repository={repository}: not a git repository that this git can read: {error}") from error
    form, _, objects = os.fsdecode(told).removesuffix("\n").partition("\n")
    try:
        if commit.startswith("-"):
            raise SandboxError("a commit's name does not begin with '-'")
        found = git(top, *asked[:-1], "--verify", f"{commit}^{{commit}}", env=env).decode().strip()
    except SandboxError as error:
        raise ValueError(f"commit={commit}: {repository} has no such commit: {error}") from error
    return _Source(Path(objects), form, found)


def _clear_drafts(out: Path) -> None:
    """Removes what killed processes left half-made beside `out`."""
    prefix = f".{out.name}."
    for path in out.parent.iterdir() if out.parent.is_dir() else ():
        owner = path.name.removeprefix(prefix)
        if path.name.startswith(prefix) and owner.count("-") == OWNER_WORDS and not owner_lives(owner):
            with suppress(OSError):  # somebody else is clearing too, or its git has not noticed yet
                remove_tree(path)


def _make(source: _Source, folder: Path) -> Snapshot:
    store = _empty_repository(folder, source.format)
    env = {"GIT_DIR": str(store), "GIT_WORK_TREE": str(folder)}
    commit = _copy_commit(source, store, env)
    git(folder, "-c", "core.logAllRefUpdates=false", "update-ref", f"refs/heads/{BRANCH}", commit, env=env)
    git(folder, "read-tree", commit, env=env)
    git(folder, "checkout-index", "--all", env=env)
    submodules = _set_times(folder, env)
    git(folder, "update-index", "-q", "--refresh", env=env)
    _check(folder, env)
    return Snapshot(commit=commit, submodules=submodules)


def _empty_repository(folder: Path, form: str) -> Path:
    """A `.git` without templates, remotes or hooks."""
    store = folder / ".git"
    for name in ("objects/pack", "refs/heads", "info"):
        (store / name).mkdir(parents=True)
    (store / "HEAD").write_text(f"ref: refs/heads/{BRANCH}\n")
    (store / "info" / "attributes").write_text(AS_THEY_ARE)
    (store / "config").write_text(CONFIG % 0 if form == "sha1" else CONFIG % 1 + OTHER_FORMAT % form)
    for path in (folder, store, *store.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)  # whatever the user's umask
    return store


def _copy_commit(source: _Source, store: Path, env: Mapping[str, str]) -> str:
    """Id of the one new commit, written with its trees and files into a single pack."""
    env = {**env, **PERSON, "GIT_ALTERNATE_OBJECT_DIRECTORIES": quoted(source.objects).decode()}
    tree = git(store, "rev-parse", "--verify", f"{source.commit}^{{tree}}", env=env).decode().strip()
    commit = git(store, "commit-tree", tree, stdin=MESSAGE, env=env).decode().strip()
    try:
        # One thread, so that the same source gives the same pack.
        options = ("-q", "--revs", "--threads=1")
        git(store, "pack-objects", *options, str(store / "objects" / "pack" / "pack"), stdin=commit.encode(), env=env)
    except SandboxError as error:
        told = "where objects are missing, as in a partial clone, `git fetch --refetch` in the source brings them"
        raise SandboxError(f"{error}; {told}") from error
    for path in store.glob("objects/??"):
        shutil.rmtree(path)
    return commit


def _set_times(folder: Path, env: Mapping[str, str]) -> tuple[Path, ...]:
    """Gives every file the fixed time, so that the index never has to look twice; returns the submodules' paths."""
    submodules = []
    for row in git(folder, "ls-files", "--stage", "-z", env=env).split(b"\0")[:-1]:
        meta, _, name = row.partition(b"\t")
        path = Path(os.fsdecode(name))
        if meta.startswith(GITLINK):
            submodules.append(path)
        else:
            os.utime(folder / path, (SECONDS, SECONDS), follow_symlinks=False)
    return tuple(submodules)


def _check(folder: Path, env: Mapping[str, str]) -> None:
    """SandboxError where the repository holds anything beside its commit, or the work tree differs from it."""
    stored = set(git(folder, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)", env=env).split())
    reached = set(git(folder, "rev-list", "--objects", "--no-object-names", "HEAD", env=env).split())
    if stored != reached:
        raise SandboxError(f"the new repository holds {len(stored)} objects, its commit has {len(reached)}")
    if len(git(folder, "rev-list", "--all", "--reflog", env=env).split()) != 1:
        raise SandboxError("the new repository shows more than one commit")
    if odd := git(folder, "status", "--porcelain", "--ignored", "-z", env=env):
        names = odd.replace(b"\0", b" ").decode(errors="replace").strip()
        raise SandboxError(f"this file system does not hold the commit's files as they are: {names[:500]}")
