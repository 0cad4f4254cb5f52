import json
import re
from pathlib import Path
from typing import Any

import pytest

from harnesses.base import Command, End, Endpoint
from harnesses.qwen import SETTINGS, Qwen
from harnesses.rehearsal import Fail, Say, Shell, Stage
from sandbox.base import ExecResult
from sandbox.bubble import Bubblewrap

FIX = (Shell("echo fix = 1 > a.py"), Say("Done."))


def _settings(command: Command) -> dict[str, Any]:
    return json.loads(command.files[SETTINGS])


def _result(*events: object, code: int | None = 0, stderr: bytes = b"") -> ExecResult:
    lines = "".join(json.dumps(event) + "\n" for event in events)
    return ExecResult(code=code, stdout=lines.encode(), stderr=stderr)


DONE = {"type": "result", "subtype": "success", "is_error": False, "result": "Done."}
FAILED = {"type": "result", "is_error": True, "error": {"message": "[API Error: 500 scripted failure]"}}


def test_the_instruction_goes_through_standard_input(endpoint: Endpoint) -> None:
    command = Qwen().command('--help "quoted"', endpoint)
    assert command.stdin == b'--help "quoted"'
    assert not any("quoted" in word for word in command.argv)


def test_an_instruction_that_reads_as_a_command_comes_after_a_newline(endpoint: Endpoint) -> None:
    assert Qwen().command("/help me", endpoint).stdin == b"\n/help me"


def test_the_model_is_reached_at_the_endpoint_with_its_key_and_sizes(endpoint: Endpoint) -> None:
    command = Qwen(silence_s=1.5).command("fix", endpoint)
    assert command.env["OPENAI_BASE_URL"] == "http://127.0.0.1:4000/v1" and command.env["OPENAI_API_KEY"] == "secret"
    assert command.argv[command.argv.index("--model") + 1] == "policy"
    assert command.env["QWEN_CODE_MAX_OUTPUT_TOKENS"] == "2048"
    wait = {"timeout": 1500, "streamIdleTimeoutMs": 1500, "maxRetries": 0}
    assert _settings(command)["model"]["generationConfig"] == {"contextWindowSize": 32768, **wait}
    assert not any(b"secret" in content for content in command.files.values())


def test_nothing_but_the_model_is_reached_and_the_settings_are_above_a_repositorys(endpoint: Endpoint) -> None:
    command = Qwen().command("fix", endpoint)
    settings = _settings(command)
    assert settings["privacy"]["usageStatisticsEnabled"] is settings["telemetry"]["enabled"] is False
    assert settings["general"]["enableAutoUpdate"] is False
    assert command.env["QWEN_CODE_SYSTEM_SETTINGS_PATH"] == str(SETTINGS) and "--safe-mode" in command.argv


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"version": "0.1.0"}, "version: no lock file for qwen-code '0.1.0', there is 0.24.4"),
        ({"instructions": ""}, "instructions: empty"),
        ({"silence_s": -1.0}, r"silence_s: -1\.0, must be above 0"),
    ],
)
def test_a_wrong_field_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Qwen(**wrong)


def test_a_result_without_error_is_a_normal_end() -> None:
    assert Qwen().ended(_result(DONE)) == End()


def test_a_result_with_an_error_is_what_it_says_whatever_the_status() -> None:
    assert Qwen().ended(_result(FAILED, code=1)).error == "[API Error: 500 scripted failure]"
    assert Qwen().ended(_result(FAILED)).error == "[API Error: 500 scripted failure]"
    nameless = {"type": "result", "subtype": "error_during_execution", "is_error": True}
    assert Qwen().ended(_result(nameless)).error == "error_during_execution"


def test_a_bad_exit_without_a_result_is_the_last_line_of_standard_error() -> None:
    assert Qwen().ended(_result(code=1, stderr=b"Unknown argument: x\n")).error == "exit status 1: Unknown argument: x"
    assert Qwen().ended(ExecResult(code=None, stdout=b"", stderr=b"")).error == "stopped at its time limit"


@pytest.fixture
def stage(sandbox: Bubblewrap, cache: Path, tmp_path: Path) -> Stage:
    (tmp_path / "a.py").write_text("bug = 1\n")
    return Stage(sandbox=sandbox, cache=cache, base=tmp_path, timeout_s=120.0, context_tokens=65536)


@pytest.mark.harness
async def test_the_real_program_runs_the_models_commands_and_ends_well(stage: Stage) -> None:
    run = await stage.perform(Qwen(instructions="You fix bugs."), FIX, '/help -- "fix" it')
    assert run.end == End(), run.result
    assert [(str(change.path), change.content) for change in run.changes] == [("a.py", b"fix = 1\n")]
    assert len(run.requests) == 2
    system, user = run.requests[0].body["messages"]
    assert system["content"] == "You fix bugs."
    assert user["content"][-1]["text"].strip() == '/help -- "fix" it'
    assert run.requests[0].body["max_tokens"] == 1024


@pytest.mark.harness
async def test_a_full_context_ends_the_run_with_an_error(stage: Stage) -> None:
    full = Fail(400, "This model's maximum context length is 8192 tokens, got 9000.")
    run = await stage.perform(Qwen(), [FIX[0], full], "Fix a.py.")
    assert run.end.error and "maximum context length" in run.end.error


@pytest.mark.harness
async def test_many_commands_take_no_more_memory_than_one(stage: Stage) -> None:
    peaks = Shell("sleep 1; grep -h VmHWM /proc/[0-9]*/status")
    # The same call five times in a row would end the run.
    script = [*(Shell(f"echo {number}") for number in range(8)), peaks, Say("Done.")]
    run = await stage.perform(Qwen(), script, "Fix a.py.")
    told = str(run.requests[-1].body["messages"][-1]["content"])
    assert max(map(int, re.findall(r"VmHWM:\D*(\d+) kB", told))) < 700_000
