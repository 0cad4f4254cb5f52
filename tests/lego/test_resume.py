"""The same command goes on where a run was left; anything else is refused, and nothing is told twice."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lego.cli import load_recipe
from lego.errors import UsageError
from lego.journal import Ended, Journal, occupied
from lego.observe.interval import Rate
from lego.observe.store import open_run
from lego.resume import claimed, home, identity, open_journal, unfinished
from lego.rollout.stored import Stored
from tests.factories import trajectory

DEMO = load_recipe(Path(__file__).parent.parent.parent / "recipes" / "demo.py")


def test_what_may_change_between_two_lives_is_not_part_of_a_run():
    longer = replace(DEMO, steps=99, rollout=replace(DEMO.rollout, concurrency=1), run_dir=Path("elsewhere"))
    assert identity(longer) == identity(DEMO)
    other = replace(DEMO, rollout=replace(DEMO.rollout, group_size=4))
    assert identity(other) != identity(DEMO)


def test_identity_outlives_the_disk(tmp_path: Path):
    open_journal(tmp_path, identity(DEMO), 0)
    assert Journal(tmp_path).past.identity == identity(DEMO)
    assert open_journal(tmp_path, identity(DEMO), 0).past.done == 0


def test_another_recipes_folder_is_refused_with_what_differs(tmp_path: Path):
    open_journal(tmp_path, identity(DEMO), 0)
    other = replace(DEMO, rollout=replace(DEMO.rollout, group_size=4), seed=5)
    with pytest.raises(UsageError, match=r"another recipe's run: rollout\.group_size: 8, now 4; seed: 0, now 5"):
        open_journal(tmp_path, identity(other), 0)


def test_a_folder_with_something_else_or_a_finished_run_is_refused(tmp_path: Path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "file").touch()
    with pytest.raises(UsageError) as refused:
        open_journal(tmp_path / "old", {"a": 1}, 0)
    (told,) = [p for p in replace(DEMO, run_dir=tmp_path / "old").problems() if p.startswith("run_dir")]
    assert told == str(refused.value) and "is not empty (file), wanted a new or empty folder" in told
    (tmp_path / "done").mkdir()
    open_journal(tmp_path / "done", {"a": 1}, 0).finish()
    with pytest.raises(UsageError, match="holds a finished run"):
        open_journal(tmp_path / "done", {"a": 1}, 0)


def test_a_folder_in_which_no_run_began_is_one_to_begin_in(tmp_path: Path):
    for name in ("lock", "journal.jsonl"):
        assert occupied(tmp_path / "none") is None is occupied(tmp_path)
        (tmp_path / name).touch()
    assert open_journal(tmp_path, {"a": 1}, 0).past.identity == {"a": 1}
    (tmp_path / "other.txt").touch()
    assert list(replace(DEMO, run_dir=tmp_path).problems()) == []


def test_a_folder_belongs_to_one_process_at_a_time(tmp_path: Path):
    hold = "import sys; from pathlib import Path; from lego.resume import claimed\n"
    hold += "with claimed(Path(sys.argv[1])): print('in', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(UsageError, match="in use by another process"), claimed(tmp_path):
            pass
        other.kill()
    with claimed(tmp_path):
        pass


def test_a_place_that_cannot_be_written_is_one_clear_message(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="run_dir"), claimed(tmp_path / "file" / "run"):
        pass


def test_the_newest_unfinished_run_of_the_same_recipe_is_gone_on_with(tmp_path: Path):
    for name, wanted in (("demo-1", {"a": 1}), ("demo-2", {"a": 1}), ("demo-3", {"a": 2}), ("demo-4", {"a": 1})):
        (tmp_path / name).mkdir()
        journal = open_journal(tmp_path / name, wanted, 0)
        if name == "demo-4":
            journal.finish()
    (tmp_path / "demo-5").mkdir()
    assert unfinished(tmp_path, "demo", {"a": 1}) == tmp_path / "demo-2"
    with claimed(tmp_path / "demo-2"):
        script = "import sys; from pathlib import Path; from lego.resume import unfinished\n"
        script += "print(unfinished(Path(sys.argv[1]), 'demo', {'a': 1}).name)"
        found = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert found.stdout.strip() == "demo-1", found.stderr
    assert unfinished(tmp_path, "other", {"a": 1}) is None


def test_a_run_is_not_gone_on_with_to_fewer_steps_than_it_has_or_if_a_fresh_one_is_wanted(tmp_path: Path):
    (tmp_path / "demo-1").mkdir()
    journal = open_journal(tmp_path / "demo-1", identity(DEMO), 0)
    for step in range(3):
        journal.step(step, [])
    there = tmp_path / "demo-1"
    for steps in (3, 4):
        assert home(replace(DEMO, steps=steps), tmp_path, "demo", "2") == there
    with pytest.raises(UsageError, match=r"^steps: 2, wanted 3 or more"):
        home(replace(DEMO, steps=2), tmp_path, "demo", "2")
    with pytest.raises(UsageError, match=r"^steps: 2, wanted 3 or more"):
        home(replace(DEMO, steps=2, run_dir=there), tmp_path / "none", "demo", "2")
    assert home(replace(DEMO, steps=2, fresh=True), tmp_path, "demo", "2") == tmp_path / "demo-2"
    assert home(replace(DEMO, run_dir=tmp_path / "new", fresh=True), tmp_path, "demo", "2") == tmp_path / "new"
    with pytest.raises(UsageError, match=r"^run_dir: .*demo-1 holds a run"):
        home(replace(DEMO, run_dir=there, fresh=True), tmp_path, "demo", "2")


def test_a_damaged_run_is_passed_over_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    for name, text in (("demo-2", "[1]\n"), ("demo-3", '{"kind": "step", "step": 4, "groups": []}\n')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "journal.jsonl").write_text(text)
    assert unfinished(tmp_path, "demo", {"a": 1}) is None
    assert "demo-2" in caplog.text and "demo-3" in caplog.text
    (tmp_path / "demo-1").mkdir()
    open_journal(tmp_path / "demo-1", {"a": 1}, 0)
    assert unfinished(tmp_path, "demo", {"a": 1}) == tmp_path / "demo-1"


def test_an_error_while_a_folder_is_claimed_is_not_taken_for_another_process(tmp_path: Path):
    with pytest.raises(BlockingIOError), claimed(tmp_path):
        raise BlockingIOError("fork: no more processes")


def test_what_did_not_come_to_its_end_is_taken_out_of_the_files(tmp_path: Path):
    journal = open_journal(tmp_path, {"a": 1}, 0)
    stored = Stored(folder=tmp_path / "groups")
    with open_run(tmp_path) as store:
        for group in (0, 1, 2):
            store.trial(replace(trajectory("t", 1.0), group=group))
            stored.write(group, [trajectory("t", 1.0)])
        store.trial(trajectory("t", 1.0), "start/heldout")
        store.trial(trajectory("t", 1.0), "end/heldout")
        for moment in ("start", "end"):
            store.event("measured", moment=moment, split="heldout", seconds=1.0)
        for step in (0, 1):
            store.metrics(step, {"a": 0.5})
    for group in (0, 1):
        journal.begin(group, "t", 0, version=0)
        journal.end(group, Ended(version=0, drop=None, solved=1, asked=1, replaced=False))
    journal.step(0, [0])
    journal.measured("start", "heldout", Rate(1, 1))
    open_journal(tmp_path, {"a": 1}, 0)
    trials = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert [(t["group"], t["measurement"]) for t in trials] == [(0, ""), (1, ""), (None, "start/heldout")]
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [0]
    assert (tmp_path / "events.jsonl").read_text().count("measured") == 1
    assert sorted(path.name for path in stored.folder.iterdir()) == ["000000.safetensors", "000001.safetensors"]


@pytest.mark.parametrize(
    ("name", "line"),
    [("trials", '{"a": 1}'), ("metrics", '{"step": "a"}'), ("events", '{"kind": "measured"}'), ("metrics", "[]")],
)
def test_lines_that_nobody_writes_are_refused_and_stay(tmp_path: Path, name: str, line: str):
    open_journal(tmp_path, {"a": 1}, 0)
    file = tmp_path / f"{name}.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(UsageError, match=rf"{name}\.jsonl"):
        open_journal(tmp_path, {"a": 1}, 0)
    assert file.read_text() == line + "\n"


def test_curves_of_steps_that_are_done_again_are_read_once(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, values in ((0, (0.1, 0.2, 0.3)), (2, (0.5, 0.6))):
        with open_run(tmp_path, first) as store:
            for step, value in enumerate(values, first):
                store.metrics(step, {"rate": value})
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(e.step, round(e.value, 3)) for e in read.Scalars("rate")] == [(0, 0.1), (1, 0.2), (2, 0.5), (3, 0.6)]
