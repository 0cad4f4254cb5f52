"""JSON-lines files that outlive a crash: one record a line, and a line is there whole or not at all."""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lego.disk import sync_names
from lego.errors import UsageError

log = logging.getLogger(__name__)


def append(file: Path, row: Mapping[str, Any]) -> None:
    """Adds a line that is on the disk afterwards, with its file's name; what a crash cut off before is closed first."""
    line = json.dumps(row, allow_nan=False).encode() + b"\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+b", buffering=0) as end:
        size = end.seek(0, os.SEEK_END)
        if size == 0:
            sync_names(file.parent)  # first, so that a file with lines in it has its name on the disk
        whole = size == 0 or os.pread(end.fileno(), 1, size - 1) == b"\n"
        left = line if whole else b"\n" + line
        while left:  # a disk that is nearly full takes a part, and tells so in the number only
            left = left[end.write(left) :]
        os.fsync(end.fileno())


def rows(file: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, none where there is no file; a line that a crash cut off is left out, and told."""
    if not file.exists():
        return
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError:
            log.warning("%s:%d is cut off and is left out", file, number)
            continue
        if not isinstance(row, dict):
            raise UsageError(f"{file}:{number}: no record of this program")
        yield row
