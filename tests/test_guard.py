import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from lego import guard

DOUBLE_FORKER = """
import os, pathlib, signal, sys, time
out = pathlib.Path(sys.argv[1])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (out / "stubborn").write_text(str(os.getpid()))
        time.sleep(600)
    (out / "session").write_text(str(os.getpid()))
    time.sleep(600)
(out / "command").write_text(str(os.getpid()))
time.sleep(600)
"""
NAMES = ("command", "session", "stubborn")


def start(*argv: str, grace_s: float = 0.3, **kwargs) -> subprocess.Popen:
    return subprocess.Popen(guard.command(list(argv), grace_s=grace_s), stdin=subprocess.PIPE, **kwargs)


def tree_pids(folder: Path) -> list[int]:
    wait_for(lambda: all((folder / name).exists() and (folder / name).read_text() for name in NAMES))
    return [int((folder / name).read_text()) for name in NAMES]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_a_killed_driver_takes_every_process_of_the_tree_along(tmp_path: Path):
    driver_code = textwrap.dedent("""
        import subprocess, sys, time
        from lego import guard
        argv = guard.command([sys.executable, "-c", sys.argv[1], sys.argv[2]], grace_s=0.3)
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)
        print(child.pid, flush=True)
        time.sleep(600)
    """)
    driver = subprocess.Popen(
        [sys.executable, "-c", driver_code, DOUBLE_FORKER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    pids = [int(driver.stdout.readline()), *tree_pids(tmp_path)]
    assert all(map(alive, pids))
    driver.kill()
    driver.wait()
    driver.stdout.close()
    wait_for(lambda: not any(map(alive, pids)), 5)


@pytest.mark.parametrize("number", guard.STOP_SIGNALS)
def test_a_stop_signal_ends_the_whole_tree(tmp_path: Path, number: signal.Signals):
    process = start(sys.executable, "-c", DOUBLE_FORKER, str(tmp_path))
    pids = tree_pids(tmp_path)
    process.send_signal(number)
    assert process.wait(10) == 128 + signal.SIGTERM
    assert not any(map(alive, pids))


def test_the_tree_gets_its_grace_before_it_is_killed(tmp_path: Path):
    code = (
        "import pathlib, signal, sys, time\n"
        f"def bye(*_): time.sleep(0.4); pathlib.Path({str(tmp_path / 'bye')!r}).write_text('bye'); sys.exit(7)\n"
        f"signal.signal(signal.SIGTERM, bye); pathlib.Path({str(tmp_path / 'up')!r}).touch(); time.sleep(600)"
    )
    process = start(sys.executable, "-c", code, grace_s=10)
    wait_for((tmp_path / "up").exists)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(10) == 7
    assert (tmp_path / "bye").read_text() == "bye"


def test_a_hurried_tree_gets_no_grace(tmp_path: Path):
    code = (
        "import pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"pathlib.Path({str(tmp_path / 'up')!r}).touch(); time.sleep(600)"
    )
    process = start(sys.executable, "-c", code, grace_s=60)
    wait_for((tmp_path / "up").exists)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(guard.HURRY)
    assert process.wait(5) == 128 + signal.SIGKILL


def test_processes_left_behind_by_a_finished_command_end_with_it(tmp_path: Path):
    code = f"setsid sleep 600 & echo $! > {tmp_path}/left; exit 3"
    process = start("sh", "-c", code)
    assert process.wait(10) == 3
    assert not alive(int((tmp_path / "left").read_text()))


def test_a_killed_guard_takes_its_command_along(tmp_path: Path):
    process = start("sh", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 600")
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    pid = int((tmp_path / "pid").read_text())
    process.kill()
    process.wait()
    wait_for(lambda: not alive(pid), 5)


@pytest.mark.parametrize(("code", "status"), [("exit 0", 0), ("exit 41", 41), ("kill -SEGV $$", 128 + signal.SIGSEGV)])
def test_the_exit_status_is_passed_on(code: str, status: int):
    assert start("sh", "-c", code).wait(10) == status


def test_a_command_that_cannot_run_is_named():
    process = start("/nowhere/program", stderr=subprocess.PIPE)
    assert process.wait(10) == 127
    assert process.stderr is not None
    assert b"/nowhere/program: No such file" in process.stderr.read()


def test_without_a_pipe_as_stdin_nothing_is_started(tmp_path: Path):
    argv = guard.command(["touch", str(tmp_path / "started")])
    with Path(os.devnull).open() as null:
        done = subprocess.run(argv, stdin=null, stderr=subprocess.PIPE, timeout=10)
    assert done.returncode != 0 and b"pipe held by the driver" in done.stderr
    assert not (tmp_path / "started").exists()
