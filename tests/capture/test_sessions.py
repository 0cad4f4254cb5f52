"""Recorded runs of real harnesses: the tree they made is the tree they make."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harnesses.codex import Codex
from lego.capture.again import again, differences
from lego.capture.audit import audit
from lego.capture.recording import read, record
from lego.records import Drift
from tests.capture.stage import CASTS, SESSIONS, perform

FILES = sorted(SESSIONS.glob("*.npz"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recorded_run_makes_the_same_tree(path: Path, renderer):
    recording = read(path)
    session = asyncio.run(again(recording, renderer))
    assert list(differences(recording, session, renderer.decode)) == []
    assert len(session.turns) == 5 and {turn.drift for turn in session.turns} <= {Drift.FIRST, Drift.NONE}
    (segment,) = session.segments()
    assert segment.mask_T.sum() == session.fidelity().sampled == session.fidelity().trained


def test_every_harness_that_can_be_run_here_has_a_recording():
    assert {path.stem for path in FILES} == set(CASTS)


@pytest.mark.harness
@pytest.mark.parametrize("name", CASTS)
async def test_a_real_harness_makes_one_path_and_its_recording_the_same_tree(name: str, renderer, tmp_path: Path):
    (tmp_path / "a.py").write_text("bug = 1\n")
    handle, end = await perform(CASTS[name], renderer, tmp_path)
    session = handle.session
    assert end.error is None and [turn.rejected for turn in session.turns] == [None] * 5
    (segment,) = session.segments()
    assert segment.mask_T.sum() == session.fidelity().sampled
    recording = record(session, renderer)
    assert list(differences(recording, await again(recording, renderer), renderer.decode)) == []


@pytest.mark.harness
@pytest.mark.parametrize(("beat_s", "arrives"), [(0.5, True), (60, False)])
async def test_beats_keep_codex_waiting_beyond_its_patience(beat_s: float, arrives: bool, renderer, tmp_path: Path):
    (tmp_path / "a.py").write_text("bug = 1\n")
    cast = replace(CASTS["codex"], harness=Codex(silence_s=2, retries=0))
    answers = ["It is done.<|im_end|>"]
    handle, end = await perform(cast, renderer, tmp_path, answers, delay_s=4, beat_s=beat_s)
    assert [turn.rejected for turn in handle.session.turns] == [None if arrives else "cancelled"]
    assert (end.error is None) == arrives


def test_the_audit_counts_what_is_sent_again(renderer):
    session = asyncio.run(again(read(FILES[0]), renderer))
    found = audit(session, lambda messages, tools, ids: None)
    sizes = [len(turn.prompt_ids) + len(turn.generation.output_ids) for turn in session.turns]
    assert found.prompt_tokens == sum(len(turn.prompt_ids) for turn in session.turns)
    assert found.resent_tokens == sum(sizes[:-1])
    assert found.fidelity.drift == {"first": 1, "none": 4}


def test_the_audit_checks_the_whole_conversation_of_each_path(renderer):
    session = asyncio.run(again(read(FILES[0]), renderer))
    checked = []

    def difference(messages, tools, ids):
        checked.append((messages, tools, ids))
        return "not the same"

    (found,) = audit(session, difference).differences
    assert found.endswith("turn 4: not the same")
    ((messages, tools, ids),) = checked
    last = session.turns[-1]
    assert np.array_equal(ids, np.concatenate([last.prompt_ids, last.generation.output_ids]))
    assert messages[-1] == session.answers[4].message and tools == session.plan_of(4).history.tools
