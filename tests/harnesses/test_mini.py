import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from harnesses.base import Command, End, Endpoint
from harnesses.fetch import DEFAULT_CACHE, fetch
from harnesses.mini import CONFIGS, SETTINGS, TARGET, Api, Mini
from lego.chat.render import Renderer
from lego.drill.exercise import TASK, WORK, lay_out, solved
from lego.drill.script import Broken, Finish, Malformed, Sampled, Shell, Unknown
from lego.drill.stage import Drill, share
from lego.records import Drift
from lego.smoke import POLICY
from sandbox.base import ExecResult
from sandbox.bubble import Bubblewrap


def _settings(command: Command) -> dict[str, Any]:
    return json.loads(command.files[SETTINGS])


def _result(*events: object, code: int | None = 0, stderr: bytes = b"") -> ExecResult:
    lines = "".join(json.dumps(event) + "\n" for event in events)
    return ExecResult(code=code, stdout=lines.encode(), stderr=stderr)


def test_the_instruction_is_a_setting_in_a_file(endpoint: Endpoint) -> None:
    command = Mini().command('--help {{task}} "quoted"', endpoint)
    assert _settings(command)["run"]["task"] == '--help {{task}} "quoted"'
    assert not any("quoted" in word for word in (*command.argv, *command.env.values(), command.stdin.decode()))


def test_the_model_is_reached_at_the_endpoint_with_its_key_which_commands_do_not_see(endpoint: Endpoint) -> None:
    command = Mini(silence_s=1.5, retries=2).command("fix", endpoint)
    model = _settings(command)["model"]
    assert model["model_name"] == "openai/policy"
    reached = {"api_base": "http://127.0.0.1:4000/v1", "api_key": "secret"}
    assert model["model_kwargs"] == {**reached, "timeout": 1.5, "max_retries": 0}
    assert command.env["MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT"] == "3"
    assert "secret" not in command.env.values()


@pytest.mark.parametrize("api", get_args(Api))
def test_each_way_of_asking_has_its_own_settings_which_a_repository_cannot_replace(
    endpoint: Endpoint, api: Api
) -> None:
    files = json.loads(Mini(api=api).command("fix", endpoint).stdin)["config"]
    assert files == [str(TARGET / "minisweagent/config" / CONFIGS[api]), str(SETTINGS)]


def test_limits_are_those_of_the_recipe(endpoint: Endpoint) -> None:
    settings = _settings(Mini(steps=3, command_s=7).command("fix", endpoint))
    assert settings["agent"] == {"step_limit": 3} and settings["environment"] == {"timeout": 7}
    assert _settings(Mini().command("fix", endpoint))["agent"] == {"step_limit": 0}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"version": "0.1.0"}, "version: no lock file for mini-swe-agent '0.1.0', there is 2.4.6"),
        ({"instructions": ""}, "instructions: empty"),
        ({"api": "json"}, "api: 'json', must be one of chat, responses, text"),
        ({"steps": 0}, "steps: 0, must be 1 or more, or None"),
        ({"command_s": 0}, "command_s: 0, must be 1 or more"),
        ({"retries": -1}, "retries: -1, must be 0 or more"),
        ({"silence_s": -1.0}, r"silence_s: -1\.0, must be above 0"),
    ],
)
def test_a_wrong_field_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mini(**wrong)


@pytest.mark.parametrize("status", ["Submitted", "LimitsExceeded", "RepeatedFormatError"])
def test_its_own_ways_to_end_are_normal_ends(status: str) -> None:
    assert Mini().ended(_result({"type": "result", "is_error": False, "status": status})) == End()


def test_a_bad_exit_is_the_last_line_of_standard_error() -> None:
    failed = _result(code=1, stderr=b"Traceback\nlitellm.ContextWindowExceededError: too long\n")
    assert Mini().ended(failed).error == "exit status 1: litellm.ContextWindowExceededError: too long"
    assert Mini().ended(ExecResult(code=None, stdout=b"", stderr=b"")).error == "stopped at its time limit"


@pytest.fixture
def drill(tmp_path: Path) -> Drill:
    fetch(Mini(), DEFAULT_CACHE)
    base = lay_out(tmp_path)
    return Drill(sandbox=Bubblewrap(), cache=DEFAULT_CACHE, base=base, renderer=Renderer.load(POLICY))


@pytest.mark.harness
@pytest.mark.wide
@pytest.mark.parametrize("api", get_args(Api))
async def test_the_real_program_fixes_the_bug_and_all_that_was_sampled_is_trained(drill: Drill, api: Api) -> None:
    run = await drill.run(Mini(api=api), WORK, TASK)
    assert run.end == End() and solved(run.changes), run.result
    assert [turn.drift for turn in run.session.turns] == [Drift.FIRST, Drift.NONE, Drift.NONE]
    assert share(run.session) == 1.0
    assert run.cost.outbound == 0 and run.left == ()


@pytest.mark.harness
@pytest.mark.wide
async def test_instructions_and_task_reach_the_model_to_the_letter(drill: Drill) -> None:
    instructions = "You \"fix\" {{bugs}} 'now' 😀 {% raw %}\\n.\n\nBye."
    run = await drill.run(Mini(instructions=instructions), [Finish()], "--help {{task}} $HOME\n@x –")
    system, user = run.session.journal.origins[0].body["messages"]
    assert system["content"] == instructions
    assert user["content"].startswith("Please solve this issue: --help {{task}} $HOME\n@x –\n")


@pytest.mark.harness
@pytest.mark.wide
async def test_answers_that_it_cannot_use_are_deleted_from_its_history_and_trained_as_ends(drill: Drill) -> None:
    run = await drill.run(Mini(), [Malformed(), WORK[0], Unknown(), Sampled("No call."), *WORK[1:]], TASK)
    assert run.end == End() and solved(run.changes), run.result
    told = [message["role"] for message in run.session.journal.origins[-1].body["messages"]]
    # The bad call before the first good one and the two after it are gone; what it said to them stays.
    assert told.count("assistant") == 2 and told.count("user") == 4
    # Without the first answer, no turn is left that the second call could extend; the later ones branch.
    assert [turn.drift for turn in run.session.turns] == [Drift.FIRST, Drift.COMPACTION, *[Drift.NONE] * 4]
    assert share(run.session) == 1.0


@pytest.mark.harness
@pytest.mark.wide
async def test_three_unusable_answers_in_a_row_end_the_run(drill: Drill) -> None:
    run = await drill.run(Mini(), [Sampled("No call.")], TASK)
    assert run.end == End() and b'"status": "RepeatedFormatError"' in run.result.stdout
    assert len(run.session.turns) == 3


@pytest.mark.harness
@pytest.mark.wide
async def test_it_stops_at_its_own_limit_of_steps(drill: Drill) -> None:
    run = await drill.run(Mini(steps=2), [Shell("ls")], TASK)
    assert run.end == End() and b'"status": "LimitsExceeded"' in run.result.stdout
    assert len(run.session.turns) == 2


@pytest.mark.harness
@pytest.mark.wide
async def test_failures_are_tried_again_and_then_end_the_run_with_an_error(drill: Drill) -> None:
    run = await drill.run(Mini(retries=1), [Broken()], TASK)
    assert run.end.error and "the engine fail here" in run.end.error
    assert [turn.drift for turn in run.session.turns] == [Drift.FIRST, Drift.RETRY_TWIN]


@pytest.mark.harness
@pytest.mark.wide
async def test_a_full_context_ends_the_run_with_an_error(drill: Drill) -> None:
    full = replace(drill, context_tokens=4000, output_tokens=1000)
    run = await full.run(Mini(), [Shell("seq 9000"), *WORK], TASK)
    assert run.end.error and "maximum context length" in run.end.error
    assert len(run.session.turns) == 1
