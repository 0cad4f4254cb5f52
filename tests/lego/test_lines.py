"""Files of JSON lines, cut off wherever a crash likes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lego.errors import UsageError
from lego.lines import append, rows


def test_a_file_survives_a_crash_within_a_line(tmp_path: Path):
    file = tmp_path / "folder" / "kept.jsonl"
    assert list(rows(file)) == []
    append(file, {"n": 1})
    append(file, {"n": 2, "text": "ä" * 30})
    file.write_bytes(file.read_bytes()[:-20])
    assert list(rows(file)) == [{"n": 1}]
    append(file, {"n": 3})
    assert list(rows(file)) == [{"n": 1}, {"n": 3}]


def test_a_file_has_its_name_on_the_disk_before_its_first_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    done, file = list[tuple[Path, int]](), tmp_path / "kept.jsonl"

    def fsync(handle: int) -> None:
        done.append((Path(f"/proc/self/fd/{handle}").readlink(), file.stat().st_size))

    monkeypatch.setattr(os, "fsync", fsync)
    append(file, {"n": 1})
    append(file, {"n": 2})
    assert done == [(tmp_path, 0), (file, 9), (file, 18)]


def test_what_is_not_json_lines_of_records_is_refused(tmp_path: Path):
    file = tmp_path / "kept.jsonl"
    file.write_text("[1]\n")
    with pytest.raises(UsageError, match=r"kept\.jsonl:1"):
        list(rows(file))
    with pytest.raises(ValueError):
        append(file, {"value": float("nan")})


FULL = """
import resource, signal, sys
import subprocess
import sys
from pathlib import Path
from lego.lines import append
file = Path(sys.argv[1])
append(file, {"n": 1})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 5, resource.RLIM_INFINITY))
append(file, {"n": 2})
"""


def test_a_line_that_only_a_part_of_found_room_is_an_error(tmp_path: Path):
    file = tmp_path / "kept.jsonl"
    found = subprocess.run([sys.executable, "-c", FULL, str(file)], capture_output=True, text=True, timeout=30)
    assert found.returncode and "File too large" in found.stderr
    assert list(rows(file)) == [{"n": 1}]
    append(file, {"n": 3})
    assert list(rows(file)) == [{"n": 1}, {"n": 3}]
