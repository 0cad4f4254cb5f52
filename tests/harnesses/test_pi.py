import json
from typing import Any, get_args

import pytest

from harnesses.base import Command, End, Endpoint
from harnesses.pi import CONFIG_HOME, Api, Pi
from sandbox.base import ExecResult


def _json(command: Command, name: str) -> dict[str, Any]:
    return json.loads(command.files[CONFIG_HOME / name])


def test_the_instruction_goes_through_standard_input(endpoint: Endpoint) -> None:
    command = Pi().command("@README --help", endpoint)
    assert command.stdin == b"@README --help"
    assert not any("README" in word for word in command.argv)


@pytest.mark.parametrize("api", get_args(Api))
def test_each_wire_format_gets_the_base_url_its_client_completes(endpoint: Endpoint, api: Api) -> None:
    command = Pi(api=api).command("fix", endpoint)
    provider = _json(command, "models.json")["providers"]["lego"]
    suffix = "" if api == "anthropic-messages" else "/v1"
    assert provider["api"] == api and provider["baseUrl"] == f"http://127.0.0.1:4000{suffix}"
    assert command.env[provider["apiKey"]] == "secret"
    model = {"id": "policy", "reasoning": False, "contextWindow": 32768, "maxTokens": 2048}
    assert provider["models"] == [model]


def test_tools_and_instructions_are_those_of_the_recipe(endpoint: Endpoint) -> None:
    argv = Pi(tools=("bash",), instructions="You fix bugs.").command("fix", endpoint).argv
    assert argv[argv.index("--tools") + 1] == "bash"
    assert argv[argv.index("--system-prompt") + 1] == "You fix bugs."
    assert "--system-prompt" not in Pi().command("fix", endpoint).argv


def test_tries_of_the_client_library_do_not_multiply_with_those_of_the_recipe(endpoint: Endpoint) -> None:
    retry = _json(Pi(retries=2, silence_s=1.5).command("fix", endpoint), "settings.json")["retry"]
    assert retry["maxRetries"] == 2 and retry["provider"] == {"maxRetries": 0, "timeoutMs": 1500}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"version": "0.1.0"}, "version: no lock file for pi '0.1.0'"),
        ({"instructions": ""}, "instructions: empty"),
        ({"tools": ()}, "tools: none"),
        ({"retries": -1}, "retries: -1, must be 0 or more"),
        ({"silence_s": -1.0}, r"silence_s: -1\.0, must be above 0"),
    ],
)
def test_a_wrong_field_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pi(**wrong)


def test_exit_status_zero_is_a_normal_end_and_else_the_last_line_is_the_error() -> None:
    assert Pi().ended(ExecResult(code=0, stdout=b"Done.\n", stderr=b"")) == End()
    failed = ExecResult(code=1, stdout=b"", stderr=b"500 scripted failure\n")
    assert Pi().ended(failed).error == "exit status 1: 500 scripted failure"
