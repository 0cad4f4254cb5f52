"""What the command line takes; a run ends in order at the first Ctrl-C or polite kill, and at once at the second."""

import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from harnesses.known import KNOWN
from lego.cli import resolve

DEMO = "recipes/demo.py"
WORK = """
import asyncio, sys
from lego.cli import guarded
from lego.train import _interruptible

async def work():
    print("\\x1b[?25lbegun", flush=True)
    try:
        await asyncio.sleep(60)
    finally:
        print("closing", flush=True)
        await asyncio.sleep(float(sys.argv[1]))
        print("closed", flush=True)

guarded(lambda: asyncio.run(_interruptible(work())))
"""


@pytest.mark.parametrize(
    ("flags", "fresh"),
    [((), False), (("--fresh",), True), (("--no-fresh",), False), (("--fresh", "--steps", "3"), True)],
)
def test_a_fresh_run_is_asked_for_by_the_flag_alone(flags: tuple[str, ...], fresh: bool):
    assert resolve([DEMO, *flags], "test")[1].fresh is fresh


def test_the_program_itself_takes_the_flag_alone():
    command = [sys.executable, "-m", "lego.train", DEMO, "--fresh", "--steps", "0"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 2 and "  steps: 0, wanted 1 or more" in found.stderr and "fresh" not in found.stderr


@pytest.mark.parametrize(
    ("word", "told"),
    [("codx=2", f"'codx', wanted one of {', '.join(KNOWN)}"), ("codex=much", "'much', wanted a number")],
)
def test_what_is_wrong_with_one_harness_of_a_mix_is_told(word: str, told: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        resolve([DEMO, "--mix", "pi", word], "test")
    shown = " ".join(line.strip("│ ") for line in capsys.readouterr().err.splitlines())
    assert end.value.code == 2 and f"--mix: {word}: {told}" in shown


class Started:
    """Such a program in a terminal of its own."""

    def __init__(self, close_s: float) -> None:
        self._shown = b""
        self._screen, end = pty.openpty()
        argv = [sys.executable, "-c", WORK, str(close_s)]
        self.process = subprocess.Popen(argv, stdin=end, stdout=end, stderr=end)
        os.close(end)

    def until(self, text: bytes) -> None:
        """Reads the terminal until it has shown this."""
        while text not in self._shown:
            self._shown += os.read(self._screen, 1000)

    def ended(self) -> bytes:
        """All that it has shown, once it has ended."""
        self.process.wait(20)
        try:
            while piece := os.read(self._screen, 1000):
                self._shown += piece
        except OSError:  # nobody has the other end
            os.close(self._screen)
        return self._shown


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_closes_everything_in_order(number: signal.Signals):
    one = Started(0.2)
    one.until(b"begun")
    one.process.send_signal(number)
    shown = one.ended()
    assert one.process.returncode == 130
    assert b"finishing and saving" in shown and b"closed" in shown and b"Traceback" not in shown


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_it_at_once_and_shows_the_cursor_again(number: signal.Signals):
    one = Started(60.0)
    one.until(b"begun")
    start = time.monotonic()
    one.process.send_signal(signal.SIGINT)
    one.until(b"closing")
    one.process.send_signal(number)
    shown = one.ended()
    assert one.process.returncode == 130 and time.monotonic() - start < 15
    assert b"closed" not in shown and shown.rstrip().endswith(b"\x1b[?25h")
