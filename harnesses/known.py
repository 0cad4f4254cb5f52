"""The harnesses that can be chosen by name."""

from harnesses.codex import Codex
from harnesses.pi import Pi

KNOWN = {"codex": Codex, "pi": Pi}
"""Class by name; each makes a usable harness without arguments."""
