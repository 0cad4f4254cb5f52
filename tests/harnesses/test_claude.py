import json
from pathlib import Path
from typing import Any

import pytest

from harnesses.base import End, Endpoint
from harnesses.claude import EXACT, INSTRUCTIONS, Claude
from harnesses.rehearsal import Fail, Say, Shell, Stage
from sandbox.base import ExecResult
from sandbox.bubble import Bubblewrap

FIX = (Shell("sed -i s/bug/fix/ a.py"), Say("Done."))


def _result(*events: object, code: int | None = 0, stderr: bytes = b"") -> ExecResult:
    lines = "".join(json.dumps(event) + "\n" for event in events)
    return ExecResult(code=code, stdout=lines.encode(), stderr=stderr)


DONE = {"type": "result", "subtype": "success", "is_error": False, "result": "Done."}
FAILED = {"type": "result", "subtype": "success", "is_error": True, "result": "API Error: 500 scripted failure."}


def test_the_instruction_goes_through_standard_input_as_it_is(endpoint: Endpoint) -> None:
    text = '--help "quoted" $HOME\n@file – 修复\n'
    command = Claude().command(text, endpoint)
    assert command.stdin == text.encode()
    assert not any("quoted" in word for word in (*command.argv, *command.env.values()))


def test_the_model_is_reached_at_the_endpoint_with_its_key_and_sizes(endpoint: Endpoint) -> None:
    command = Claude().command("fix", endpoint)
    assert command.argv[command.argv.index("--model") + 1] == "policy"
    assert command.env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:4000" and command.env["ANTHROPIC_API_KEY"] == "secret"
    assert command.env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "32768"
    assert command.env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "2048"


def test_nothing_but_the_model_is_reached_and_a_repository_brings_no_settings(endpoint: Endpoint) -> None:
    for stock in (True, False):
        command = Claude(stock=stock).command("fix", endpoint)
        assert command.env["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] == command.env["DISABLE_AUTOUPDATER"] == "1"
        assert command.argv[command.argv.index("--setting-sources") + 1] == "user"
        assert "--strict-mcp-config" in command.argv


def test_stock_leaves_out_the_settings_for_exact_extensions(endpoint: Endpoint) -> None:
    assert EXACT.items() <= Claude().command("fix", endpoint).env.items()
    assert not EXACT.keys() & Claude(stock=True).command("fix", endpoint).env.keys()


def test_waits_tries_and_compaction_are_those_of_the_recipe(endpoint: Endpoint) -> None:
    env = Claude(silence_s=1.5, retries=2, compact=False).command("fix", endpoint).env
    assert env["API_TIMEOUT_MS"] == env["CLAUDE_STREAM_IDLE_TIMEOUT_MS"] == "1500"
    assert env["CLAUDE_CODE_MAX_RETRIES"] == "2" and env["DISABLE_COMPACT"] == "1"
    assert "DISABLE_COMPACT" not in Claude().command("fix", endpoint).env


def test_own_instructions_are_a_file_and_none_leaves_claude_code_its_own(endpoint: Endpoint) -> None:
    command = Claude(instructions='You "fix" bugs.').command("fix", endpoint)
    assert command.files == {INSTRUCTIONS: b'You "fix" bugs.'}
    assert command.argv[command.argv.index("--system-prompt-file") + 1] == str(INSTRUCTIONS)
    command = Claude().command("fix", endpoint)
    assert not command.files and "--system-prompt-file" not in command.argv


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"version": "1.0.0"}, "version: no pinned hash for Claude Code '1.0.0', there is 2.1.328"),
        ({"instructions": " "}, "instructions: empty"),
        ({"tools": ()}, "tools: none"),
        ({"retries": -1}, "retries: -1, must be 0 or more"),
        ({"silence_s": 0.0}, r"silence_s: 0\.0, must be above 0"),
    ],
)
def test_a_wrong_field_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Claude(**wrong)


def test_a_result_without_error_is_a_normal_end() -> None:
    assert Claude().ended(_result(DONE)) == End()


def test_a_result_with_an_error_is_what_it_says_whatever_the_status() -> None:
    assert Claude().ended(_result(FAILED, code=1)).error == "API Error: 500 scripted failure."
    assert Claude().ended(_result(FAILED)).error == "API Error: 500 scripted failure."
    turns = {"type": "result", "subtype": "error_max_turns", "is_error": True}
    assert Claude().ended(_result(turns, code=1)).error == "error_max_turns"


def test_a_bad_exit_without_a_result_is_the_last_line_of_standard_error() -> None:
    assert Claude().ended(_result(code=1, stderr=b"Error: no\n")).error == "exit status 1: Error: no"
    assert Claude().ended(ExecResult(code=None, stdout=b"", stderr=b"")).error == "stopped at its time limit"


@pytest.fixture
def stage(sandbox: Bubblewrap, cache: Path, tmp_path: Path) -> Stage:
    (tmp_path / "a.py").write_text("bug = 1\n")
    return Stage(sandbox=sandbox, cache=cache, base=tmp_path, context_tokens=32768)


@pytest.mark.harness
@pytest.mark.parametrize("stock", [False, True])
async def test_the_real_program_runs_the_models_commands_and_ends_well(stage: Stage, stock: bool) -> None:
    claude = Claude(instructions="You fix bugs.", tools=("Bash", "Agent"), stock=stock)
    run = await stage.perform(claude, FIX, '/help -- "fix" it\n')
    assert run.end == End(), run.result
    assert [(str(change.path), change.content) for change in run.changes] == [("a.py", b"fix = 1\n")]
    first, second = (request.body for request in run.requests)
    assert first["system"][-1]["text"] == "You fix bugs."
    assert '/help -- "fix" it' in first["messages"][0]["content"][-1]["text"]
    assert {tool["name"] for tool in first["tools"]} - {"DeferredToolPlaceholder"} == {"Agent", "Bash"}
    exact = second["messages"][: len(first["messages"])] == first["messages"]
    assert exact is not stock


@pytest.mark.harness
async def test_failures_are_tried_again_and_then_end_the_run_with_an_error(stage: Stage) -> None:
    run = await stage.perform(Claude(retries=1), [Fail(500)], "Fix a.py.")
    assert run.end.error and "scripted failure" in run.end.error
    assert len(run.requests) == 2


@pytest.mark.harness
async def test_without_compaction_a_full_context_ends_the_run_with_an_error(stage: Stage) -> None:
    full = Fail(400, "prompt is too long: 9000 tokens > 8192 maximum")
    run = await stage.perform(Claude(compact=False), [FIX[0], full], "Fix a.py.")
    assert run.end.error and "rompt is too long" in run.end.error
    assert len(run.requests) == 2
