"""Small readings that all harnesses share."""

import json
from collections.abc import Iterator, Mapping

from sandbox.base import ExecResult


def events(stdout: bytes) -> Iterator[Mapping]:
    """The objects among the lines of output; what is cut or not JSON is passed over."""
    for line in stdout.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


def failed_result(stdout: bytes) -> str | None:
    """What the last line of type `result` says of a failed run; None if it did not fail, or there is none."""
    last = next((event for event in reversed(list(events(stdout))) if event.get("type") == "result"), {})
    if not last.get("is_error"):
        return None
    error = last.get("error")
    message = error.get("message") if isinstance(error, dict) else last.get("result")
    return str(message or last.get("subtype") or "an error without a message")


def exit_error(result: ExecResult) -> str | None:
    """What a bad exit says: its status and last line; None after status 0."""
    if result.code == 0:
        return None
    if result.code is None:
        return "stopped at its time limit"
    line = last_line(result.stderr) or last_line(result.stdout) or "it printed nothing"
    return f"exit status {result.code}: {line}"


def last_line(output: bytes) -> str:
    """The last line that says something, or an empty text."""
    lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def plain(instruction: str) -> bytes:
    """The instruction for programs that read commands of their own, such as `/help`, at the start of their input."""
    return f"\n{instruction}".encode() if instruction.startswith("/") else instruction.encode()


def milliseconds(seconds: float) -> int:
    """Whole milliseconds, at least one."""
    return max(1, round(seconds * 1000))
