import json
from pathlib import Path
from typing import Any, get_args

import pytest

from harnesses.base import Command, End, Endpoint
from harnesses.opencode import SEARCH_TARGET, OpenCode, Sdk
from harnesses.rehearsal import Say, Shell, Stage
from sandbox.base import ExecResult
from sandbox.bubble import Bubblewrap


def _config(command: Command) -> dict[str, Any]:
    return json.loads(command.env["OPENCODE_CONFIG_CONTENT"])


def _result(*events: object, code: int | None = 0, stderr: bytes = b"") -> ExecResult:
    lines = "".join(json.dumps(event) + "\n" for event in events)
    return ExecResult(code=code, stdout=lines.encode(), stderr=stderr)


FINISHED = {"type": "step_finish", "part": {"type": "step-finish", "reason": "stop"}}
FAILED = {"type": "error", "error": {"name": "APIError", "data": {"message": "scripted failure"}}}


def test_the_instruction_goes_through_standard_input_as_it_is(endpoint: Endpoint) -> None:
    text = '--help "quoted" $HOME\n@file – 修复\n'
    command = OpenCode().command(text, endpoint)
    assert command.stdin == text.encode()
    assert not any("quoted" in word for word in (*command.argv, *command.env.values()))


def test_a_title_is_given_so_that_the_model_is_not_asked_for_one(endpoint: Endpoint) -> None:
    argv = OpenCode().command("fix", endpoint).argv
    assert argv[argv.index("--title") + 1]


@pytest.mark.parametrize("sdk", get_args(Sdk))
def test_each_client_library_reaches_the_model_at_the_endpoint(endpoint: Endpoint, sdk: Sdk) -> None:
    command = OpenCode(sdk=sdk, silence_s=1.5).command("fix", endpoint)
    provider = _config(command)["provider"]["lego"]
    assert provider["npm"] == sdk
    times = {"headerTimeout": 1500, "chunkTimeout": 1500}
    assert provider["options"] == {"baseURL": "http://127.0.0.1:4000/v1", "apiKey": "secret", **times}
    assert provider["models"]["policy"]["limit"] == {"context": 32768, "output": 2048}
    assert command.argv[command.argv.index("--model") + 1] == "lego/policy"


def test_nothing_but_the_model_is_reached(endpoint: Endpoint) -> None:
    command = OpenCode().command("fix", endpoint)
    config = _config(command)
    assert config["autoupdate"] is False and config["share"] == "disabled"
    assert config["enabled_providers"] == ["lego"]
    for what in ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "PROJECT_CONFIG"):
        assert command.env[f"OPENCODE_DISABLE_{what}"] == "1"


def test_the_package_for_plugins_counts_as_fetched(endpoint: Endpoint) -> None:
    files = {str(path): content for path, content in OpenCode().command("fix", endpoint).files.items()}
    lock = json.loads(files["/home/agent/.config/opencode/package-lock.json"])
    assert "@opencode-ai/plugin" in lock["packages"][""]["dependencies"]
    assert any(path.startswith("/home/agent/.config/opencode/node_modules/") for path in files)


def test_only_the_tools_of_the_recipe_are_offered_and_none_asks(endpoint: Endpoint) -> None:
    permission = _config(OpenCode(tools=("bash",)).command("fix", endpoint))["permission"]
    # The last rule that matches counts.
    assert next(iter(permission.items())) == ("*", "deny")
    assert {name for name, rule in permission.items() if rule == "allow"} == {"bash", "external_directory", "doom_loop"}
    assert "ask" not in permission.values()


def test_own_instructions_take_the_place_of_opencodes(endpoint: Endpoint) -> None:
    config = _config(OpenCode(instructions='You "fix" bugs.').command("fix", endpoint))
    assert config["agent"]["build"]["prompt"] == 'You "fix" bugs.'
    assert "agent" not in _config(OpenCode().command("fix", endpoint))


@pytest.mark.parametrize("compact", [True, False])
def test_compaction_is_a_choice(endpoint: Endpoint, compact: bool) -> None:
    config = _config(OpenCode(compact=compact).command("fix", endpoint))
    assert config["compaction"] == {"auto": compact, "prune": False}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"version": "1.0.0"}, "version: no pinned hash for OpenCode '1.0.0', there is 1.18.33"),
        ({"instructions": " "}, "instructions: empty"),
        ({"tools": ()}, "tools: none"),
        ({"silence_s": 0.0}, r"silence_s: 0\.0, must be above 0"),
    ],
)
def test_a_wrong_field_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OpenCode(**wrong)


def test_finished_steps_and_status_zero_are_a_normal_end() -> None:
    assert OpenCode().ended(_result(FINISHED)) == End()


def test_an_error_at_the_end_is_the_error_whatever_the_status() -> None:
    assert OpenCode().ended(_result(FINISHED, FAILED)).error == "scripted failure"
    assert OpenCode().ended(_result(FAILED, code=1)).error == "scripted failure"
    nameless = {"type": "error", "error": {"name": "UnknownError"}}
    assert OpenCode().ended(_result(nameless)).error == "UnknownError"
    assert OpenCode().ended(_result({"type": "error"})).error == "an error without a message"


def test_an_error_that_a_further_step_followed_was_overcome() -> None:
    assert OpenCode().ended(_result(FAILED, FINISHED)) == End()


def test_the_status_that_an_overcome_error_leaves_is_no_error() -> None:
    # A history that was refused as too long, shortened, and gone on with.
    assert OpenCode().ended(_result(FAILED, FINISHED, code=1)) == End()
    calling = {"type": "step_finish", "part": {"type": "step-finish", "reason": "tool-calls"}}
    assert OpenCode().ended(_result(FAILED, FINISHED, calling, code=1)).error
    assert OpenCode().ended(_result(FAILED, FINISHED, code=137)).error
    assert OpenCode().ended(_result(FINISHED, code=1)).error


def test_a_bad_exit_without_events_is_the_last_line_of_standard_error() -> None:
    failed = OpenCode().ended(_result(code=1, stderr=b"Error: Model not found: lego/x.\n"))
    assert failed.error == "exit status 1: Error: Model not found: lego/x."
    assert OpenCode().ended(ExecResult(code=None, stdout=b"", stderr=b"")).error == "stopped at its time limit"


def test_lines_that_are_cut_or_no_json_are_passed_over() -> None:
    cut = ExecResult(code=0, stdout=b'[1]\n"x"\nnull\n{"type": "err', stderr=b"", truncated=True)
    assert OpenCode().ended(cut) == End()


@pytest.mark.harness
async def test_the_real_program_runs_the_models_commands_and_ends_well(
    sandbox: Bubblewrap, cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.py").write_text("bug = 1\n")
    # It starts slowly on a busy machine.
    stage = Stage(sandbox=sandbox, cache=cache, base=tmp_path, timeout_s=180.0, context_tokens=32768)
    # Its own grep needs the program that is mounted with it.
    script = (Shell("rg --files | xargs rg -c bug > /tmp/n && sed -i s/bug/fix/ a.py && command -v rg"), Say("Done."))
    task = '-- "fix" it\n@a.py'
    run = await stage.perform(OpenCode(instructions="You fix bugs."), script, task)
    assert run.end == End(), run.result
    assert [(str(change.path), change.content) for change in run.changes] == [("a.py", b"fix = 1\n")]
    assert len(run.requests) == 2
    system, user = run.requests[0].body["messages"]
    assert system["content"].startswith("You fix bugs.\n") and user["content"] == task
    tools = {tool["function"]["name"] for tool in run.requests[0].body["tools"]}
    assert tools == {"bash", "edit", "glob", "grep", "read", "task", "todowrite", "write"}
    assert str(SEARCH_TARGET) in run.requests[1].body["messages"][-1]["content"]
