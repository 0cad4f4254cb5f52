"""Real binaries in real boxes against a scripted model."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from harnesses.base import End, Endpoint, Harness
from harnesses.codex import Codex
from harnesses.pi import Pi
from harnesses.rehearsal import Fail, Say, Shell, Stage
from sandbox.base import BoxSpec
from sandbox.bubble import Bubblewrap

pytestmark = pytest.mark.harness
TASK = "Fix a.py."
FIX = (Shell("cat a.py"), Shell("sed -i 's/bug/fix/' a.py"), Say("Done."))
LEAN: list[Harness] = [Codex(instructions="You fix bugs."), Pi(instructions="You fix bugs.", tools=("bash",))]
FORMATS: list[Harness] = [Pi(api="openai-responses"), Pi(api="anthropic-messages")]
QUICK: list[Harness] = [Codex(retries=1), Pi(retries=1)]
FULL: list[Harness] = [Codex(), Codex(lean=False), Codex(ask_user=False), Pi()]


def _name(harness: Any) -> str:
    fields = {name: value for name, value in vars(harness).items() if value != getattr(type(harness), name)}
    return f"{harness.name}-{'-'.join(fields)}"


@pytest.fixture
def stage(sandbox: Bubblewrap, cache: Path, tmp_path: Path) -> Stage:
    (tmp_path / "a.py").write_text("bug = 1\n")
    return Stage(sandbox=sandbox, cache=cache, base=tmp_path)


@pytest.mark.parametrize("harness", [*FORMATS, *FULL], ids=_name)
async def test_a_harness_runs_the_models_commands_and_ends_well(harness: Harness, stage: Stage) -> None:
    run = await stage.perform(harness, FIX, TASK)
    assert run.end == End(), run.result
    assert [(str(change.path), change.content) for change in run.changes] == [("a.py", b"fix = 1\n")]
    assert len(run.requests) == 3


@pytest.mark.parametrize("harness", LEAN, ids=_name)
async def test_a_lean_prompt_holds_the_instruction_the_task_and_no_more(harness: Harness, stage: Stage) -> None:
    task = '-- "fix" it\n@a.py'
    run = await stage.perform(harness, FIX, task)
    body = run.requests[0].body
    system, user = body.get("input") or body["messages"]
    assert str(system["content"]).count("You fix bugs.") == 1
    assert user["content"][0]["text"] == task and len(user["content"]) == 1
    assert run.requests[0].prompt_chars < 5000
    assert run.end == End() and run.changes[0].content == b"fix = 1\n"
    assert run.result.stderr == b"", "a warning hints at a wrong set-up"


@pytest.mark.parametrize("harness", QUICK, ids=_name)
async def test_a_server_that_always_fails_ends_the_run_with_an_error(harness: Harness, stage: Stage) -> None:
    run = await stage.perform(harness, [Fail(500)], TASK)
    assert run.end.error and not run.result.timed_out, run.result
    assert len(run.requests) == 2


@pytest.mark.parametrize("harness", LEAN, ids=_name)
async def test_a_full_context_ends_the_run_with_an_error(harness: Harness, stage: Stage) -> None:
    full = Fail(400, "This model's maximum context length is 8192 tokens, got 9000.")
    run = await stage.perform(harness, [FIX[0], full], TASK)
    assert run.end.error and "maximum context length" in run.end.error


async def test_a_server_that_is_gone_ends_a_codex_run(
    sandbox: Bubblewrap, cache: Path, tmp_path: Path, endpoint: Endpoint
) -> None:
    codex = Codex(retries=1)
    command = codex.command("Fix a.py.", endpoint)
    async with sandbox.open(BoxSpec(base=tmp_path, mounts=codex.mounts(cache))) as box:
        for path, content in command.files.items():
            await box.put(path, content)
        async with asyncio.timeout(60):
            result = await box.exec(command.argv, env=command.env, stdin=command.stdin, timeout_s=40)
    assert not result.timed_out and "Connection failed" in (codex.ended(result).error or "")
