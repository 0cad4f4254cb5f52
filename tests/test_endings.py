"""However a run ends, nothing of it stays: no process, no mount, no box, no shared memory."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lego.run import shared_folder

ROOT = Path(__file__).parent.parent
ENOUGH_S = 15.0


def left_behind(driver: int, mark: str, state: Path) -> list[str]:
    """Processes whose environment or command line names this run, mounts below its boxes, boxes, shared memory."""
    found = [f"mount {line.split()[1]}" for line in Path("/proc/mounts").read_text().splitlines() if str(state) in line]
    found += [f"box {box.name}" for box in state.glob("box-*")]
    found += [f"shared {path.name}" for path in Path("/dev/shm").glob(f"lego-*-{driver}-*")]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        except OSError:
            continue
        if mark.encode() in words:
            found.append(f"process {folder.name} {words[:80]!r}")
    return found


def started(tmp_path: Path, cache: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "lego.train", "recipes/demo.py", "--run-dir", str(tmp_path / "run")]
    command += ["--cache", str(cache), "--sandbox.state", str(tmp_path / "boxes")]
    # Engine and trainer are given no other word of ours than where temporary files go: it marks them.
    (tmp_path / "tmp").mkdir()
    env = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def until(condition, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.1)


def has_trials(folder: Path) -> bool:
    return (folder / "run/trials.jsonl").exists() and (folder / "run/trials.jsonl").stat().st_size > 0


def is_starting(folder: Path) -> bool:
    return (folder / "run/logs/vllm.log").exists()


@pytest.mark.harness
@pytest.mark.parametrize(
    ("end", "moment"),
    [(signal.SIGINT, is_starting), (signal.SIGINT, has_trials), (signal.SIGTERM, has_trials)],
    ids=["ctrl-c-at-start", "ctrl-c-in-trials", "term-in-trials"],
)
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, fetched_cache: Path, end: signal.Signals, moment):
    process = started(tmp_path, fetched_cache)
    until(lambda: moment(tmp_path) or process.poll() is not None, 120)
    process.send_signal(end)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said.decode()
    assert b"Traceback" not in said
    assert left_behind(process.pid, str(tmp_path), tmp_path / "boxes") == []
    assert (tmp_path / "run/summary.json").exists()
    assert not [path for path in (tmp_path / "tmp").iterdir() if path.is_socket()]


@pytest.mark.harness
def test_a_killed_run_leaves_no_process_and_its_boxes_can_be_reaped(tmp_path: Path, fetched_cache: Path):
    process = started(tmp_path, fetched_cache)
    until(lambda: has_trials(tmp_path) or process.poll() is not None, 120)
    process.kill()
    process.wait()

    def processes() -> list[str]:
        return [x for x in left_behind(process.pid, str(tmp_path), tmp_path / "boxes") if x.startswith("process")]

    until(lambda: not processes(), ENOUGH_S)
    subprocess.run([sys.executable, "-m", "sandbox.reap", str(tmp_path / "boxes")], check=True, cwd=ROOT)
    with shared_folder():  # as the next run does at its start
        assert left_behind(process.pid, str(tmp_path), tmp_path / "boxes") == []
