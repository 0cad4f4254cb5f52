"""The command line that rebuilds recorded sessions."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lego.capture.recording import read, write
from lego.errors import UsageError
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
    assert "changed.npz: 4 differences\n  turn 4: parent was 3, is " in told and "turn 4: token " in told
    assert "codex.npz: the same tree" in told


def test_a_file_that_is_no_session_is_a_usage_error(model, tmp_path):
    (tmp_path / "x.npz").write_bytes(b"no")
    with pytest.raises(UsageError, match=r"x\.npz is no session file"):
        main([str(tmp_path / "x.npz"), "--model", model])


def test_a_recorded_model_that_is_gone_is_named():
    with pytest.raises(UsageError, match="tiny"):
        main([str(CODEX)])


def test_help_answers_at_once():
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "lego.replay", "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--model" in done.stdout and time.monotonic() - start < 3
