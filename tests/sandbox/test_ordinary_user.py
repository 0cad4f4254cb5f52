"""The same tests again as an ordinary user."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.bubble import bwrap_path

UID = 65534
ROOT = Path(__file__).parent.parent.parent
OPTIONS = ("-q", "-p", "no:cacheprovider", "--confcutdir=tests/sandbox", "-rs", "--ignore", __file__, "tests/sandbox")
BECOME = f"import os, sys; os.setgroups([]); os.setgid({UID}); os.setuid({UID}); os.execv(sys.argv[1], sys.argv[1:])"


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder of the ordinary user's own, outside pytest's private ones."""
    folder = Path(tempfile.mkdtemp(prefix="lego-ordinary-"))
    os.chown(folder, UID, UID)
    yield folder
    shutil.rmtree(folder)


def open_view() -> list[str]:
    """A command prefix that shows the user our code and Python where a private folder, such as /root, is in the way."""
    needed = [ROOT, Path(sys.prefix), Path(sys.base_prefix).resolve()]
    private = {folder for path in needed if (folder := private_parent(path))}
    args = [str(bwrap_path()), "--cap-add", "ALL", "--dev-bind", "/", "/"]
    for folder in private:
        args += ["--perms", "0755", "--tmpfs", str(folder)]
    for path in needed:
        if folder := private_parent(path):
            for parent in reversed([parent for parent in path.parents if parent.is_relative_to(folder)]):
                args += ["--perms", "0755", "--dir", str(parent)]
            args += ["--ro-bind", str(path), str(path)]
    return args


def private_parent(path: Path) -> Path | None:
    """The outermost folder above `path` that other users may not enter."""
    return next((folder for folder in reversed([path, *path.parents]) if not folder.stat().st_mode & 1), None)


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests have just run as an ordinary user")
def test_everything_holds_for_an_ordinary_user_too(home: Path):
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*open_view(), sys.executable, "-c", BECOME, sys.executable, "-m", "pytest", *OPTIONS],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-12000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
