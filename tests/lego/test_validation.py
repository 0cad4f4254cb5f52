"""A validation that is due is made, or it is told once that it never will be."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lego.journal import Journal
from lego.observe.account import Account
from lego.observe.interval import Rate
from lego.observe.memory import PeakMemory
from lego.observe.outputs import Outputs
from lego.observe.store import open_run
from lego.observe.terminal import View
from lego.validation import Validator
from tests.loop_driver import recipe, tasks


@contextmanager
def opened(folder: Path, heldout: int = 2) -> Iterator[Validator]:
    nobody: Any = None
    with open_run(folder) as store:
        out = Outputs(store=store, view=View("test", Console(file=StringIO())), account=Account(PeakMemory()))
        yield Validator(
            recipe=recipe(steps=9, validate=2), tasks=tasks(3, heldout), pool=nobody, open_trials=nobody, out=out,
            journal=Journal(folder),
        )  # fmt: skip


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_versions_between_start_and_end_are_due_until_they_have_a_rate(tmp_path: Path):
    with opened(tmp_path) as validator:
        validator.journal.run({"test": 1}, first=2)
        validator.journal.measured("step-6", "heldout", Rate(0, 0))
        assert list(filter(validator.is_due, range(12))) == [4, 8]
    with opened(tmp_path, heldout=0) as validator:
        assert not any(map(validator.is_due, range(12)))


def test_a_validation_of_weights_that_are_gone_is_told_once_and_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    Journal(tmp_path).run({"test": 1})
    for _ in range(2):
        with opened(tmp_path) as validator, caplog.at_level(logging.WARNING):
            validator.journal.past.measured["step-2", "heldout"] = Rate(1, 4)
            validator.give_up(6)
    (told,) = events(tmp_path)
    assert told["kind"] == "validation_lost" and told["version"] == 4
    assert told["reason"].endswith("goes on from the checkpoint of version 6")
    assert caplog.text.count("version 4 will have no validation: it was not done when the run ended") == 1
    with opened(tmp_path) as validator:
        assert validator.journal.past.lost == {("step-4", "heldout")}
        assert not validator.is_due(4) and validator.is_due(6)
