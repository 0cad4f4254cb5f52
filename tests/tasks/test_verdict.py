"""Verdicts in real boxes: what solves, what must not, and what is nobody's failure."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from lego.errors import VerdictError
from lego.records import Outcome
from lego.tasks.task import Task
from lego.tasks.verdict import Grader, grade, is_test_machinery, judged, patch_digest
from sandbox.base import Change
from sandbox.bubble import Bubblewrap
from tests.tasks.conftest import FIXED, SOURCE, changed, fix

CHEAT = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
"""
RAISES = "raise SystemExit('shadowed')\n"


async def test_a_fix_is_solved_and_no_change_is_not(toy: Task, sandbox: Bubblewrap):
    solved, failed = await asyncio.gather(grade(toy, [fix()], sandbox), grade(toy, [], sandbox))
    assert (solved.outcome, solved.reward, solved.missing) == (Outcome.SOLVED, 1.0, ())
    assert set(solved.passed) == set(toy.required)
    assert (failed.outcome, failed.reward) == (Outcome.FAILED, 0.0)
    assert failed.passed == toy.pass_to_pass and failed.missing == toy.fail_to_pass
    assert "AssertionError" in failed.log and failed.seconds > 0


async def test_test_machinery_cannot_make_a_bug_pass(toy: Task, sandbox: Bubblewrap):
    cheats = [
        changed("conftest.py", CHEAT),
        changed("toy/conftest.py", CHEAT),
        changed("evil.py", CHEAT),
        changed("pytest.ini", "[pytest]\naddopts = -p evil --co\n"),
        changed("tests/test_toy.py", "def test_largest(): pass\n"),
        changed("sitecustomize.py", "import os; os._exit(0)\n"),
        changed("toy.pth", "import os; os._exit(0)\n"),
        changed("toy/__pycache__/__init__.cpython-311.pyc", b"x"),
        changed("report.xml", '<testsuites><testcase classname="tests.test_toy" name="test_largest"/></testsuites>'),
    ]
    verdict = await grade(toy, cheats, sandbox)
    assert (verdict.reward, verdict.missing) == (0.0, toy.fail_to_pass)
    assert {str(path) for path in verdict.excluded} == {
        str(c.path) for c in cheats if c.path.name not in ("evil.py", "report.xml")
    }


async def test_a_fix_beside_vandalised_tests_still_counts(toy: Task, sandbox: Bubblewrap):
    vandalism = [
        changed("tests", "/nowhere", kind="symlink"),
        changed("conftest.py", RAISES),
        changed("setup.cfg", "[tool:pytest]\naddopts = --no-such-flag\n"),
        changed("pyproject.toml", "not toml"),
    ]
    verdict = await grade(toy, [fix(), *vandalism], sandbox)
    assert verdict.reward == 1.0 and len(verdict.excluded) == 4


async def test_modules_of_the_repository_do_not_stand_before_pytest_and_the_standard_library(
    toy: Task, sandbox: Bubblewrap
):
    shadows = [changed(name, RAISES) for name in ("pytest.py", "_pytest/__init__.py", "json/__init__.py", "re.py")]
    assert (await grade(toy, [fix(), *shadows], sandbox)).reward == 1.0


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import os; os._exit(0)", "exit status 0"),
        ("import sys; sys.exit(0)", "exit status"),
        ("def largest(:", "SyntaxError"),
        ("import pytest; pytest.skip('no', allow_module_level=True)", "exit status"),
        ("while True: pass", "exit status 152"),
        ("x = 'x' * (1 << 31)", "MemoryError"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "exit status 139"),
    ],
)
async def test_code_that_breaks_the_tests_is_a_failure(toy: Task, sandbox: Bubblewrap, source: str, told: str):
    verdict = await grade(replace(toy, tests_cpu_s=1), [changed("toy/__init__.py", source + FIXED)], sandbox)
    assert (verdict.outcome, verdict.reward) == (Outcome.FAILED, 0.0)
    assert told in verdict.log
    assert set(verdict.missing) == set(toy.required)


async def test_tests_that_sleep_past_the_wall_limit_are_a_failure(toy: Task, sandbox: Bubblewrap):
    sleeper = changed("toy/__init__.py", "import time; time.sleep(60)\n" + FIXED)
    verdict = await grade(replace(toy, tests_s=2.0), [sleeper], sandbox)
    assert verdict.reward == 0.0 and "longer than 2 s" in verdict.log and verdict.seconds < 30


@pytest.mark.parametrize(
    ("task", "told"),
    [
        ({"testenv": "empty"}, "did not start"),
        ({"test_file": "tests/test_gone.py"}, "test_gone"),
    ],
)
async def test_a_verdict_that_cannot_be_had_is_an_error_and_not_a_zero(toy, sandbox, tmp_path, task, told):
    (tmp_path / "empty").mkdir()
    task = {name: tmp_path / value if name == "testenv" else value for name, value in task.items()}
    with pytest.raises(VerdictError, match=told):
        await grade(replace(toy, **task), [fix()], sandbox)


async def test_a_killed_run_and_a_broken_sandbox_are_errors(toy: Task, sandbox: Bubblewrap, tmp_path: Path):
    killed = changed("toy/__init__.py", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(VerdictError, match="killed"):
        await grade(toy, [killed], sandbox)
    (tmp_path / "file").write_text("")
    with pytest.raises(VerdictError, match="box"):
        await grade(toy, [fix()], Bubblewrap(state=tmp_path / "file"))


async def test_a_change_that_is_too_large_fails_without_running(toy: Task, sandbox: Bubblewrap):
    verdict = await grade(replace(toy, max_patch_bytes=10, testenv=Path("/nowhere")), [fix()], sandbox)
    assert verdict.reward == 0.0 and "more than 10" in verdict.log


async def test_deleted_linked_and_moved_files_are_laid_as_the_agent_left_them(toy: Task, sandbox: Bubblewrap):
    package_of_links = [
        changed("toy/__init__.py", b"", kind="deleted"),
        changed("toy", "real", kind="symlink"),
        changed("real/__init__.py", "from .deep.code import double, largest\n", mode=0o755),
        changed("real/deep", b"", kind="dir"),
        changed("real/deep/code.py", FIXED),
    ]
    assert (await grade(toy, package_of_links, sandbox)).reward == 1.0


async def test_the_same_changes_are_graded_once_and_counted(toy: Task, sandbox: Bubblewrap, tmp_path: Path):
    store = tmp_path / "verdicts.jsonl"
    grader = Grader(sandbox, store)
    junk = changed("tests/notes.txt", "x")
    verdicts = await asyncio.gather(*(grader.grade(toy, c) for c in ([fix()], [fix()], [junk, fix()])))
    assert (grader.graded, grader.reused) == (1, 2)
    assert sorted(v.reused for v in verdicts) == [False, True, True]
    assert {v.reward for v in verdicts} == {1.0} and verdicts[2].excluded == (junk.path,)
    again = Grader(sandbox, store)
    kept = await again.grade(replace(toy, testenv=Path("/nowhere")), [fix()])
    assert kept.reused and replace(kept, reused=False) == replace(verdicts[0], reused=False)
    with pytest.raises(VerdictError):
        await again.grade(replace(toy, testenv=Path("/nowhere"), digest="toy-2"), [fix()])


async def test_an_error_is_not_kept_for_the_next_trial(toy: Task, sandbox: Bubblewrap, tmp_path: Path):
    grader = Grader(sandbox)
    broken = replace(toy, test_file="tests/late.py")
    with pytest.raises(VerdictError):
        await grader.grade(broken, [fix()])
    (toy.tests / "tests" / "late.py").write_text((toy.tests / toy.test_file).read_text())
    late = {"fail_to_pass": ("tests.late::test_largest",), "pass_to_pass": ()}
    assert (await grader.grade(replace(broken, **late), [fix()])).reward == 1.0
    assert (grader.graded, grader.reused) == (1, 0)


def test_what_equals_the_base_is_no_change(toy: Task):
    same = [changed("toy/__init__.py", SOURCE), changed("toy", b"", kind="dir")]
    assert judged(toy, same) == ()
    assert judged(toy, [changed("toy/__init__.py", SOURCE, mode=0o755)]) != ()


def test_a_digest_tells_every_part_of_a_change_apart():
    changes = [
        changed("a", "x"),
        changed("b", "x"),
        changed("a", "y"),
        changed("a", "x", mode=0o755),
        changed("a", "x", kind="symlink"),
        changed("ax", ""),
    ]
    assert len({patch_digest([c]) for c in changes}) == len(changes)
    assert patch_digest([changed("a", "x", mode=0o600)]) == patch_digest([changes[0]])


@pytest.mark.parametrize("path", [".", "..", "/etc/passwd", "a/../../b"])
def test_a_change_outside_the_repository_is_refused(toy: Task, path: str):
    with pytest.raises(VerdictError):
        judged(toy, [Change(path=Path(path), kind="file")])


@pytest.mark.parametrize("path", ["toy/contest.py", "toy/testing.py", "latest.py", "toy/setup.py", "toy/attest_x.py"])
def test_source_files_are_not_taken_for_tests(path: str):
    assert not is_test_machinery(Path(path))
