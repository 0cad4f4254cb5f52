"""Everything that goes wrong on the way, with the real programs: the right end, and every sampled token accounted for.

The default run tries three of them. Others by name, or `all`:

    pytest -m harness tests/harnesses/test_chaos.py --chaos cline,opencode,qwen
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest

from harnesses.base import Harness
from harnesses.fetch import DEFAULT_CACHE, fetch
from harnesses.known import KNOWN
from lego.chat.render import Renderer
from lego.drill.exercise import EDIT, LIST, TASK, WORK, lay_out, solved
from lego.drill.script import Finish, Late, Malformed, Sampled, Shell, Step, Unknown
from lego.drill.stage import Drill, Drilled
from lego.records import Outcome
from lego.smoke import POLICY
from sandbox.bubble import Bubblewrap
from tests.harnesses.chaos import Cut, Held, Status, check, disturbed

pytestmark = pytest.mark.harness
LONG = Sampled("I think about what there is to do here, and go on to think. " * 12)
NOISE = Shell("seq 1 900")
OUTPUT = 700
COMPACTS = {"codex": 800, "claude": 13_600, "opencode": 800, "cline": 1650, "qwen": 1500, "terminus": 7500}
"""Tokens of context beyond the first prompt and an answer with which a history of 1000 more is compacted."""
RECOVERS = {"cline", "opencode", "openhands", "qwen", "terminus"}
"""They shorten a history that was refused as too long; the others' run ends, Claude's as its summary has no room."""
WHOLE = {"mini", "openhands", "terminus"}
"""They want the answer in one piece, so nothing can be sent before it."""
REWORDED = {
    "mini": "tells the model in words of its own that its call was bad, and nothing of the call",
    "terminus": "has no tools, and so no place for a call in the history",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        asked = str(metafunc.config.getoption("--chaos"))
        able = APPLIES.get(metafunc.function.__name__, KNOWN)
        metafunc.parametrize("name", [name for name in (KNOWN if asked == "all" else asked.split(",")) if name in able])


def _drift(name: str) -> dict[str, int]:
    """That of a run in which nothing is lost; Terminus is asked whether it is really done."""
    return {"first": 1, "none": len(WORK) - (name != "terminus")}


@pytest.fixture
def drill(name: str, tmp_path: Path) -> Drill:
    return Drill(
        sandbox=Bubblewrap(),
        cache=DEFAULT_CACHE,
        base=lay_out(tmp_path),
        renderer=Renderer.load(POLICY),
        max_turns=sum(_drift(name).values()),
    )


def _harness(name: str, **settings: object) -> Harness:
    """The harness with those of these settings that it has."""
    harness = KNOWN[name]()
    fetch(harness, DEFAULT_CACHE)
    has = {field.name for field in fields(harness)}
    return replace(harness, **{field: value for field, value in settings.items() if field in has})


async def _run(drill: Drill, harness: Harness, script: Sequence[Step]) -> Drilled:
    run = await drill.run(harness, script, TASK)
    check(run)
    assert not run.left
    return run


def _fixed(run: Drilled) -> None:
    assert run.end.error is None and run.session.breach is None, (run.end, run.result)
    assert solved(run.changes)


async def test_failed_requests_are_tried_again_and_are_no_turns(name: str, drill: Drill) -> None:
    line = disturbed(None, Status(500), Status(503), Status(429, {"Retry-After": "1"}))
    run = await _run(replace(drill, serve=line), _harness(name), WORK)
    _fixed(run)
    assert run.session.fidelity().drift == _drift(name) and not run.session.excluded()


async def test_a_cut_answer_is_sampled_again_and_only_the_whole_one_is_trained(name: str, drill: Drill) -> None:
    drill = replace(drill, serve=disturbed(None, Cut(6)), chunk_seconds=0.02)
    run = await _run(drill, _harness(name), (LIST, LONG, EDIT, Finish()))
    _fixed(run)
    assert set(run.session.excluded()) == {1} and run.session.turns[1].rejected in ("cancelled", "undelivered")


async def test_calls_that_cannot_be_run_are_told_to_the_model_and_stay_in_the_history(name: str, drill: Drill) -> None:
    drill = replace(drill, max_turns=drill.max_turns + 2)
    run = await _run(drill, _harness(name), (Malformed(), Unknown(), *WORK))
    _fixed(run)
    assert (len(run.session.segments()) == 1) is (name not in REWORDED) and not run.session.excluded()


async def test_an_empty_answer_ends_the_run_or_is_asked_for_again(name: str, drill: Drill) -> None:
    drill = replace(drill, max_turns=10)
    run = await _run(drill, _harness(name), (LIST, EDIT, Sampled(""), Finish()))
    _fixed(run)


async def test_a_full_context_is_an_outcome_and_what_was_sampled_before_stays(name: str, drill: Drill) -> None:
    # Refused, qwen-code compacts its history to 4,400 tokens less than its first prompt, which would do.
    drill = replace(drill, serve=disturbed(room=-6000 if name == "qwen" else 1000), max_turns=10)
    run = await _run(drill, _harness(name, compact=False), (NOISE, NOISE, EDIT, Finish()))
    assert run.session.breach is not None and run.session.breach.outcome is Outcome.CONTEXT_EXCEEDED
    assert run.session.turns[0].index not in run.session.excluded()


async def test_a_harness_that_shortens_a_refused_history_goes_on(name: str, drill: Drill) -> None:
    drill = replace(drill, serve=disturbed(room=2300), max_turns=10)
    run = await _run(drill, _harness(name), (Shell("seq 1 500"), Shell("seq 2 700"), LIST, EDIT, Finish()))
    assert run.end.error is None and solved(run.changes)
    assert run.session.journal.refusals and len(run.session.segments()) >= 2 and not run.session.excluded()


async def test_a_forced_compaction_is_a_segment_of_its_own(name: str, drill: Drill) -> None:
    harness = _harness(name)
    first = await drill.run(harness, (Finish(),), TASK)
    room = len(first.session.turns[0].prompt_ids) + OUTPUT + COMPACTS[name]
    drill = replace(drill, context_tokens=room, output_tokens=OUTPUT, max_turns=10)
    run = await _run(drill, harness, (Shell("seq 1 500"), LIST, EDIT, Finish()))
    _fixed(run)
    assert len(run.session.segments()) >= 2 and not run.session.excluded()
    assert run.session.fidelity().kinds["summary"] >= 1


async def test_signs_of_life_keep_a_harness_waiting_beyond_its_patience(name: str, drill: Drill) -> None:
    drill = replace(drill, beat_s=0.3)
    run = await _run(drill, _harness(name, silence_s=2), (LIST, Late(5.0, EDIT), Finish()))
    _fixed(run)
    assert run.session.fidelity().drift == _drift(name) and not run.session.excluded()


async def test_an_answer_that_nobody_waited_for_is_no_turn(name: str, drill: Drill) -> None:
    # Codex waits for ever for a first byte, but not for the event after it; others the other way round.
    drill = replace(drill, beat_s=60.0) if name == "codex" else replace(drill, serve=disturbed(None, Held(30.0)))
    run = await _run(drill, _harness(name, silence_s=2), (LIST, Late(20.0, EDIT), EDIT, Finish()))
    _fixed(run)
    assert set(run.session.excluded()) == {1}


PATIENT = {name for name, kind in KNOWN.items() if "silence_s" in {field.name for field in fields(kind)}}
"""Harnesses whose patience is a setting."""
APPLIES: Mapping[str, Collection[str]] = {
    test_a_forced_compaction_is_a_segment_of_its_own.__name__: COMPACTS,
    test_a_harness_that_shortens_a_refused_history_goes_on.__name__: RECOVERS,
    test_signs_of_life_keep_a_harness_waiting_beyond_its_patience.__name__: PATIENT - WHOLE,
    test_an_answer_that_nobody_waited_for_is_no_turn.__name__: PATIENT,
}
"""The harnesses that a test is for, where it is not for all."""
