"""The command line that rebuilds recorded sessions."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lego.capture.recording import read, write
from lego.replay import main
from tests.tiny import write_model

CODEX = Path(__file__).parents[1] / "capture" / "sessions" / "codex.npz"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model")))


def test_the_same_tree_is_told_with_its_audit(model, capsys):
    assert main([str(CODEX), "--model", model]) == 0
    told = capsys.readouterr().out
    assert f"{CODEX}: the same tree" in told
    assert "5 turns, drift first 1, none 4" in told and "100.0% trainable" in told and "re-sent context" in told
    assert "no chat template" in told


def test_a_difference_is_told_and_the_status_is_1(model, capsys, tmp_path):
    recording = read(CODEX)
    body = recording.origins[-1].body
    shorter = replace(recording.origins[-1], body={**body, "input": body["input"][:-2]})
    changed = replace(recording, origins=(*recording.origins[:-1], shorter))
    write(changed, tmp_path / "changed.npz")
    assert main([str(tmp_path / "changed.npz"), str(CODEX), "--model", model]) == 1
    told = capsys.readouterr().out
    assert (
        "changed.npz: 5 differences\n  trainable tokens" in told
        and "  turn 4: parent was 3, is " in told
        and "turn 4: token " in told
    )
    assert "codex.npz: the same tree" in told


def test_a_file_that_cannot_be_replayed_is_named_and_the_others_are_told(model, tmp_path, capsys):
    (tmp_path / "x.npz").write_bytes(b"no")
    assert main([str(tmp_path / "x.npz"), str(CODEX), "--model", model]) == 2
    told = capsys.readouterr()
    assert "x.npz is no session file of format 1\n" in told.err and f"{CODEX}: the same tree" in told.out
    assert told.out.endswith("1 the same, 0 different, 1 not replayed\n")


def test_a_recorded_model_that_is_gone_is_named(capsys):
    assert main([str(CODEX)]) == 2
    assert capsys.readouterr().err == f"error: {CODEX}: its model folder tiny is gone; name another by --model\n"


def test_a_prompt_that_does_not_fit_any_more_is_told(model, capsys, tmp_path):
    recording = read(CODEX)
    write(replace(recording, limits=replace(recording.limits, context_tokens=100)), tmp_path / "small.npz")
    assert main([str(tmp_path / "small.npz"), "--model", model]) == 1
    assert "call 0 is refused now: prompt of" in capsys.readouterr().out


def test_help_answers_at_once():
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "lego.replay", "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--model" in done.stdout and time.monotonic() - start < 3
