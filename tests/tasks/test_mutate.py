"""The edit catalogue agrees with the real sed, and with Python about what compiles."""

import subprocess
from pathlib import Path

import pytest

from lego.tasks import mutate
from lego.tasks.mutate import EDITS, Edit

SOURCE = '''\
import os


def clamp(x, lower, upper):
    """Keep x == x, not above 0 and not below 1."""
    if x < lower and not upper:  # and if x == 0
        return lower
    label = "a < b or c"
    return min(x + 10, upper) if x is not None else x[0]


class Box:
    @property
    def size(self):
        for item in self.items:
            if item not in self.seen:
                continue
        return self.a < self.b or self.text == " < "

    async def wait(self):
        return not await self.done(0.5, 1)


def long(x):
    a = 1
    b = 2
    c = 3
    d = 4
    e = 5
    f = 6
    g = 7
    h = 8
    i = 9
    j = 10
    k = 11
    l = 12
    return a + b
'''
LINES = SOURCE.split("\n")


def function(name: str) -> mutate.Function:
    return next(f for f in mutate.functions(SOURCE, "m.py") if f.name == name)


def edits(name: str) -> set[Edit]:
    return set(mutate.candidates(LINES, function(name)))


def test_functions_and_methods_that_fit_a_view_are_listed_with_the_line_of_their_def():
    listed = [(f.name, LINES[f.line - 1].strip().split("(")[0]) for f in mutate.functions(SOURCE, "m.py")]
    assert listed == [("clamp", "def clamp"), ("size", "def size"), ("wait", "async def wait")]


def test_no_token_means_anything_to_sed_a_shell_quote_or_json():
    assert not {c for pair in EDITS for token in pair for c in token} & set("[*.^$\\/&'\"\n")
    assert all((new, old) in EDITS for old, new in EDITS)


def test_comments_strings_and_docstrings_are_not_edited():
    assert {e.line for e in edits("clamp")} == {6, 7, 9}
    assert Edit(6, " == ", " != ") not in edits("clamp")


def test_the_first_occurrence_on_the_line_decides():
    assert Edit(18, " < ", " <= ") in edits("size")
    assert Edit(9, " 1", " 0") not in edits("clamp")  # sed would make 10 into 00


def test_an_edit_that_does_not_compile_is_left_out():
    assert Edit(15, " in ", " not in ") not in edits("size")
    assert Edit(17, "continue", "break") in edits("size")


def test_a_token_is_not_doubled():
    assert Edit(9, " is ", " is not ") not in edits("clamp")
    assert Edit(9, " is not ", " is ") in edits("clamp")


def test_an_edit_of_a_line_without_its_token_is_an_error():
    with pytest.raises(ValueError, match="line 1 "):
        mutate.apply(SOURCE, Edit(1, " < ", " <= "))


@pytest.mark.parametrize("name", ["clamp", "size", "wait"])
def test_apply_does_what_sed_does_and_compiles(name: str, tmp_path: Path):
    path = tmp_path / "m.py"
    assert edits(name)
    for edit in edits(name):
        path.write_text(SOURCE)
        subprocess.run(["sed", "-i", f"{edit.line}s/{edit.old}/{edit.new}/", str(path)], check=True)
        assert path.read_text() == mutate.apply(SOURCE, edit)
        compile(path.read_text(), "m.py", "exec")
