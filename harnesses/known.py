"""The harnesses that can be chosen by name."""

from harnesses.codex import Codex
from harnesses.opencode import OpenCode
from harnesses.pi import Pi

KNOWN = {"codex": Codex, "opencode": OpenCode, "pi": Pi}
"""Class by name; each makes a usable harness without arguments."""
