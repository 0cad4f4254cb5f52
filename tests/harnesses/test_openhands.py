import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from harnesses.base import Command, End, Endpoint
from harnesses.fetch import DEFAULT_CACHE, fetch
from harnesses.openhands import TELLS_REASONING, UNLIMITED, Api, OpenHands
from lego.chat.render import Renderer
from lego.drill.exercise import TASK, WORK, lay_out, solved
from lego.drill.script import Broken, Finish, Malformed, Sampled, Shell, Unknown
from lego.drill.stage import Drill, share
from lego.records import Drift
from lego.smoke import POLICY
from sandbox.base import ExecResult
from sandbox.bubble import Bubblewrap


def _job(command: Command) -> dict[str, Any]:
    return json.loads(command.stdin)


def _result(*events: object, code: int | None = 0, stderr: bytes = b"") -> ExecResult:
    lines = "".join(json.dumps(event) + "\n" for event in events)
    return ExecResult(code=code, stdout=lines.encode(), stderr=stderr)


def test_the_instruction_goes_through_standard_input_as_it_is(endpoint: Endpoint) -> None:
    text = '--help "quoted" $HOME\n@file – 修复\n'
    command = OpenHands().command(text, endpoint)
    assert _job(command)["instruction"] == text
    assert not any("quoted" in word for word in (*command.argv, *command.env.values()))


@pytest.mark.parametrize("api", get_args(Api))
def test_the_model_is_reached_at_the_endpoint_with_its_key_which_commands_do_not_see(
    endpoint: Endpoint, api: Api
) -> None:
    command = OpenHands(api=api, retries=2, silence_s=7).command("fix", endpoint)
    llm = _job(command)["llm"]
    reached = {"model": "openai/policy", "base_url": "http://127.0.0.1:4000/v1", "api_key": "secret", "api_mode": api}
    sizes = {"max_input_tokens": 32768, "max_output_tokens": 2048, "num_retries": 3, "timeout": 7}
    assert (reached | sizes).items() <= llm.items()
    assert "secret" not in command.env.values()


def test_choices_of_the_recipe_are_told(endpoint: Endpoint) -> None:
    job = _job(OpenHands(tools=("terminal",), compact=False, steps=3, reasoning=False).command("fix", endpoint))
    assert (job["tools"], job["compact"], job["steps"]) == (["terminal"], False, 3)
    assert job["llm"]["model_canonical_name"] is None
    job = _job(OpenHands(instructions="You fix bugs.").command("fix", endpoint))
    assert (job["steps"], job["instructions"]) == (UNLIMITED, "You fix bugs.")
    assert job["llm"]["model_canonical_name"] == TELLS_REASONING


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"version": "0.1.0"}, "version: no lock file for OpenHands '0.1.0', there is 1.58.2"),
        ({"instructions": ""}, "instructions: empty"),
        ({"tools": ()}, "tools: none"),
        ({"steps": 0}, "steps: 0, must be 1 or more, or None"),
        ({"retries": -1}, "retries: -1, must be 0 or more"),
        ({"silence_s": 0}, "silence_s: 0, must be 1 or more"),
    ],
)
def test_a_wrong_field_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OpenHands(**wrong)


def test_its_own_ways_to_end_are_normal_ends_and_a_noted_error_is_none() -> None:
    assert OpenHands().ended(_result({"type": "result", "is_error": False, "status": "stuck"})) == End()
    failed = {"type": "result", "is_error": True, "status": "LLMError", "result": "no answer"}
    assert OpenHands().ended(_result(failed)).error == "no answer"


def test_a_bad_exit_is_the_last_line_of_standard_error() -> None:
    assert OpenHands().ended(_result(code=1, stderr=b"Error: x\n")).error == "exit status 1: Error: x"
    assert OpenHands().ended(ExecResult(code=None, stdout=b"", stderr=b"")).error == "stopped at its time limit"


@pytest.fixture
def drill(tmp_path: Path) -> Drill:
    fetch(OpenHands(), DEFAULT_CACHE)
    base = lay_out(tmp_path)
    return Drill(sandbox=Bubblewrap(), cache=DEFAULT_CACHE, base=base, renderer=Renderer.load(POLICY))


@pytest.mark.harness
@pytest.mark.wide
@pytest.mark.parametrize("api", get_args(Api))
async def test_the_real_program_fixes_the_bug_and_all_that_was_sampled_is_trained(drill: Drill, api: Api) -> None:
    own = OpenHands(api=api, instructions='You "fix" {{bugs}}.', tools=("terminal",))
    run = await drill.run(own, WORK, '/help -- "fix" it\n')
    assert run.end == End() and solved(run.changes), run.result
    assert [turn.drift for turn in run.session.turns] == [Drift.FIRST, Drift.NONE, Drift.NONE]
    assert share(run.session) == 1.0
    assert run.cost.outbound == 0 and run.left == ()
    body = run.session.journal.origins[0].body
    assert {tool.get("function", tool)["name"] for tool in body["tools"]} == {"terminal", "finish", "think"}
    told = json.dumps(body)
    assert told.count(json.dumps('You "fix" {{bugs}}.')[1:-1]) == 1
    assert json.dumps('/help -- "fix" it')[1:-1] in told


@pytest.mark.harness
@pytest.mark.wide
async def test_without_its_reasoning_each_call_forks_but_all_is_trained(drill: Drill) -> None:
    run = await drill.run(OpenHands(reasoning=False), WORK, TASK)
    assert run.end == End() and solved(run.changes), run.result
    assert Drift.REASONING_DROPPED in {turn.drift for turn in run.session.turns}
    assert share(run.session) == 1.0


@pytest.mark.harness
@pytest.mark.wide
async def test_bad_calls_are_known_by_their_ids(drill: Drill) -> None:
    run = await drill.run(OpenHands(), [WORK[0], Malformed(), Unknown(), *WORK[1:]], TASK)
    assert run.end == End() and solved(run.changes), run.result
    assert {turn.drift for turn in run.session.turns} == {Drift.FIRST, Drift.NONE}
    assert share(run.session) == 1.0


@pytest.mark.harness
@pytest.mark.wide
async def test_it_stops_at_its_own_limit_of_steps(drill: Drill) -> None:
    run = await drill.run(OpenHands(steps=2), [Shell("ls"), Shell("ls -a"), Shell("ls -l")], TASK)
    assert run.end == End() and b'"status": "MaxIterationsReached"' in run.result.stdout
    assert len(run.session.turns) == 2


@pytest.mark.harness
@pytest.mark.wide
async def test_failures_are_tried_again_and_then_end_the_run_with_an_error(drill: Drill) -> None:
    run = await drill.run(OpenHands(retries=1), [Broken()], TASK)
    assert run.end.error and "the engine fail here" in run.end.error
    assert [turn.drift for turn in run.session.turns] == [Drift.FIRST, Drift.RETRY_TWIN]


@pytest.mark.harness
@pytest.mark.wide
@pytest.mark.parametrize("compact", [True, False])
async def test_a_full_context_is_compacted_or_ends_the_run(drill: Drill, compact: bool) -> None:
    tight = replace(drill, context_tokens=22_000, output_tokens=1000)
    noise = [Shell("seq 1000"), Shell("seq 1000 2000"), Shell("seq 2000 3000")]
    run = await tight.run(OpenHands(compact=compact), [*noise, *WORK], TASK)
    if compact:
        assert run.end == End() and solved(run.changes), run.result
        assert Drift.COMPACTION in {turn.drift for turn in run.session.turns}
        assert share(run.session) == 1.0
    else:
        assert run.end.error and "context" in run.end.error.lower()


@pytest.mark.harness
@pytest.mark.wide
async def test_its_sub_agent_is_known_as_one_and_trained(drill: Drill) -> None:
    given = {"prompt": "List the files.", "subagent_type": "general-purpose", "description": "x", "summary": "x"}
    call = json.dumps({"name": "task", "arguments": given | {"security_risk": "LOW"}})
    script = [Sampled(f"<tool_call>\n{call}\n</tool_call>"), Shell("ls"), Finish("Listed."), *WORK[1:]]
    run = await drill.run(OpenHands(tools=("terminal", "task")), script, TASK)
    assert run.end == End() and solved(run.changes), run.result
    drifts = [turn.drift for turn in run.session.turns]
    assert drifts == [Drift.FIRST, Drift.SUBAGENT, Drift.NONE, Drift.NONE, Drift.NONE]
    assert share(run.session) == 1.0
