"""What is declared of a harness is what its real program does, what the proxy reads, and what its page says."""

import json
import re
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from harnesses import facts
from harnesses.claude import Claude
from harnesses.codex import Codex
from harnesses.facts import LIMITS, Label, table, written
from harnesses.fetch import DEFAULT_CACHE, fetch
from harnesses.known import KNOWN
from harnesses.mini import Mini
from harnesses.opencode import OpenCode
from harnesses.openhands import OpenHands
from harnesses.pi import Pi
from lego.capture.server import Handle, Proxy
from lego.capture.session import Limits
from lego.chat.render import Renderer
from lego.drill.exercise import TASK, WORK, lay_out
from lego.drill.script import Finish, Sampled, Shell, Step
from lego.drill.stage import Drill
from lego.engine.scripted import ScriptedEngine
from lego.records import Drift, Sampling
from lego.smoke import POLICY
from sandbox.bubble import Bubblewrap

PAGE = Path(__file__).parent.parent.parent / "docs/harnesses.md"
OTHERS = (
    *(Pi(api=api) for api in ("openai-responses", "anthropic-messages")),
    *(OpenCode(sdk=sdk) for sdk in ("@ai-sdk/openai", "@ai-sdk/anthropic")),
    Mini(api="responses"),
    OpenHands(api="responses"),
)
"""Harnesses set to speak another format than by default, in the order in which they declare it."""
ROOM = 1500
"""Tokens beyond the first prompt and an answer, which a long output exceeds."""


def _marks(name: str) -> list[pytest.MarkDecorator]:
    """The default run tries the three that are quick."""
    return [pytest.mark.harness, *(() if name in ("claude", "codex", "pi") else (pytest.mark.wide,))]


def _cases() -> Iterator[Any]:
    """Each harness in each of its formats; an error if one is declared that is not tried."""
    for name, kind in KNOWN.items():
        tried = (kind(), *(other for other in OTHERS if other.name == name))
        for harness, wire in zip(tried, kind.facts.wires, strict=True):
            yield pytest.param(harness, wire, marks=_marks(name))


@dataclass
class Line:
    """A line to the proxy on which every request is noted: its path, and its headers in small letters."""

    paths: list[str] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)

    def told(self, label: Label) -> list[bool]:
        """Of each request, whether it has the label."""
        return [label.holds in headers.get(label.header, "") and label.header in headers for headers in self.headers]

    @asynccontextmanager
    async def serve(self, handle: Handle, listener: socket.socket) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client:

            async def relay(request: web.Request) -> web.StreamResponse:
                if request.method == "POST":
                    self.paths.append(request.path)
                    self.headers.append({name.lower(): value for name, value in request.headers.items()})
                body = await request.read()
                kept = {n: v for n, v in request.headers.items() if n.lower() not in ("host", "content-length")}
                async with client.request(request.method, handle.url + request.path_qs, data=body, headers=kept) as got:
                    answer = web.StreamResponse(status=got.status, headers={"Content-Type": got.content_type})
                    await answer.prepare(request)
                    async for chunk in got.content.iter_any():
                        await answer.write(chunk)
                    await answer.write_eof()
                    return answer

            app = web.Application(client_max_size=1 << 26)
            app.router.add_route("*", "/{path:.*}", relay)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
            await runner.setup()
            try:
                await web.SockSite(runner, listener).start()
                yield
            finally:
                await runner.cleanup()


@pytest.fixture
def drill(tmp_path: Path) -> Drill:
    return Drill(
        sandbox=Bubblewrap(), cache=DEFAULT_CACHE, base=lay_out(tmp_path), renderer=Renderer.load(POLICY), max_turns=10
    )


async def _heard(drill: Drill, harness: Any, script: Sequence[Step]) -> Line:
    fetch(harness, DEFAULT_CACHE)
    line = Line()
    run = await replace(drill, serve=line.serve).run(harness, script, TASK)
    assert run.end.error is None, run.result
    return line


@pytest.mark.parametrize(("harness", "wire"), _cases(), ids=lambda value: getattr(value, "name", value))
async def test_a_run_speaks_the_format_and_names_its_session_as_declared(harness: Any, wire: str, drill: Drill):
    line, told = await _heard(drill, harness, WORK), harness.facts
    assert {path.endswith(f"/v1/{wire}") for path in line.paths} == {True}, line.paths
    if told.session is not None:
        names = {headers.get(told.session.header) for headers in line.headers}
        assert len(names) == 1 and names != {None}, line.headers
    elif wire == told.wires[0]:
        assert not [name for headers in line.headers for name in headers if re.search("session|thread", name)]
    for label in (told.subagent, told.summary):
        assert not isinstance(label, Label) or not any(line.told(label)), "the main agent's calls are not told apart"


def _calls(name: str, **arguments: str) -> Sampled:
    return Sampled(f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>')


SUBAGENTS = {
    "claude": (
        Claude(tools=("Bash", "Agent")),
        _calls("Agent", description="List", prompt="List the files.", subagent_type="general-purpose"),
    ),
    "codex": (Codex(lean=False), _calls("multi_agent_v1__spawn_agent", message="List the files.")),
    "opencode": (
        OpenCode(tools=("bash", "task")),
        _calls("task", description="List", prompt="List the files.", subagent_type="general"),
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=_marks(name)) for name, kind in KNOWN.items() if kind.facts.subagent]
)
async def test_the_calls_of_a_sub_agent_have_its_label(name: str, drill: Drill):
    harness, call = SUBAGENTS[name]
    line = await _heard(drill, harness, (call, Shell("sleep 1"), Shell("sleep 1"), Finish()))
    told = line.told(harness.facts.subagent)
    assert not told[0] and any(told), line.headers


@pytest.mark.harness
async def test_the_call_of_a_codex_that_summarises_has_its_label(drill: Drill):
    codex = Codex()
    first = await drill.run(codex, (Finish(),), TASK)
    room = len(first.session.turns[0].prompt_ids) + drill.output_tokens + ROOM // 2
    line = await _heard(replace(drill, context_tokens=room), codex, (Shell("seq 1 500"), Shell("ls"), Finish()))
    assert isinstance(codex.facts.summary, Label)
    told = line.told(codex.facts.summary)
    assert not told[0] and told.count(True) == 1, [headers.get(codex.facts.summary.header) for headers in line.headers]


@pytest.mark.parametrize("name", sorted(KNOWN))
async def test_the_proxy_reads_every_label_that_is_declared(name: str, tiny_model: Path):
    renderer, told = Renderer.load(tiny_model), KNOWN[name].facts
    engine = ScriptedEngine(lambda ids: renderer.stop_ids[:1], experts=None)
    proxy = Proxy(engine=engine, renderer=renderer, sampling=Sampling(max_tokens=9), limits=Limits(context_tokens=999))
    labels = [(told.subagent, Drift.SUBAGENT), (told.summary, Drift.COMPACTION)]
    wanted = [(label, drift) for label, drift in labels if isinstance(label, Label)]
    body = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}]}
    async with proxy.open(), proxy.session("t") as handle, aiohttp.ClientSession() as client:
        for label, _ in wanted:
            url, headers = f"{handle.url}/v1/chat/completions", {label.header: label.holds or "x"}
            async with client.post(url, json=body, headers=headers) as answer:
                await answer.read()
        assert [origin.hint for origin in handle.session.journal.origins] == [drift for _, drift in wanted]


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_a_harness_that_has_summaries_can_be_told_not_to_ask_for_them(name: str):
    own = {field.name for field in fields(KNOWN[name])}
    # Codex and qwen-code have no way to switch them off.
    assert KNOWN[name].facts.summary is not None or "compact" not in own
    assert {"steps", "retries", "silence_s", "mistakes", "command_s", "compact"} == set(LIMITS)


def test_the_page_of_the_documentation_holds_what_is_declared():
    page = PAGE.read_text()
    assert page == written(page, KNOWN), "python -m harnesses.facts docs/harnesses.md"


def test_a_page_without_marks_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "page.md").write_text("# Mine\n")
    assert facts.main([str(tmp_path / "page.md")]) == 2 and facts.main([]) == 2
    assert (tmp_path / "page.md").read_text() == "# Mine\n"
    told = capsys.readouterr().err
    assert "no lines '<!-- python -m harnesses.facts: begin -->' and" in told and "usage: " in told


def test_a_row_holds_the_release_and_the_limits_that_a_class_has():
    (line,) = [line for line in table({"pi": Pi}).splitlines() if line.startswith("| pi ")]
    assert [cell.strip() for cell in line.split("|")[1:-1]][:5] == [
        "pi",
        "0.73.1",
        "glibc",
        "chat/completions, responses, messages",
        "`retries`, `silence_s`",
    ]
