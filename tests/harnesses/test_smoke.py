"""The smoke command: what its numbers see, on small programs, and what it makes of a real harness."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from harnesses.base import Command, End, Endpoint
from harnesses.fetch import DEFAULT_CACHE, fetch
from harnesses.pi import Pi
from lego import smoke
from lego.chat.render import Renderer
from lego.drill.exercise import FIXED, lay_out, solved
from lego.drill.row import BEGIN, COLUMNS, END, Verdict, table, verdict, written
from lego.drill.script import Finish, Shell
from lego.drill.stage import Drill, Drilled, share
from lego.errors import UsageError
from sandbox.base import Change, ExecResult, Mount
from sandbox.bubble import Bubblewrap

ASK = """
import json, urllib.request
tool = {"name": "sh", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}
messages = [{"role": "user", "content": "Go on."}]
while True:
    body = {"messages": messages, "tools": [{"type": "function", "function": tool}]}
    asked = urllib.request.Request("URL/v1/chat/completions", json.dumps(body).encode())
    said = json.load(urllib.request.urlopen(asked))["choices"][0]["message"]
    if not said.get("tool_calls"):
        break
    said["content"] = "my own words"
    answer = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "x"}
    messages += [said, answer]
"""


@dataclass(frozen=True)
class Toy:
    """A harness that is a shell command; `URL` in it is the model's."""

    command_line: str
    name: str = "toy"

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        return ()

    def command(self, instruction: str, endpoint: Endpoint) -> Command:
        return Command(argv=("/bin/sh", "-c", self.command_line), stdin=ASK.replace("URL", endpoint.url).encode())

    def ended(self, result: ExecResult) -> End:
        return End(error=None if result.code == 0 else result.stderr.decode())


@pytest.fixture
def drill(tmp_path: Path) -> Drill:
    renderer = Renderer.load(smoke.POLICY)
    return Drill(sandbox=Bubblewrap(), cache=tmp_path, base=lay_out(tmp_path), renderer=renderer, timeout_s=30)


async def _toy(drill: Drill, command_line: str) -> Drilled:
    return await drill.run(Toy(command_line), (Shell("ls"), Finish()), "Go on.")


async def test_a_quiet_program_reaches_for_nothing_and_leaves_nothing(drill: Drill) -> None:
    run = await _toy(drill, "true")
    assert run.cost.outbound == 0 and run.left == () and run.cost.cpu_s < 0.2 and run.end == End()


async def test_a_look_up_of_a_name_is_an_outbound_try(drill: Drill) -> None:
    assert (await _toy(drill, "getent hosts example.invalid || true")).cost.outbound > 0


async def test_what_a_program_leaves_running_is_named(drill: Drill) -> None:
    assert (await _toy(drill, "sleep 60 & sleep 1")).left == ("sleep",)  # by then it has its name


async def test_seconds_and_memory_are_those_of_the_whole_process_tree(drill: Drill) -> None:
    burn = "import time; x = bytearray(200 << 20); t = time.process_time()\nwhile time.process_time() - t < 1: pass"
    run = await _toy(drill, f"python3 -c '{burn}' & wait")
    assert 0.9 < run.cost.cpu_s < 2.5 and 190 < run.cost.memory_mib < 400


async def test_a_harness_with_words_of_its_own_is_told_by_its_row(drill: Drill) -> None:
    run = await _toy(drill, "python3 -")
    row = dict(zip(COLUMNS, verdict(run, run).cells, strict=True))
    assert row["speaks"] == "chat/completions" and row["turns"] == "2" and row["retells"] == "text changed"
    assert row["drift"] == "edited 1, first 1" and row["segments"] == "2"
    assert row["trainable"] == "100.0%" and share(run.session) == 1.0
    (fault, *_) = verdict(run, run).faults
    assert "the one-line fix is not what was changed" in fault


async def test_a_sampled_token_that_is_in_no_account_is_a_fault(drill: Drill) -> None:
    run = await _toy(drill, "python3 -")
    assert not any("sampled" in fault for fault in verdict(run, run).faults)
    run.engine.sampled.append(3)
    (fault,) = {fault.partition(": ")[2] for fault in verdict(run, run).faults if "sampled" in fault}
    total = sum(run.engine.sampled)
    assert fault == f"{total} tokens were sampled, {total - 3} are trained and 0 excluded for a cause"


async def test_a_try_to_reach_something_else_than_the_model_is_a_fault(drill: Drill) -> None:
    run = await _toy(drill, "getent hosts example.invalid; true")
    assert f"plain run: {run.cost.outbound} tries to reach something else than the model" in verdict(run, run).faults


def test_only_the_fix_and_nothing_else_solves_the_exercise() -> None:
    fix = Change(path=Path("calc.py"), kind="file", content=FIXED)
    cached = Change(path=Path("__pycache__/calc.pyc"), kind="file")
    assert solved((fix, cached)) and not solved((fix, Change(path=Path("README.md"), kind="deleted")))
    assert not solved(())


def _row(name: str, first: str = "a | b") -> Verdict:
    return Verdict(cells=(name, first, *(["x"] * (len(COLUMNS) - 2))))


def test_rows_are_written_between_the_marks_and_those_of_other_harnesses_stay() -> None:
    page = f"# Harnesses\n\n{BEGIN}\n{END}\n\nThe end.\n"
    page = written(page, [_row("pi"), _row("codex", "old")])
    page = written(page, [_row("codex", "new")])
    assert page == f"# Harnesses\n\n{BEGIN}\n{table([_row('codex', 'new'), _row('pi')])}{END}\n\nThe end.\n"


def test_a_page_without_marks_is_left_alone() -> None:
    with pytest.raises(UsageError, match="no lines '<!-- python -m lego"):
        written("# Harnesses\n", [])


@pytest.mark.parametrize(
    ("argv", "message"),
    [(["pi", "--cache", "CACHE"], "python -m harnesses.fetch pi"), (["pi", "--write", "no-page"], "No such file")],
)
def test_what_cannot_be_run_is_one_line_and_status_two(
    argv: Sequence[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert smoke.main([word.replace("CACHE", str(tmp_path)) for word in argv]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.harness
def test_a_real_harness_gets_a_row_without_faults(capsys: pytest.CaptureFixture[str]) -> None:
    fetch(Pi(), DEFAULT_CACHE)
    assert smoke.main(["pi"]) == 0
    told = capsys.readouterr()
    assert told.err == "pi is done\n"
    (row,) = told.out.splitlines()[2:]
    assert row.startswith("| pi ") and "| 100.0% " in row and "arguments respelled" in row
