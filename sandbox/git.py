"""Runs git's plumbing with no configuration, attribute, hook or network but what the caller gives."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from sandbox.base import SandboxError

QUIET = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    # A clone that left objects out must not fetch them now: no protocol is allowed at all.
    "GIT_ALLOW_PROTOCOL": "",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
}
AS_THEY_ARE = "* -text -ident -filter !working-tree-encoding\n"
"""For `info/attributes`, which outweighs `.gitattributes`: a file's bytes are its blob's, nothing converts them."""
UNINTERRUPTED = 'trap "" INT; exec "$@"'
"""Runs a program that a Ctrl-C on the terminal does not end: our own program decides what ends."""
REASON_CHARACTERS = 2000
PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-")


def git(folder: Path, *args: str, stdin: bytes = b"", env: Mapping[str, str] | None = None) -> bytes:
    """What git prints, run in `folder` with `env` beside our own; SandboxError with git's words when it fails."""
    program = shutil.which("git")
    if program is None:
        raise SandboxError("git is not installed: it is needed to write patches and clean repositories")
    words = {"HOME": str(folder), **QUIET, **(env or {})}
    argv = ["sh", "-c", UNINTERRUPTED, "sh", program, *args]
    # Modes are the same on every host: the user's umask stays out.
    done = subprocess.run(argv, input=stdin, env=words, capture_output=True, cwd=folder, umask=0o022)
    if done.returncode != 0:
        reason = done.stderr.decode(errors="replace").strip()[-REASON_CHARACTERS:]
        raise SandboxError(f"git {next(word for word in args if word[0] != '-')} failed: {reason or done.returncode}")
    return done.stdout


def quoted(path: Path) -> bytes:
    """The path as git reads it in quotes, every byte beside letters and digits as an octal escape."""
    return b'"%s"' % b"".join(b"%c" % byte if byte in PLAIN else b"\\%03o" % byte for byte in os.fsencode(path))
