"""Tasks from a folder: read whole, digested by content, and refused with file and field."""

import json

import pytest

from lego.errors import UsageError
from lego.tasks.folder import Folder

GIVEN = {
    "package": "toy",
    "split": "train",
    "test_file": "test_toy.py",
    "instruction": "fix it",
    "fail_to_pass": ["test_toy::test_a"],
}


def write(root, name="one", **changes):
    for folder in ("base", "tests"):
        (root / name / folder).mkdir(parents=True)
    (root / name / "base" / "toy.py").write_text("x = 1\n")
    (root / name / "task.json").write_text(json.dumps(GIVEN | changes))
    (root / "testenv").mkdir(exist_ok=True)
    return Folder(path=root, testenv=root / "testenv")


async def build(source):
    return await source.build(None, None, lambda *_: None)


async def test_a_folder_becomes_tasks_with_a_digest_of_their_content(tmp_path):
    source = write(tmp_path)
    (task,) = await build(source)
    assert (task.id, task.verifier.fail_to_pass, task.base) == (
        "one",
        ("test_toy::test_a",),
        (tmp_path / "one/base").resolve(),
    )
    (tmp_path / "one/base/toy.py").write_text("x = 2\n")
    (changed,) = await build(source)
    assert changed.digest != task.digest


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"fail_to_pass": []}, "fail_to_pass"),
        ({"split": "test"}, "split"),
        ({"instrucion": "x"}, "instrucion"),
        ({"testenv": "/x"}, "testenv"),
    ],
)
async def test_a_wrong_field_is_named_with_its_file(tmp_path, changes, told):
    with pytest.raises(UsageError, match=rf"task\.json: .*{told}"):
        await build(write(tmp_path, **changes))


async def test_an_empty_folder_is_one_clear_message(tmp_path):
    with pytest.raises(UsageError, match=r"no NAME/task\.json"):
        await build(Folder(path=tmp_path, testenv=tmp_path))


async def test_a_task_names_the_harness_it_is_for(tmp_path):
    (task,) = await build(write(tmp_path, harness="pi"))
    assert task.harness == "pi"
    (free,) = await build(write(tmp_path / "other"))
    assert free.harness is None


@pytest.mark.parametrize("wrong", ["", 5, ["pi"]])
async def test_a_harness_that_is_no_name_is_named_with_its_file(tmp_path, wrong):
    with pytest.raises(UsageError, match=r"task\.json: .*harness: .*wanted a name"):
        await build(write(tmp_path, harness=wrong))
