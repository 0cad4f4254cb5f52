"""The rehearsal's small shell does what the real one does for the two commands the explorer knows."""

import subprocess
from pathlib import Path

import pytest

from lego.tasks.mutate import Edit
from tools.demo_policy.explorer import Place, edit_command, view_command
from tools.demo_policy.simulate import Problem, Trial

VIEW = ("def f(a, b):", "    if not a < b and a < 3:", "        return 1", "    return b")
PLACE = Place("pkg/m.py", "f", 3, VIEW, 4)


def trial() -> Trial:
    return Trial(Problem(PLACE, VIEW, "test_f", frozenset(PLACE.edits())), [], VIEW)


def real(folder: Path, command: str) -> str:
    return subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "m.py").write_text("import x\n\n" + "\n".join(VIEW) + "\n")
    return tmp_path


def test_a_look_prints_what_nl_and_sed_print(folder: Path) -> None:
    command = view_command("pkg/m.py", 3)
    assert trial().run(command) == (real(folder, command), 0)


@pytest.mark.parametrize("edit", [*PLACE.edits(), Edit(4, " < ", " <= "), Edit(5, " or ", " and "), Edit(99, "a", "b")])
def test_an_edit_leaves_what_sed_leaves(folder: Path, edit: Edit) -> None:
    command = edit_command("pkg/m.py", edit)
    mine = trial()
    assert mine.run(command) == (real(folder, command), 0)
    assert (folder / "pkg" / "m.py").read_text().split("\n")[2:-1] == list(mine.view)


def test_a_fix_counts_only_with_an_answer_at_the_end() -> None:
    bug = Edit(4, "if not ", "if ")
    broken = PLACE.after(bug)
    mine = Trial(Problem(broken, VIEW, "test_f", frozenset(broken.edits())), [], broken.view)
    mine.run(edit_command("pkg/m.py", Edit(4, "if ", "if not ")))
    assert mine.applied and not mine.solved
    mine.ended = True
    assert mine.solved


def test_another_command_fails_and_changes_nothing() -> None:
    mine = trial()
    assert mine.run("rm -rf pkg")[1] != 0 and mine.view == VIEW
