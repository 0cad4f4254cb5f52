"""What it takes for files to outlive a power cut, beside what is in them: their names."""

import os
from pathlib import Path


def sync_names(folder: Path) -> None:
    """The names in a folder are on the disk afterwards: of files made, renamed and removed there. OSError if not.

    Not synced: what is in the files, and the folder's own name.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
