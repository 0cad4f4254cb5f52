import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harnesses.base import Command, End, Endpoint
from harnesses.fetch import DEFAULT_CACHE, fetch
from harnesses.terminus import Terminus
from lego.chat.render import Renderer
from lego.drill.exercise import TASK, WORK, lay_out, solved
from lego.drill.script import Broken, Sampled, Shell
from lego.drill.stage import Drill, share
from lego.records import Drift
from lego.smoke import POLICY
from sandbox.base import ExecResult
from sandbox.bubble import Bubblewrap

EMPTY = "<response><analysis>a</analysis><plan>p</plan><commands></commands>"


def _job(command: Command) -> dict[str, Any]:
    return json.loads(command.stdin)


def _result(*events: object, code: int | None = 0, stderr: bytes = b"") -> ExecResult:
    lines = "".join(json.dumps(event) + "\n" for event in events)
    return ExecResult(code=code, stdout=lines.encode(), stderr=stderr)


def test_the_instruction_goes_through_standard_input_as_it_is(endpoint: Endpoint) -> None:
    text = '--help "quoted" {x} $HOME\n@file – 修复\n'
    command = Terminus().command(text, endpoint)
    assert _job(command)["instruction"] == text
    assert not any("quoted" in word for word in (*command.argv, *command.env.values()))


def test_the_model_is_reached_at_the_endpoint_with_its_key_which_commands_do_not_see(endpoint: Endpoint) -> None:
    command = Terminus(silence_s=1.5).command("fix", endpoint)
    agent = _job(command)["agent"]
    assert (agent["model_name"], agent["api_base"]) == ("openai/policy", "http://127.0.0.1:4000/v1")
    assert agent["llm_kwargs"] == {"api_key": "secret", "timeout": 1.5, "max_retries": 0}
    assert agent["model_info"]["max_input_tokens"] == 32768 and agent["model_info"]["max_output_tokens"] == 2048
    assert "secret" not in command.env.values()


def test_choices_of_the_recipe_are_told(endpoint: Endpoint) -> None:
    chosen = Terminus(parser="xml", steps=3, compact=False, reasoning=False, spare_tokens=99)
    agent = _job(chosen.command("fix", endpoint))["agent"]
    assert (agent["parser_name"], agent["max_turns"], agent["interleaved_thinking"]) == ("xml", 3, False)
    assert (agent["enable_summarize"], agent["proactive_summarization_threshold"]) == (False, 99)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"version": "0.1.0"}, "version: no lock file for harbor '0.1.0', there is 0.25.0"),
        ({"parser": "yaml"}, "parser: 'yaml', must be json or xml"),
        ({"spare_tokens": -1}, "spare_tokens: -1, must be 0 or more"),
        ({"steps": 0}, "steps: 0, must be 1 or more, or None"),
        ({"silence_s": 0.0}, r"silence_s: 0\.0, must be above 0"),
    ],
)
def test_a_wrong_field_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Terminus(**wrong)


def test_a_result_is_a_normal_end_and_a_bad_exit_the_last_line_of_standard_error() -> None:
    assert Terminus().ended(_result({"type": "result", "is_error": False, "episodes": 3})) == End()
    assert Terminus().ended(_result(code=1, stderr=b"Error: x\n")).error == "exit status 1: Error: x"
    assert Terminus().ended(ExecResult(code=None, stdout=b"", stderr=b"")).error == "stopped at its time limit"


@pytest.fixture
def drill(tmp_path: Path) -> Drill:
    fetch(Terminus(), DEFAULT_CACHE)
    base = lay_out(tmp_path)
    return Drill(sandbox=Bubblewrap(), cache=DEFAULT_CACHE, base=base, renderer=Renderer.load(POLICY))


@pytest.mark.harness
@pytest.mark.wide
async def test_the_real_program_fixes_the_bug_and_all_that_was_sampled_is_trained(drill: Drill) -> None:
    task = '--help {x} "fix" $HOME\n@x –'
    run = await drill.run(Terminus(), WORK, task)
    assert run.end == End() and solved(run.changes), run.result
    # It asks whether it is really done.
    assert [turn.drift for turn in run.session.turns] == [Drift.FIRST, Drift.NONE, Drift.NONE, Drift.NONE]
    assert share(run.session) == 1.0
    assert run.cost.outbound == 0 and run.left == ()
    assert f"Task Description:\n{task}\n" in run.session.journal.origins[0].body["messages"][0]["content"]


@pytest.mark.harness
@pytest.mark.wide
async def test_it_types_what_answers_in_xml_say(drill: Drill) -> None:
    work = '<keystrokes duration="1.0">sed -i "s/a - b/a + b/" calc.py\n</keystrokes></commands></response>'
    fix = Sampled(EMPTY.removesuffix("</commands>") + work)
    end = Sampled(EMPTY + "<task_complete>true</task_complete></response>")
    run = await drill.run(Terminus(parser="xml"), [fix, end], TASK)
    assert run.end == End() and solved(run.changes), run.result
    assert len(run.session.turns) == 3 and share(run.session) == 1.0


@pytest.mark.harness
@pytest.mark.wide
async def test_only_with_reasoning_told_does_a_call_extend_the_one_before(drill: Drill) -> None:
    thinks = Sampled('<think>\nI look.\n</think>\n\n{"analysis": "a", "plan": "p", "commands": []}')
    told = await drill.run(Terminus(steps=2), [thinks], TASK)
    dropped = await drill.run(Terminus(steps=2, reasoning=False), [thinks], TASK)
    assert [turn.drift for turn in told.session.turns] == [Drift.FIRST, Drift.NONE]
    assert [turn.drift for turn in dropped.session.turns] == [Drift.FIRST, Drift.REASONING_DROPPED]
    assert share(told.session) == share(dropped.session) == 1.0


@pytest.mark.harness
@pytest.mark.wide
async def test_answers_that_it_cannot_read_stay_in_its_history(drill: Drill) -> None:
    run = await drill.run(Terminus(), [Sampled("No JSON."), Sampled('{"analysis": "a", '), *WORK], TASK)
    assert run.end == End() and solved(run.changes), run.result
    assert {turn.drift for turn in run.session.turns} == {Drift.FIRST, Drift.NONE}
    assert share(run.session) == 1.0


@pytest.mark.harness
@pytest.mark.wide
async def test_failures_end_the_run_with_an_error_after_nine_tries(drill: Drill) -> None:
    run = await drill.run(Terminus(), [Broken()], TASK)
    assert run.end.error and "the engine fail here" in run.end.error
    assert [turn.drift for turn in run.session.turns] == [Drift.FIRST, *[Drift.RETRY_TWIN] * 8]


@pytest.mark.harness
@pytest.mark.wide
async def test_a_long_history_is_handed_over_to_a_new_conversation(drill: Drill) -> None:
    tight = replace(drill, context_tokens=9000, output_tokens=1000)
    noise = [Shell("seq 1000"), Shell("seq 1000 2000")]
    said = [Sampled("The work so far."), Sampled("What is left?"), Sampled("The fix.")]
    run = await tight.run(Terminus(spare_tokens=4500), [*noise, *said, *WORK], TASK)
    assert run.end == End() and solved(run.changes), run.result
    assert Drift.COMPACTION in {turn.drift for turn in run.session.turns}
    assert share(run.session) == 1.0


@pytest.mark.harness
@pytest.mark.wide
async def test_a_full_context_without_handing_over_ends_the_run(drill: Drill) -> None:
    tight = replace(drill, context_tokens=6000, output_tokens=1000)
    noise = [Shell("seq 1000"), Shell("seq 1000 2000"), Shell("seq 2000 3000"), Shell("seq 3000 4000")]
    run = await tight.run(Terminus(compact=False), [*noise, *WORK], TASK)
    assert run.end.error and "context" in run.end.error.lower()
