"""The harnesses that can be chosen by name."""

from harnesses.claude import Claude
from harnesses.codex import Codex
from harnesses.opencode import OpenCode
from harnesses.pi import Pi
from harnesses.qwen import Qwen

KNOWN = {"claude": Claude, "codex": Codex, "opencode": OpenCode, "pi": Pi, "qwen": Qwen}
"""Class by name; each makes a usable harness without arguments."""
