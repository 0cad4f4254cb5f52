"""A journal tells, after any death, what a run has behind it."""

from pathlib import Path

import pytest

from lego.errors import UsageError
from lego.journal import Begun, Ended, Journal, read
from lego.observe.interval import Rate


def some(folder: Path) -> Journal:
    journal = Journal(folder)
    journal.run({"recipe": "a"})
    for group in range(4):
        journal.begin(group, f"task-{group}", 0, version=0)
    for group, drop in ((0, None), (2, "flat"), (1, None)):
        journal.end(group, Ended(version=0, drop=drop, solved=1, asked=2, replaced=drop is not None))
    journal.step(0, [0])
    journal.lost("step-2", "heldout", "the weights are gone")
    journal.measured("start", "heldout", Rate(1, 4))
    return journal


def test_what_is_read_again_is_what_was_told(tmp_path: Path):
    past = some(tmp_path).past
    assert read(tmp_path / "journal.jsonl") == past
    assert past.identity == {"recipe": "a"}
    assert past.begun[1] == Begun(task="task-1", visit=0)
    assert past.ended[2] == Ended(version=0, drop="flat", solved=1, asked=2, replaced=True)
    assert past.steps == [(0,)]
    assert past.measured == {("start", "heldout"): Rate(1, 4)} and past.lost == {("step-2", "heldout")}
    assert not past.finished


def test_each_group_is_used_waiting_or_run_again(tmp_path: Path):
    past = some(tmp_path).past
    assert past.consumed == {0, 2}
    assert past.waiting() == [1]
    assert past.unfinished() == [3]
    assert past.next_group == 4


def test_a_new_run_has_no_past(tmp_path: Path):
    past = Journal(tmp_path).past
    assert (past.steps, past.waiting(), past.unfinished(), past.next_group) == ([], [], [], 0)


@pytest.mark.parametrize("cut", range(2, 40, 7))
def test_a_line_that_a_crash_cut_off_did_not_happen(tmp_path: Path, cut: int):
    some(tmp_path)
    path = tmp_path / "journal.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    journal = Journal(tmp_path)
    assert journal.past.measured == {}
    journal.step(1, [1])
    assert read(path).steps == [(0,), (1,)]


def test_a_step_out_of_order_or_another_format_is_refused(tmp_path: Path):
    some(tmp_path)
    path = tmp_path / "journal.jsonl"
    text = path.read_text()
    path.write_text(text + '{"kind": "step", "step": 5, "groups": []}\n')
    with pytest.raises(UsageError, match="step 5 after 1 steps"):
        read(path)
    path.write_text(text.replace('"format": 1', '"format": 9'))
    with pytest.raises(UsageError, match="format 9, wanted 1"):
        read(path)


@pytest.mark.parametrize(
    "gone",
    ['"kind": "begin", "group": 1', '"kind": "end", "group": 0'],
    ids=["begin of a group that ended", "used end"],
)
def test_a_journal_that_lost_a_line_which_others_need_is_refused(tmp_path: Path, gone: str):
    path = some(tmp_path).path
    kept = [line for line in path.read_text().splitlines(keepends=True) if gone not in line]
    path.write_text("".join(kept))
    with pytest.raises(UsageError, match="wanted one"):
        read(path)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ('"first": 0', '"first": "0"'),
        ('"identity": {"recipe": "a"}', '"identity": "recipe"'),
        ('"group": 3', '"group": "3"'),
        ('"visit": 0', '"visit": null'),
        ('"solved": 1', '"solved": 9'),
        ('"hits": 1', '"hits": true'),
        ('"groups": [0]', '"groups": 0'),
    ],
)
def test_a_value_that_nobody_writes_is_refused_when_it_is_read(tmp_path: Path, right: str, wrong: str):
    path = some(tmp_path).path
    text = path.read_text()
    assert right in text
    path.write_text(text.replace(right, wrong))
    with pytest.raises(UsageError, match="no journal of this program"):
        read(path)


def test_steps_are_counted_on_from_the_first(tmp_path: Path):
    journal = Journal(tmp_path)
    journal.run({"recipe": "a"}, first=7)
    journal.step(7, [])
    assert read(journal.path).done == 8


def test_other_tasks_than_before_are_refused(tmp_path: Path):
    journal = some(tmp_path)
    journal.tasks("abc")
    Journal(tmp_path).tasks("abc")
    with pytest.raises(UsageError, match=r"tasks: .*digest abd, then abc"):
        Journal(tmp_path).tasks("abd")
