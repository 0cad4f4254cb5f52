import json
import tomllib
from dataclasses import replace
from typing import Any

import pytest

from harnesses.base import Command, End, Endpoint
from harnesses.codex import CONFIG_HOME, Codex, toml
from sandbox.base import ExecResult


def _config(command: Command) -> dict[str, Any]:
    return tomllib.loads(command.files[CONFIG_HOME / "config.toml"].decode())


def _result(*events: object, code: int | None = 0, stderr: bytes = b"") -> ExecResult:
    lines = "".join(json.dumps(event) + "\n" for event in events)
    return ExecResult(code=code, stdout=lines.encode(), stderr=stderr)


WARNING = {"type": "item.completed", "item": {"type": "error", "message": "Model metadata for `policy` not found."}}
COMPLETED = {"type": "turn.completed", "usage": {}}
FAILED = {"type": "turn.failed", "error": {"message": "unexpected status 500"}}


def test_the_instruction_goes_through_standard_input_as_it_is(endpoint: Endpoint) -> None:
    text = '--help "quoted" $HOME\n@file – 修复\n'
    command = Codex().command(text, endpoint)
    assert command.stdin == text.encode()
    assert command.argv[-1] == "-" and not any("--help" in word for word in command.argv)


def test_the_model_is_reached_at_the_endpoint_with_its_key_from_the_environment(endpoint: Endpoint) -> None:
    command = Codex().command("fix", endpoint)
    config = _config(command)
    provider = config["model_providers"][config["model_provider"]]
    assert provider["base_url"] == "http://127.0.0.1:4000/v1" and provider["wire_api"] == "responses"
    assert command.env[provider["env_key"]] == "secret"
    assert config["shell_environment_policy"]["exclude"] == [provider["env_key"]]
    assert config["model"] == "policy" and config["model_context_window"] == 32768
    assert not any(b"secret" in content for content in command.files.values())


def test_a_dead_endpoint_is_given_up_after_the_tries_of_the_recipe(endpoint: Endpoint) -> None:
    config = _config(Codex(retries=2, silence_s=1.5).command("fix", endpoint))
    provider = config["model_providers"]["lego"]
    assert (provider["request_max_retries"], provider["stream_max_retries"]) == (0, 2)
    assert provider["stream_idle_timeout_ms"] == 1500
    assert config["features"]["unbounded_connection_retries"] is False


def test_history_is_compacted_before_an_answer_would_not_fit(endpoint: Endpoint) -> None:
    assert _config(Codex().command("fix", endpoint))["model_auto_compact_token_limit"] == 32768 - 2048
    tight = replace(endpoint, output_tokens=32000)
    assert _config(Codex().command("fix", tight))["model_auto_compact_token_limit"] == 32768 // 2


def test_own_instructions_are_a_file_and_none_leaves_codex_its_own(endpoint: Endpoint) -> None:
    command = Codex(instructions='You "fix" bugs.').command("fix", endpoint)
    path = CONFIG_HOME / "instructions.md"
    assert command.files[path] == b'You "fix" bugs.' and _config(command)["model_instructions_file"] == str(path)
    assert path not in Codex().command("fix", endpoint).files
    assert "model_instructions_file" not in _config(Codex().command("fix", endpoint))


def test_nothing_but_the_model_is_reached_lean_or_not(endpoint: Endpoint) -> None:
    for lean in (True, False):
        config = _config(Codex(lean=lean).command("fix", endpoint))
        assert config["web_search"] == "disabled" and config["check_for_update_on_startup"] is False
        assert config["analytics"] == config["feedback"] == {"enabled": False}
        assert config["features"]["plugins"] is False and config["features"]["apps"] is False
        assert ("include_environment_context" in config) is lean


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"version": "0.1.0"}, "version: no pinned hash for Codex '0.1.0', there is 0.169.0"),
        ({"instructions": " "}, "instructions: empty"),
        ({"retries": -1}, "retries: -1, must be 0 or more"),
        ({"silence_s": 0.0}, r"silence_s: 0\.0, must be above 0"),
    ],
)
def test_a_wrong_field_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Codex(**wrong)


def test_toml_reads_back_as_what_was_written() -> None:
    table = {
        "text": 'quote " backslash \\ newline \n tab \t bell \a del \x7f snow ☃ face 😀',
        "a.b c": {"yes": True, "count": 3, "list": ["x", '"'], "deep": {"'": "", "none": {}}},
        "after": {"x": 1},
    }
    assert tomllib.loads(toml(table)) == table  # type: ignore[arg-type]


def test_a_completed_turn_is_a_normal_end_and_warnings_are_no_errors() -> None:
    assert Codex().ended(_result(WARNING, COMPLETED)) == End()


def test_a_failed_turn_is_the_error_it_names() -> None:
    assert Codex().ended(_result(WARNING, FAILED, code=1)).error == "unexpected status 500"
    assert Codex().ended(_result(FAILED)).error == "unexpected status 500"


def test_a_bad_exit_without_events_is_the_last_line_of_standard_error() -> None:
    ended = Codex().ended(_result(code=1, stderr=b"Error loading config.toml: unknown field `x`\n\n"))
    assert ended.error == "exit status 1: Error loading config.toml: unknown field `x`"
    assert Codex().ended(ExecResult(code=None, stdout=b"", stderr=b"")).error == "stopped at its time limit"


def test_lines_that_are_cut_or_no_json_are_passed_over() -> None:
    cut = ExecResult(code=0, stdout=b'[1]\n"x"\nnull\n{"type": "turn.comp', stderr=b"", truncated=True)
    assert Codex().ended(cut) == End()
