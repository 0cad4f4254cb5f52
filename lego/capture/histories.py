"""The histories a session was told lately, so that of a new one only what is new costs anything."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from lego.capture import keys
from lego.capture.keys import Key
from lego.chat.messages import Message, Tool


@dataclass(frozen=True, slots=True)
class History:
    """Messages and tools of one call. `chain[n]` is the key of the first n messages."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    chain: tuple[Key, ...]
    known: int = 0
    """How many of the messages a history before began with."""


class Histories:
    """The last `most` histories: as many sub-agents may take turns."""

    def __init__(self, most: int = 16) -> None:
        self._kept: deque[History] = deque(maxlen=most)

    def beginning(self, messages: Sequence[Message], tools: tuple[Tool, ...]) -> History:
        """The longest beginning of these messages that was told before, in the objects that told it."""
        best = History((), tools, (keys.tools_key(tools),))
        for kept in reversed(self._kept):
            n = _common(kept, messages, tools)
            if n > len(best.messages):
                best = History(kept.messages[:n], kept.tools, kept.chain[: n + 1])
            if n == len(kept.messages):
                break
        return best

    def keep(self, history: History) -> None:
        self._kept.append(history)


def _common(kept: History, messages: Sequence[Message], tools: tuple[Tool, ...]) -> int:
    if kept.tools != tools:
        return 0
    pairs = zip(kept.messages, messages, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(kept.messages), len(messages)))
