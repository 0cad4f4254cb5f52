"""A Ctrl-C on the terminal reaches the driver alone: what it runs for its boxes goes on until it says otherwise."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import asyncio, os, signal, sys
from pathlib import Path
from sandbox.base import BoxSpec, Limits
from sandbox.bubble import Bubblewrap

async def main():
    signal.signal(signal.SIGINT, lambda *_: None)
    spec = BoxSpec(base=Path(sys.argv[1]), limits=Limits(memory_gib=0.2, pids=32, disk_mib=16, deadline_s=60.0))
    async with Bubblewrap(state=Path(sys.argv[2])).open(spec) as box:
        running = asyncio.create_task(box.exec(["sh", "-c", "touch begun; sleep 0.5; echo done"]))
        await asyncio.sleep(0.25)
        os.killpg(0, signal.SIGINT)
        print((await running).stdout.decode().strip(), len(await box.changes()))

asyncio.run(main())
"""


def test_a_box_outlives_a_ctrl_c_that_the_driver_bears(tmp_path: Path):
    (tmp_path / "base").mkdir()
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "base"), str(tmp_path / "state")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, start_new_session=True)
    assert found.stdout == "done 1\n", found.stderr
