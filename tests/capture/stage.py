"""Real harnesses against the real proxy over a scripted engine, and their recordings without the harness's own texts.

`python -m tests.capture.stage FOLDER` makes the session files in tests/capture/sessions/ anew.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harnesses.base import End, Endpoint, Harness
from harnesses.claude import Claude
from harnesses.codex import Codex
from harnesses.fetch import DEFAULT_CACHE
from harnesses.opencode import OpenCode
from harnesses.pi import Pi
from harnesses.qwen import Qwen
from lego.capture.again import again
from lego.capture.kinds import ASKED, SUMMARISERS
from lego.capture.recording import Recording, record, write
from lego.capture.server import Handle, Proxy
from lego.capture.session import Limits
from lego.chat.render import Renderer
from lego.records import Sampling
from sandbox.base import BoxSpec
from sandbox.bubble import Bubblewrap
from tests.capture.double import ScriptedEngine, generation

PORT = 4000
LIMITS = Limits(context_tokens=400_000)
SESSIONS = Path(__file__).parent / "sessions"
OURS = 120
"""Texts of a request shorter than this are data; longer ones are a harness's own, and do not go into a repository."""


@dataclass(frozen=True)
class Cast:
    """A harness, and how a model calls its shell."""

    harness: Harness
    tool: str
    field: str

    def call(self, command: str, text: str = "") -> str:
        arguments = {self.field: command, "description": "Runs it"} if self.tool == "bash" else {self.field: command}
        call = json.dumps({"name": self.tool, "arguments": arguments})
        return f"<think>\nI run {command}.\n</think>\n\n{text}<tool_call>\n{call}\n</tool_call><|im_end|>"


CASTS: dict[str, Cast] = {
    "codex": Cast(Codex(), "exec_command", "cmd"),
    "pi-chat": Cast(Pi(), "bash", "command"),
    "pi-responses": Cast(Pi(api="openai-responses"), "bash", "command"),
    "pi-messages": Cast(Pi(api="anthropic-messages"), "bash", "command"),
    "opencode-chat": Cast(OpenCode(), "bash", "command"),
    "opencode-responses": Cast(OpenCode(sdk="@ai-sdk/openai"), "bash", "command"),
    "opencode-messages": Cast(OpenCode(sdk="@ai-sdk/anthropic"), "bash", "command"),
    "claude": Cast(Claude(), "Bash", "command"),
    "qwen": Cast(Qwen(), "run_shell_command", "command"),
}


def script(cast: Cast) -> list[str]:
    """What the model says: loose JSON, a call that cannot be read, one with text before it, and the end."""
    good = cast.call("cat a.py")
    loose = good.replace('", "', '" ,  "').replace("a.py", "a.py # \\u00e9")
    broken = f'<tool_call>\n{{"name": "{cast.tool}", "arguments": {{"{cast.field}": "ls", }}\n</tool_call><|im_end|>'
    fix = cast.call("sed -i 's/bug/fix/' a.py", "Now I fix it.\n")
    return [good, loose, broken, fix, "<think>\nDone.\n</think>\n\nIt is done.<|im_end|>"]


async def perform(
    cast: Cast, renderer: Renderer, base: Path, answers: Sequence[str] = (), delay_s: float = 0.0, beat_s: float = 10.0
) -> tuple[Handle, End]:
    """One whole run in a box of its own, each answer after `delay_s`."""
    engine = ScriptedEngine(renderer, answers or script(cast), delay_s)
    sampling = Sampling(max_tokens=2000)
    proxy = Proxy(engine=engine, renderer=renderer, sampling=sampling, limits=LIMITS, beat_s=beat_s)
    endpoint = Endpoint(
        url=f"http://127.0.0.1:{PORT}", key="k", model="policy", context_tokens=400_000, output_tokens=2000
    )
    command = cast.harness.command("Fix a.py.", endpoint)
    async with (
        proxy.open(),
        proxy.session("t") as handle,
        Bubblewrap().open(BoxSpec(base=base, mounts=cast.harness.mounts(DEFAULT_CACHE))) as box,
    ):
        for path, content in command.files.items():
            await box.put(path, content)
        async with handle.serve(await box.listen(PORT)):
            result = await box.exec(command.argv, env=command.env, stdin=command.stdin, timeout_s=90)
    return handle, cast.harness.ended(result)


async def anonymous(recording: Recording, renderer: Renderer) -> Recording:
    """The same session with the harness's long texts replaced by ours, and every prompt rendered anew."""
    texts: dict[str, str] = {}
    origins = tuple(replace(origin, body=_replaced(origin.body, texts)) for origin in recording.origins)
    limits = replace(recording.limits, experts=None)
    told = await again(replace(recording, origins=origins, limits=limits), renderer)
    turns = tuple(
        replace(
            turn, generation=replace(generation(turn.prompt_ids, turn.generation.output_ids.tolist()), routing=None)
        )
        for turn in told.turns
    )
    session = await again(replace(recording, origins=origins, limits=limits, turns=turns), renderer)
    return replace(record(session, renderer), model="tiny")


def _replaced(value: Any, texts: dict[str, str], where: str = "", name: str = "") -> Any:
    if isinstance(value, Mapping):
        return {key: _replaced(item, texts, where or key, key) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, texts, where, name) for item in value]
    own = isinstance(value, str) and (len(value) > OURS or (where, name) == ("tools", "description"))
    if not own:
        return value
    asked = SUMMARISERS.match(value) or ASKED.match(value)
    kept = f"{asked[0]} " if asked else ""
    return texts.setdefault(value, f"{kept}Text {len(texts)} of the harness, {len(value)} characters.")


async def _record(folder: Path, names: Sequence[str]) -> None:
    from tests.tiny import write_model

    renderer = Renderer.load(write_model(Path(tempfile.mkdtemp()) / "model"))
    for name in names or CASTS:
        base = Path(tempfile.mkdtemp())
        (base / "a.py").write_text("bug = 1\n")
        handle, end = await perform(CASTS[name], renderer, base)
        assert end.error is None, f"{name}: {end.error}"
        write(await anonymous(record(handle.session, renderer), renderer), folder / f"{name}.npz")


if __name__ == "__main__":
    asyncio.run(_record(Path(sys.argv[1]), sys.argv[2:]))
