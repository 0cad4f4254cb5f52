"""The harnesses that can be chosen by name."""

from harnesses.claude import Claude
from harnesses.cline import Cline
from harnesses.codex import Codex
from harnesses.mini import Mini
from harnesses.opencode import OpenCode
from harnesses.openhands import OpenHands
from harnesses.pi import Pi
from harnesses.qwen import Qwen
from harnesses.terminus import Terminus

KNOWN = {
    "claude": Claude,
    "cline": Cline,
    "codex": Codex,
    "mini": Mini,
    "opencode": OpenCode,
    "openhands": OpenHands,
    "pi": Pi,
    "qwen": Qwen,
    "terminus": Terminus,
}
"""Class by name; each makes a usable harness without arguments."""
