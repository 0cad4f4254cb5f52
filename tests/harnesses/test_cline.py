import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harnesses.base import Command, End, Endpoint
from harnesses.cline import LEAD, PROMPT, PROVIDER, SETTINGS, Cline
from harnesses.fetch import DEFAULT_CACHE, fetch
from lego.chat.render import Renderer
from lego.drill.exercise import WORK, lay_out, solved
from lego.drill.script import Finish, Shell, Unknown
from lego.drill.stage import Drill, share
from lego.smoke import POLICY
from sandbox.base import ExecResult
from sandbox.bubble import Bubblewrap


def _json(command: Command, name: str) -> dict[str, Any]:
    return json.loads(command.files[SETTINGS / name])


def _result(*events: object, code: int | None = 0, stderr: bytes = b"") -> ExecResult:
    lines = "".join(json.dumps(event) + "\n" for event in events)
    return ExecResult(code=code, stdout=lines.encode(), stderr=stderr)


DONE = {"type": "run_result", "finishReason": "completed", "text": "Done."}
FAILED = {"type": "run_result", "finishReason": "error", "text": "scripted failure"}


def test_the_instruction_is_a_file_that_is_piped_in(endpoint: Endpoint) -> None:
    command = Cline().command('/team --help "quoted"', endpoint)
    assert command.files[PROMPT] == b'/team --help "quoted"'
    assert command.argv[:4] == ("/bin/sh", "-c", 'cat "$0" | "$@"', str(PROMPT))
    assert not any("quoted" in word for word in command.argv)


def test_the_model_is_reached_at_the_endpoint_with_its_key_and_context(endpoint: Endpoint) -> None:
    command = Cline().command("fix", endpoint)
    assert _json(command, "providers.json")["providers"][PROVIDER]["settings"] == {
        "provider": PROVIDER,
        "apiKey": "secret",
        "model": "policy",
        "baseUrl": "http://127.0.0.1:4000/v1",
        "contextWindow": 32768,
    }
    assert not any("secret" in word for word in (*command.argv, *command.env.values()))


def test_nothing_but_the_model_is_reached_and_no_daemon_is_started(endpoint: Endpoint) -> None:
    command = Cline().command("fix", endpoint)
    settings = _json(command, "global-settings.json")
    assert settings["telemetryOptOut"] is True and settings["autoUpdateEnabled"] is False
    assert command.env["CLINE_SESSION_BACKEND_MODE"] == "local" and command.env["CLINE_NO_AUTO_UPDATE"] == "1"


def test_tools_instructions_and_compaction_are_those_of_the_recipe(endpoint: Endpoint) -> None:
    cline = Cline(tools=("run_commands",), instructions="You fix bugs.", compact=False, mistakes=2)
    command = cline.command("fix", endpoint)
    denied = _json(command, "global-settings.json")["disabledTools"]
    assert "run_commands" not in denied and {"editor", "spawn_agent", "teams", "fetch_web_content"} <= set(denied)
    for flag, value in {"--system": "You fix bugs.", "--compaction": "off", "--retries": "2"}.items():
        assert command.argv[command.argv.index(flag) + 1] == value
    argv = Cline().command("fix", endpoint).argv
    assert "--system" not in argv and argv[argv.index("--compaction") + 1] == "agentic"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"version": "0.1.0"}, "version: no pinned hash for Cline '0.1.0', there is 3.0.65"),
        ({"instructions": ""}, "instructions: empty"),
        ({"tools": ()}, "tools: none"),
        ({"mistakes": 0}, "mistakes: 0, must be 1 or more"),
    ],
)
def test_a_wrong_field_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cline(**wrong)


def test_a_completed_run_is_a_normal_end() -> None:
    assert Cline().ended(_result(DONE)) == End()


def test_an_error_is_what_it_says_whatever_the_status() -> None:
    assert Cline().ended(_result(FAILED)).error == "scripted failure"
    assert Cline().ended(_result(FAILED, code=1)).error == "scripted failure"
    assert Cline().ended(_result({**FAILED, "text": ""}, code=1)).error == "an error without a message"


def test_a_model_that_made_too_many_mistakes_is_a_normal_end() -> None:
    assert Cline().ended(_result({"type": "run_result", "finishReason": "aborted", "text": ""})) == End()


def test_a_bad_exit_without_a_result_is_the_last_line_of_standard_error() -> None:
    assert Cline().ended(_result(code=1, stderr=b"Error: no\n")).error == "exit status 1: Error: no"
    assert Cline().ended(ExecResult(code=None, stdout=b"", stderr=b"")).error == "stopped at its time limit"


@pytest.fixture(scope="session")
def fetched() -> Path:
    fetch(Cline(), DEFAULT_CACHE)
    return DEFAULT_CACHE


@pytest.fixture
def drill(fetched: Path, tmp_path: Path) -> Drill:
    return Drill(sandbox=Bubblewrap(), cache=fetched, base=lay_out(tmp_path), renderer=Renderer.load(POLICY))


@pytest.mark.harness
async def test_the_real_program_fixes_the_bug_leaves_no_daemon_and_asks_nobody_else(drill: Drill) -> None:
    run = await drill.run(Cline(instructions="You fix bugs."), WORK, '/team --help -- "fix" it')
    assert run.end == End() and solved(run.changes), run.result
    assert share(run.session) >= 0.99 and len(run.session.segments()) == 1
    assert run.left == () and run.cost.outbound == 0
    system, user = run.session.plan_of(0).history.messages
    assert system.text == "You fix bugs." and user.text == f'{LEAD}\n\n/team --help -- "fix" it'
    assert {tool.name for tool in run.session.plan_of(0).history.tools} == set(Cline().tools)


@pytest.mark.harness
async def test_a_full_context_without_compaction_ends_the_run_with_an_error(drill: Drill) -> None:
    drill = replace(drill, context_tokens=10_000, output_tokens=500)
    run = await drill.run(Cline(compact=False), (Shell("seq 1 5000"), Finish()), "Fix it.")
    assert run.end.error and "maximum context length" in run.end.error
    assert run.session.breach is not None


@pytest.mark.harness
async def test_too_many_mistakes_of_the_model_end_the_run_well(drill: Drill) -> None:
    run = await drill.run(Cline(mistakes=2), (*(Unknown(f"telepathy{i}") for i in range(4)), *WORK), "Fix it.")
    assert run.end == End() and not run.changes and len(run.session.turns) < 5
