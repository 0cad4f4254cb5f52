"""Real harnesses that summarise their history, or send a sub-agent: what each model call of theirs is for.

`python -m tests.capture.plays FOLDER [NAME...]` makes the session files in tests/capture/kinds/ anew.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harnesses.base import Harness
from harnesses.claude import Claude
from harnesses.cline import Cline
from harnesses.codex import Codex
from harnesses.fetch import DEFAULT_CACHE
from harnesses.opencode import OpenCode
from harnesses.openhands import OpenHands
from harnesses.qwen import Qwen
from harnesses.terminus import Terminus
from lego.capture.recording import record, write
from lego.capture.session import Session
from lego.chat.render import Renderer
from lego.drill.exercise import EDIT, LIST, TASK, lay_out
from lego.drill.script import Finish, Sampled, Shell, Step
from lego.drill.stage import Drill
from lego.records import CallKind
from lego.smoke import POLICY
from sandbox.bubble import Bubblewrap
from tests.capture.stage import anonymous

KINDS = Path(__file__).parent / "kinds"
OUTPUT = 700
LETTERS = {CallKind.MAIN: "m", CallKind.SUBAGENT: "a", CallKind.SUMMARY: "s", CallKind.SIDE: "t"}
ERRAND = "List the files and tell me their names."
LONG = (Shell("seq 1 500"), LIST, EDIT, Finish())
LONGER = (Shell("seq 1 500"), LIST, Shell("seq 1 300"), LIST, EDIT, Finish())


@dataclass(frozen=True, kw_only=True)
class Play:
    """A harness, what its model says, and what the calls are for that this makes, a letter of LETTERS each."""

    harness: Harness
    script: Sequence[Step]
    kinds: str
    room: int | None = None
    """Tokens of context beyond the first prompt and an answer; None for enough."""


def sent(tool: str, **arguments: Any) -> Sequence[Step]:
    """A model that sends a sub-agent, which does its errand in two calls, and does the work then."""
    call = json.dumps({"name": tool, "arguments": arguments})
    errand = (Sampled(f"<tool_call>\n{call}\n</tool_call>"), LIST, Finish("README.md, calc.py and test_calc.py."))
    return (*errand, EDIT, Finish())


ABOUT: dict[str, Any] = {"description": "Look around", "prompt": ERRAND}
PLAYS: dict[str, Play] = {
    "claude-summary": Play(harness=Claude(), script=LONG, kinds="mmsmm", room=13_600),
    "cline-summary": Play(harness=Cline(), script=LONG, kinds="mmsmm", room=1650),
    "codex-summary": Play(harness=Codex(), script=LONG, kinds="mmsmm", room=800),
    "opencode-summary": Play(harness=OpenCode(), script=LONG, kinds="mmsmm", room=800),
    "openhands-summary": Play(harness=OpenHands(), script=LONGER, kinds="msmmmm", room=300),
    "qwen-summary": Play(harness=Qwen(), script=LONGER, kinds="msmmsmmsm", room=1500),
    "terminus-summary": Play(harness=Terminus(), script=LONGER, kinds="mmsssmmsssmmm", room=7600),
    "claude-agent": Play(
        harness=Claude(tools=("Bash", "Edit", "Read", "Agent")),
        script=sent("Agent", **ABOUT, run_in_background=False),
        kinds="maamm",
    ),
    "cline-agent": Play(
        harness=Cline(tools=("run_commands", "editor", "spawn_agent")),
        script=sent("spawn_agent", systemPrompt="You look around.", task=ERRAND),
        kinds="maamm",
    ),
    # Runs beside the main agent, and takes its turns from the same script; the work is not waited for.
    "codex-agent": Play(
        harness=Codex(lean=False),
        script=(sent("multi_agent_v1__spawn_agent", message=ERRAND)[0], LIST, LIST, LIST, LIST, EDIT, Finish()),
        kinds="",
    ),
    "opencode-agent": Play(harness=OpenCode(), script=sent("task", **ABOUT, subagent_type="general"), kinds="maamm"),
    "openhands-agent": Play(
        harness=OpenHands(tools=("terminal", "file_editor", "task")),
        script=sent("task", **ABOUT, subagent_type="bash-runner", security_risk="LOW", summary="Look around"),
        kinds="maamm",
    ),
}


def letters(session: Session) -> str:
    """What the session's turns are for."""
    return "".join(LETTERS[kind] for kind in session.kinds())


async def perform(play: Play, renderer: Renderer) -> Session:
    """One whole run in a box of its own."""
    with tempfile.TemporaryDirectory() as folder:
        base = lay_out(Path(folder))
        drill = Drill(sandbox=Bubblewrap(), cache=DEFAULT_CACHE, base=base, renderer=renderer, max_turns=20)
        if play.room is not None:
            first = await drill.run(play.harness, (Finish(),), TASK)
            room = len(first.session.turns[0].prompt_ids) + OUTPUT + play.room
            drill = replace(drill, context_tokens=room, output_tokens=OUTPUT)
        run = await drill.run(play.harness, play.script, TASK)
    assert run.end.error is None, run.end
    return run.session


async def _record(folder: Path, names: Sequence[str]) -> None:
    renderer = Renderer.load(POLICY)
    for name in names or PLAYS:
        session = await perform(PLAYS[name], renderer)
        told = await anonymous(record(session, renderer), renderer)
        write(told, folder / f"{name}.npz")
        sys.stdout.write(f"{name}: {letters(session)}\n")


if __name__ == "__main__":
    asyncio.run(_record(Path(sys.argv[1]), sys.argv[2:]))
