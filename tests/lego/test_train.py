"""A run ends in order at the first Ctrl-C or polite kill, and at once at the second."""

import os
import pty
import signal
import subprocess
import sys
import time

import pytest

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
