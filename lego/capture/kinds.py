"""How harnesses ask for a summary of their own history, where no label says so. Pure.

The words are those of the pinned releases. What a harness that is not here asks for in other words is not known as a
summary: with tools it counts as the work's own call, without as a side request.
"""

import re
from collections.abc import Sequence

from lego.chat.messages import Message

SUMMARISERS = re.compile(
    "You are a context summarization agent"  # OpenCode
    "|Summarize the provided coding session"  # Cline
    "|You are the component that summarizes"  # qwen-code
)
"""How the system text of a call begins that has nothing but a summary to make."""
ASKED = re.compile(
    "CRITICAL: Respond with TEXT ONLY"  # Claude Code
    # Terminus-2: a summary, questions about it, their answers; or a short one of what is on the screen.
    "|You are about to hand off your work|You are picking up work from|The next agent has a few questions"
    "|Briefly continue this task"
)
"""How the last message begins where the agent itself is asked, in its own history."""


def asks_for_summary(messages: Sequence[Message]) -> bool:
    """Whether the harness asks for a summary (compaction), by how the system text or the newest message begins.

    Only what the harness says itself counts: no tool result, and no message that an answer came after.
    """
    if not messages:
        return False
    first, last = messages[0], next((m for m in reversed(messages) if m.role != "system"), messages[0])
    system = first.role == "system" and SUMMARISERS.match(first.text)
    return bool(system or (last.role == "user" and ASKED.match(last.text)))
