"""Verdicts in real boxes: what solves, what must not, and what is nobody's failure."""

import asyncio
import os
import signal
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from lego.errors import VerdictError
from lego.records import Outcome
from lego.tasks.machinery import counts, is_test_machinery, judged
from lego.tasks.pytest_verifier import Place, run_tests
from lego.tasks.task import Task
from lego.tasks.verdict import Grader, grade
from sandbox.base import BoxSpec, Change, Limits, Sandbox, StoredImage
from sandbox.bubble import Bubblewrap
from sandbox.gitsnap import digest
from sandbox.podman import Podman
from tests.tasks.conftest import FIXED, SOURCE, changed, fix, judged_by, suite_of
from tools.base_image import NAME

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
    assert set(solved.passed) == set(suite_of(toy).required)
    assert (failed.outcome, failed.reward) == (Outcome.FAILED, 0.0)
    assert failed.passed == suite_of(toy).pass_to_pass and failed.missing == suite_of(toy).fail_to_pass
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
    assert (verdict.reward, verdict.missing) == (0.0, suite_of(toy).fail_to_pass)
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


VISIBLE = "import toy\n\ndef test_largest():\n    assert toy.largest([1]) == 1\n"
BY_AN_AGENT = "sed -i s/min/max/ toy/__init__.py"


@pytest.fixture
def shown(toy: Task) -> Task:
    """The toy with some of its tests in sight, in the repository and below the package."""
    for folder in (toy.base / "tests", toy.base / "toy" / "tests"):
        folder.mkdir()
        (folder / "test_toy.py").write_text(VISIBLE)
    return toy


async def worked(task: Task, script: str, sandbox: Sandbox) -> tuple[Change, ...]:
    """What a shell script leaves behind in a real box."""
    async with sandbox.open(BoxSpec(base=task.base)) as box:
        result = await box.exec(["sh", "-ec", script])
        assert result.code == 0, result.stderr
        return await box.changes()


@pytest.mark.parametrize(
    "vandalism",
    [
        "echo 'def test_largest(): pass' > tests/test_toy.py",
        "rm tests/test_toy.py",
        "ln -sf /tmp/x tests/test_toy.py",
        "chmod 000 tests/test_toy.py; chmod 555 tests",
        "rm tests/test_toy.py; mkdir tests/test_toy.py; echo x > tests/test_toy.py/x",
        "echo tests > .gitignore; rm -r tests",
        "rm -r tests; ln -s /tmp tests",
        "rm -r tests; echo x > tests",
        "mkdir mine; cp toy/__init__.py mine; rm -r toy; ln -s mine toy",
        "mkdir -p .git/hooks; printf '#!/bin/sh\\nrm -rf /repo/*' > .git/hooks/post-checkout; chmod 755 .git/hooks/*",
        'printf \'[project]\\nname = "toy"\\ndependencies = ["left-pad"]\\n\' > pyproject.toml',
        "mkdir toy.egg-info; echo toy > toy.egg-info/top_level.txt; echo 'import x' > toy.pth",
        "ln -s /opt/tests hidden; ln -s ../../../tmp toy/out; ln -s . a; ln -s a/a/a/../../../../etc b",
    ],
)
async def test_honest_work_counts_and_the_tests_are_their_own(shown: Task, sandbox: Bubblewrap, vandalism: str):
    works = [await worked(shown, script, sandbox) for script in (vandalism, f"{BY_AN_AGENT}; {vandalism}")]
    lazy, honest = await asyncio.gather(*(grade(shown, work, sandbox) for work in works))
    assert (lazy.reward, lazy.missing) == (0.0, suite_of(shown).fail_to_pass)
    assert honest.reward == 1.0, honest.log
    assert honest.excluded


@pytest.mark.podman
@pytest.mark.parametrize(
    "vandalism",
    [
        "rm tests/test_toy.py; mkdir tests/test_toy.py; echo x > tests/test_toy.py/x",
        "rm -r tests; ln -s /tmp tests",
        "mkdir -p .git/hooks; printf '#!/bin/sh\\nrm -rf /repo/*' > .git/hooks/post-checkout; chmod 755 .git/hooks/*",
        "printf 'import os; os._exit(0)' > conftest.py; printf '[pytest]\\naddopts = --co' > pytest.ini",
    ],
    ids=["V17 folder", "V17 link", "hooks", "V03 settings"],
)
async def test_on_podman_honest_work_counts_and_the_tests_are_their_own(
    shown: Task, podman_sandbox: Podman, vandalism: str
):
    task = replace(shown, image=StoredImage(name=NAME))
    works = [await worked(shown, script, podman_sandbox) for script in (vandalism, f"{BY_AN_AGENT}; {vandalism}")]
    lazy, honest = await asyncio.gather(*(grade(task, work, podman_sandbox) for work in works))
    assert (lazy.reward, lazy.missing) == (0.0, suite_of(shown).fail_to_pass)
    assert honest.reward == 1.0, honest.log
    assert honest.excluded


async def test_a_conftest_that_the_task_owns_is_used_and_the_agents_is_not(toy: Task, sandbox: Bubblewrap):
    suite = suite_of(toy)
    (suite.tests / "conftest.py").write_text("import pytest\n\n@pytest.fixture\ndef three():\n    return 3\n")
    test = "import toy\n\ndef test_largest(three):\n    assert toy.largest([1, 3, 2]) == three\n"
    (suite.tests / suite.test_file).write_text(test)
    task = judged_by(toy, pass_to_pass=())
    mine = changed("conftest.py", "import pytest\n\n@pytest.fixture\ndef three():\n    return 1\n")
    verdicts = [await grade(task, changes, sandbox) for changes in ([fix(), mine], [mine], [fix()])]
    assert [v.reward for v in verdicts] == [1.0, 0.0, 1.0]


async def test_parts_of_pytest_that_the_tests_need_are_named_by_the_task(toy: Task, sandbox: Bubblewrap):
    suite = suite_of(toy)
    test = "import toy\n\ndef test_largest(caplog, tmpdir):\n    assert toy.largest([1, 3, 2]) == 3\n"
    (suite.tests / suite.test_file).write_text(test)
    task = judged_by(toy, pass_to_pass=())
    asked = judged_by(task, plugins=("logging", "legacypath"))
    assert [(await grade(each, [fix()], sandbox)).reward for each in (task, asked)] == [0.0, 1.0]
    assert (await grade(asked, [], sandbox)).reward == 0.0
    with pytest.raises(ValueError, match="plugins: 'xdist', wanted some of doctest"):
        judged_by(task, plugins=("xdist",))


async def test_neither_variables_nor_the_job_reach_the_tests_nor_the_stream_their_children(
    toy: Task, sandbox: Bubblewrap, monkeypatch
):
    for name in ("PYTHONPATH", "PYTHONSTARTUP", "PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        monkeypatch.setenv(name, "/tmp/evil")
    look = (
        "import os, subprocess, sys\nleft = {n for n in os.environ if n.startswith('PY')}\n"
        "left -= {'PYTEST_DISABLE_PLUGIN_AUTOLOAD', 'PYTEST_VERSION', 'PYTEST_CURRENT_TEST'}\n"
        "assert not left and sys.flags.isolated and sys.flags.no_site\n"
        "files = [os.path.realpath(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')]\n"
        "assert not [file for file in files if 'memfd' in file]\n"
        "every = 'for n in 3 4 5 6 7 8 9; do echo x >&$n; done'\n"
        "subprocess.run(['sh', '-c', every], close_fds=False, check=False)\n"
    )
    run = await run_tests(suite_of(toy), Place(base=toy.base), [changed("toy/__init__.py", look + FIXED)], sandbox)
    assert run.believed and set(run.report.passed) == set(suite_of(toy).required)


async def test_a_log_keeps_its_head_and_its_tail(toy: Task, sandbox: Bubblewrap):
    loud = changed("toy/__init__.py", "raise ValueError('head' + 'x' * 100_000)\n")
    log = (await grade(toy, [loud], sandbox)).log
    assert "head" in log and log.endswith("exit status 2") and "characters left out" in log and len(log) < 4100


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
    verdict = await grade(judged_by(toy, cpu_s=1), [changed("toy/__init__.py", source + FIXED)], sandbox)
    assert (verdict.outcome, verdict.reward) == (Outcome.FAILED, 0.0)
    assert told in verdict.log
    assert set(verdict.missing) == set(suite_of(toy).required)


async def test_tests_that_sleep_past_the_wall_limit_are_a_failure(toy: Task, sandbox: Bubblewrap):
    sleeper = changed("toy/__init__.py", "import time; time.sleep(60)\n" + FIXED)
    verdict = await grade(judged_by(toy, wall_s=2.0), [sleeper], sandbox)
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
        await grade(judged_by(toy, **task), [fix()], sandbox)


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os.system(f'kill -9 {os.getpid()}')", "os._exit(137)"])
async def test_work_that_kills_itself_failed(end: str, toy: Task, sandbox: Bubblewrap):
    verdict = await grade(toy, [changed("toy/__init__.py", f"import os; {end}\n{FIXED}")], sandbox)
    assert verdict.reward == 0.0 and "exit status" in verdict.log


async def test_work_that_is_killed_once_is_judged_again(toy: Task, sandbox: Bubblewrap):
    sleeper = changed("toy/__init__.py", "import time; time.sleep(6)\n" + FIXED)
    async with asyncio.TaskGroup() as group:
        judged_meanwhile = group.create_task(grade(toy, [sleeper], sandbox))
        for _ in range(200):
            await asyncio.sleep(0.1)
            if found := running_tests():
                break
        await asyncio.sleep(3.0)  # let it begin
        for pid in found:
            os.kill(pid, signal.SIGKILL)
    assert judged_meanwhile.result().reward == 1.0


async def test_coroutines_of_unittest_are_judged(toy: Task, sandbox: Bubblewrap):
    """Honest work once got no reward: pytest lets unittest find them itself, so they did not fail in the second run."""
    (suite_of(toy).tests / "tests" / "test_async.py").write_text(
        "import unittest, toy\nclass TestToy(unittest.IsolatedAsyncioTestCase):\n"
        "    async def test_largest(self):\n        self.assertEqual(toy.largest([1, 3, 2]), 3)\n"
    )
    task = judged_by(
        toy, test_file="tests/test_async.py", fail_to_pass=("tests.test_async.TestToy::test_largest",), pass_to_pass=()
    )
    assert [(await grade(task, work, sandbox)).reward for work in ([fix()], [])] == [1.0, 0.0]


def running_tests() -> list[int]:
    """Those of our own descendants that run the tests of a verdict."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if b"lay the agent's changes" in path.joinpath("cmdline").read_bytes() and descends(int(path.name)):
                found.append(int(path.name))
    return found


def descends(pid: int) -> bool:
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if pid == os.getpid():
            return True
    return False


async def test_a_broken_sandbox_is_an_error(toy: Task, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(VerdictError, match="box"):
        await grade(toy, [fix()], Bubblewrap(state=tmp_path / "file"))


async def test_a_hungry_process_failed_and_a_box_out_of_memory_is_nobodys_failure(toy: Task, sandbox: Bubblewrap):
    if not sandbox.probe().memory:
        pytest.skip("this host does not limit memory")
    small = replace(toy, limits=Limits(memory_gib=0.5, pids=64, cpus=1.0, disk_mib=64))
    hungry = "x = bytearray(300 << 20)\n"
    verdict = await grade(small, [changed("toy/__init__.py", hungry + FIXED)], sandbox)
    assert verdict.reward == 0.0 and "MemoryError" in verdict.log
    child = "x = bytearray(160 << 20); x[::4096] = b'x' * len(x[::4096]); time.sleep(20)"
    many = f"import os, time\nfor _ in range(5):\n    if os.fork() == 0:\n        {child}\nos.wait()\nos._exit(1)\n"
    with pytest.raises(VerdictError, match="out of memory"):
        await grade(small, [changed("toy/__init__.py", many + FIXED)], sandbox)


async def test_a_change_that_is_too_large_fails_without_running(toy: Task, sandbox: Bubblewrap):
    verdict = await grade(judged_by(replace(toy, max_patch_bytes=10), testenv=Path("/nowhere")), [fix()], sandbox)
    assert verdict.reward == 0.0 and "more than 10" in verdict.log


async def test_many_empty_files_are_a_large_change_and_bytes_that_are_no_source_fail(toy: Task, sandbox: Bubblewrap):
    many = [changed(f"toy/{'n' * 200}{number}", "") for number in range(6000)]
    assert "bytes, more than" in (await grade(toy, [fix(), *many], sandbox)).log
    short = [changed(f"f{number}", "") for number in range(20_000)]
    assert "bytes, more than" in (await grade(toy, [fix(), *short], sandbox)).log, "more files than a box can hold"
    binary = await grade(toy, [changed("toy/__init__.py", bytes(range(256)) * 1000)], sandbox)
    assert (binary.reward, binary.missing) == (0.0, suite_of(toy).required)
    data = [changed(f"toy/data{number}.bin", bytes(range(256))) for number in range(100)]
    assert (await grade(toy, [fix(), *data], sandbox)).reward == 1.0


async def test_findings_stay_with_a_kept_verdict(toy: Task, sandbox: Bubblewrap, tmp_path: Path):
    store = tmp_path / "verdicts.jsonl"
    cheat = changed("toy/__init__.py", "import ctypes, sys\nsys.exit\n" + FIXED)
    first = await Grader(sandbox, store).grade(toy, [cheat])
    assert [(f.path, f.line, f.kind) for f in first.findings] == [
        ("toy/__init__.py", 1, "ctypes"),
        ("toy/__init__.py", 2, "exit"),
    ]
    assert (first.reward, first.passed) == (0.0, suite_of(toy).required)
    assert first.log.endswith("no reward: toy/__init__.py:1 ctypes")
    assert replace(await Grader(sandbox, store).grade(toy, [cheat]), reused=False) == first


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
    kept = await again.grade(judged_by(toy, testenv=Path("/nowhere")), [fix()])
    assert kept.reused and replace(kept, reused=False) == replace(verdicts[0], reused=False)
    with pytest.raises(VerdictError):
        await again.grade(judged_by(replace(toy, digest="toy-2"), testenv=Path("/nowhere")), [fix()])


async def test_an_error_is_not_kept_for_the_next_trial(toy: Task, sandbox: Bubblewrap, tmp_path: Path):
    grader = Grader(sandbox)
    broken = judged_by(toy, test_file="tests/late.py")
    with pytest.raises(VerdictError):
        await grader.grade(broken, [fix()])
    (suite_of(toy).tests / "tests" / "late.py").write_text((suite_of(toy).tests / suite_of(toy).test_file).read_text())
    late = {"fail_to_pass": ("tests.late::test_largest",), "pass_to_pass": ()}
    assert (await grader.grade(judged_by(broken, **late), [fix()])).reward == 1.0
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
    assert len({digest([c]) for c in changes}) == len(changes)


@pytest.mark.parametrize("path", [".", "..", "/etc/passwd", "a/../../b"])
def test_a_change_outside_the_repository_is_refused(toy: Task, path: str):
    with pytest.raises(VerdictError):
        judged(toy, [Change(path=Path(path), kind="file")])


@pytest.mark.parametrize("path", ["toy/contest.py", "toy/testing.py", "latest.py", "toy/setup.py", "toy/attest_x.py"])
def test_source_files_are_not_taken_for_tests(path: str):
    assert not is_test_machinery(Path(path))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (changed("toy/fast.so", b"x"), False),
        (changed("toy/fast.so.1", b"x"), False),
        (changed("toy/old.so", b"x"), True),
        (changed("toy/old.pyc", b"x"), False),
        (changed("toy.dist-info/entry_points.txt", "x"), False),
        (changed("toy/data.bin", b"\0"), True),
        (changed("toy/here", "other.py", kind="symlink"), True),
        (changed("toy/here", "../README", kind="symlink"), True),
        (changed("toy/here", "../../README", kind="symlink"), False),
        (changed("toy/here", "a/../README", kind="symlink"), False),
        (changed("toy/here", "/repo/README", kind="symlink"), False),
        (changed("here", "..", kind="symlink"), False),
    ],
)
def test_machine_code_and_links_out_of_the_repository_are_not_part_of_the_work(toy: Task, change: Change, part: bool):
    for name in ("old.so", "old.pyc"):
        (toy.base / "toy" / name).write_bytes(b"")
    assert counts(toy, change) is part


async def test_a_work_is_screened_in_the_thread_that_grades(
    toy: Task, sandbox: Bubblewrap, monkeypatch: pytest.MonkeyPatch
):
    """Python 3.11 ends in a SystemError where two threads make syntax trees, as numpy does when it reads an array."""
    seen = []
    monkeypatch.setattr("lego.tasks.verdict.screen", lambda *_: seen.append(threading.current_thread()) or ())
    await grade(toy, [], sandbox)
    assert seen == [threading.current_thread()]
