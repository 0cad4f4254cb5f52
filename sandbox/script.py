"""A command of a container as a shell script: its streams, folder and variables, with words of any bytes.

The engine's own interface carries only Unicode and would carry the streams too; the script needs nothing but a
POSIX shell at /bin/sh of the image.
"""

import errno
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PLACE = Path("/run/lego")
"""Where the box finds its scripts and streams."""
OOM_RISE = 500
NAME = re.compile(rb"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Paths in the box: what a command reads, and the pipes that it writes to.

    It writes to `taken` once it has opened script and input, and goes on when it has read from `go`.
    """

    stdin: Path
    stdout: Path
    stderr: Path
    taken: Path
    go: Path


def command_script(streams: Streams, argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> bytes:
    """Becomes `argv` in folder `cwd`; 127 where the folder or the program is not found, 126 where it cannot be used."""
    folder = _quote(str(cwd))
    lines = [
        _head(streams),
        b"cd -- %s || { [ -e %s ] && exit 126; exit 127; }" % (folder, folder),
        *_exports(env),
        b"unset OLDPWD",
        b"exec " + b" ".join([*_odd_names(argv, env), *map(_quote, argv)]),
    ]
    return b"\n".join(lines) + b"\n"


def put_script(streams: Streams, path: Path, mode: int) -> bytes:
    """Writes standard input to a file in one step; a link or folder of that name is replaced, not followed."""
    folder, name = _quote(str(path.parent)), _quote(str(path))
    return b"""%s
umask 022
mkdir -p -- %s || exit
draft=%s/.lego-put-$$
trap 'rm -f -- "$draft"' EXIT
(umask 077; set -C; exec cat >"$draft") && chmod %o -- "$draft" || exit
if [ -d %s ] && [ ! -L %s ]; then chmod -R u+rwX -- %s; rm -rf -- %s || exit; fi
mv -fT -- "$draft" %s
""" % (_head(streams), folder, folder, mode, name, name, name, name, name)


def get_script(streams: Streams, path: Path, max_bytes: int) -> bytes:
    """Writes a regular file, and at most one byte more than `max_bytes`, to standard output.

    The exit status is the system's error number.
    """
    name = _quote(str(path))
    return b"""%s
[ -e %s ] || exit %d
[ -f %s ] || exit %d
[ -r %s ] || exit %d
exec head -c %d -- %s
""" % (_head(streams), name, errno.ENOENT, name, errno.EISDIR, name, errno.EACCES, max_bytes + 1, name)


def _head(streams: Streams) -> bytes:
    """Takes the streams, and makes the command the first to go when memory runs out."""
    paths = (streams.stdin, streams.stdout, streams.stderr, streams.taken, streams.go)
    names = tuple(_quote(str(path)) for path in paths)
    lines = b"exec <%s >%s 2>%s\necho >%s\nread -r _ <%s\n{ echo %d >/proc/self/oom_score_adj; } 2>/dev/null"
    return lines % (*names, OOM_RISE)


def _exports(env: Mapping[str, str]) -> list[bytes]:
    pairs = ((os.fsencode(key), value) for key, value in env.items())
    return [b"export %s=%s" % (key, _quote(value)) for key, value in pairs if NAME.fullmatch(key)]


def _odd_names(argv: Sequence[str], env: Mapping[str, str]) -> list[bytes]:
    """`env` sets the names that a shell does not take as its own."""
    odd = [_quote(f"{key}={value}") for key, value in env.items() if not NAME.fullmatch(os.fsencode(key))]
    if odd and "=" in argv[0]:
        raise ValueError(f"argv[0]={argv[0]!r} with '=' in it cannot go together with env names like {odd[0]!r}")
    return [b"env", *odd] if odd else []


def _quote(word: str) -> bytes:
    """One word for the shell, whatever bytes it has."""
    return b"'" + os.fsencode(word).replace(b"'", b"'\\''") + b"'"
