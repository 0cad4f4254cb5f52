"""A two-function package with a bug in each, and its hidden tests, judged in real boxes."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lego.tasks.task import PytestSuite, Task
from sandbox.base import Change
from sandbox.bubble import Bubblewrap
from tests.sandbox.conftest import podman_sandbox  # noqa: F401

SOURCE = """
def largest(numbers):
    return min(numbers)


def double(number):
    return number + number
"""
FIXED = SOURCE.replace("min(", "max(")
TESTS = """
import toy

def test_largest():
    assert toy.largest([1, 3, 2]) == 3

class TestDouble:
    def test_double(self):
        assert toy.double(4) == 8
"""


@pytest.fixture(scope="session")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Bubblewrap:
    return Bubblewrap(state=tmp_path_factory.mktemp("boxes"))


@pytest.fixture(scope="session")
def testenv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed pytest alone, as a build would have it: a larger folder makes each run slower."""
    folder, installed = tmp_path_factory.mktemp("testenv"), Path(pytest.__file__).parent.parent
    for name in ("_pytest", "pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        shutil.copytree(installed / name, folder / name)
    shutil.copy2(installed / "py.py", folder)
    return folder


@pytest.fixture
def toy(tmp_path: Path, testenv: Path) -> Task:
    """Task `toy`: `largest` is broken, `double` is fine."""
    base, tests = tmp_path / "base", tmp_path / "hidden"
    (base / "toy").mkdir(parents=True)
    (base / "toy" / "__init__.py").write_text(SOURCE)
    (tests / "tests").mkdir(parents=True)
    (tests / "tests" / "test_toy.py").write_text(TESTS)
    return Task(
        id="toy",
        package="toy",
        split="train",
        digest="toy-1",
        base=base,
        instruction="toy/__init__.py:2 test_largest fails.",
        verifier=PytestSuite(
            tests=tests,
            test_file="tests/test_toy.py",
            testenv=testenv,
            fail_to_pass=("tests.test_toy::test_largest",),
            pass_to_pass=("tests.test_toy.TestDouble::test_double",),
            cpu_s=3,
            wall_s=30.0,
        ),
    )


def suite_of(task: Task) -> PytestSuite:
    assert isinstance(task.verifier, PytestSuite)
    return task.verifier


def judged_by(task: Task, **changes: Any) -> Task:
    """The task with other fields of its suite."""
    return replace(task, verifier=replace(suite_of(task), **changes))


def changed(path: str, text: str | bytes, kind: str = "file", mode: int = 0o644) -> Change:
    return Change(path=Path(path), kind=kind, content=text if isinstance(text, bytes) else os.fsencode(text), mode=mode)


def fix() -> Change:
    return changed("toy/__init__.py", FIXED)
