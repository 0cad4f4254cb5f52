"""Verdicts of a task's own test.sh in real boxes: only what it wrote itself, in its own time, is a reward."""

import math
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lego.errors import VerdictError
from lego.learn.advantages import advantages
from lego.records import Outcome
from lego.rollout.credit import Rules, credit
from lego.tasks.script_verifier import LIMITS, LOGS, grade_script, parse_reward
from lego.tasks.task import Script, Task
from lego.tasks.verdict import Grader
from sandbox.base import BoxSpec, Change, Sandbox, StoredImage
from sandbox.bubble import Bubblewrap
from sandbox.podman import Podman
from tests.factories import trajectory
from tools.base_image import NAME

CHECK = """#!/bin/sh
grep -q good answer.txt && echo 1 > /logs/verifier/reward.txt && exit 0
echo 0 > /logs/verifier/reward.txt
exit 1
"""
GOOD = Change(path=Path("answer.txt"), kind="file", content=b"good\n")


@pytest.fixture(scope="module")
def boxes(tmp_path_factory: pytest.TempPathFactory) -> Bubblewrap:
    return Bubblewrap(state=tmp_path_factory.mktemp("boxes"))


@pytest.fixture(params=["boxes", pytest.param("podman_sandbox", marks=pytest.mark.podman)])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    return request.getfixturevalue(request.param)


@pytest.fixture
def task(tmp_path: Path, sandbox: Sandbox) -> Task:
    """The agent shall write `good` into answer.txt; `script` below replaces the test."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base/answer.txt").write_text("bad\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test.sh").write_text(CHECK)
    return Task(
        id="words",
        package="words",
        split="train",
        digest="words-1",
        base=tmp_path / "base",
        instruction="Write good.",
        verifier=Script(folder=tmp_path / "tests", timeout_s=20.0),
        workdir=Path("/app"),
        image=StoredImage(name=NAME) if isinstance(sandbox, Podman) else None,
    )


def says(task: Task, text: str, timeout_s: float = 20.0) -> Task:
    """The task with another test.sh."""
    assert isinstance(task.verifier, Script)
    (task.verifier.folder / "test.sh").write_text(text)
    return replace(task, verifier=replace(task.verifier, timeout_s=timeout_s))


async def grade(task: Task, changes: tuple[Change, ...], sandbox: Sandbox):
    assert isinstance(task.verifier, Script)
    return await grade_script(task, task.verifier, changes, sandbox)


async def test_the_fix_is_rewarded_and_the_empty_change_is_not(task: Task, sandbox: Sandbox):
    good, none = await grade(task, (GOOD,), sandbox), await grade(task, (), sandbox)
    assert (good.outcome, good.reward) == (Outcome.SOLVED, 1.0) and good.log.endswith("exit status 0")
    assert (none.outcome, none.reward) == (Outcome.FAILED, 0.0) and none.log.endswith("exit status 1")


async def test_a_part_of_the_reward_is_a_failure_with_a_number_that_credit_uses(task: Task, sandbox: Sandbox):
    verdict = await grade(says(task, "echo 0.5 > /logs/verifier/reward.txt"), (), sandbox)
    assert (verdict.outcome, verdict.reward) == (Outcome.FAILED, 0.5)
    trials = [trajectory("t", reward, outcome=Outcome.FAILED) for reward in (0.0, verdict.reward)]
    rules = Rules(advantages=lambda groups: advantages(groups, baseline="group", scale="none", negative=1.0))
    assert [sample.advantage for sample in credit([trials], rules).samples] == [-0.25, 0.25]


async def test_v05_no_reward_is_an_error_and_never_a_zero(task: Task, sandbox: Sandbox):
    with pytest.raises(VerdictError, match=r"left neither reward\.txt nor reward\.json(.|\n)*said(.|\n)*status 7"):
        await grade(says(task, "echo said; exit 7"), (GOOD,), sandbox)


PLANT = """
for folder in /app/logs/verifier /logs/verifier /tmp/lego-verifier; do
    mkdir -p $folder && echo 1 > $folder/reward.txt && echo '{"reward": 1}' > $folder/reward.json
    chmod 555 $folder
done
"""


@pytest.mark.parametrize("written", ["0", ""])
async def test_v05_what_an_agent_planted_counts_for_nothing(task: Task, sandbox: Sandbox, written: str):
    async with sandbox.open(BoxSpec(base=task.base, image=task.image, workdir=task.workdir)) as box:
        await box.exec(["sh", "-c", PLANT])
        changes = await box.changes()
    assert [str(change.path) for change in changes if change.kind == "file"] == [
        "logs/verifier/reward.json",
        "logs/verifier/reward.txt",
    ]
    silent = f"ls -la {LOGS}/verifier/ >&2; [ -z '{written}' ] || echo {written} > {LOGS}/verifier/reward.txt"
    if written:
        assert (await grade(says(task, silent), changes, sandbox)).reward == 0.0
    else:
        with pytest.raises(VerdictError, match="left neither"):
            await grade(says(task, silent), changes, sandbox)


@pytest.mark.parametrize(
    "workdir", ["/", "/logs", "/logs/verifier", "/tests", "/tests/a", "/tmp", "/tmp/x", "/usr", "/home"]
)
async def test_v05_a_work_folder_that_holds_the_rewards_is_refused(task: Task, sandbox: Sandbox, workdir: str):
    with pytest.raises(VerdictError, match=rf"workdir: {workdir}, wanted a folder apart from /"):
        await grade(replace(task, workdir=Path(workdir)), (GOOD,), sandbox)


@pytest.mark.parametrize("path", ["../logs/verifier/reward.txt", "/logs/verifier/reward.txt", "../tmp/x"])
async def test_v05_a_change_outside_the_work_folder_is_refused(task: Task, sandbox: Sandbox, path: str):
    with pytest.raises(VerdictError, match="path="):
        await grade(task, (replace(GOOD, path=Path(path)),), sandbox)


async def test_a_link_among_the_changes_leads_no_change_out_of_the_work_folder(task: Task, sandbox: Sandbox):
    way = Change(path=Path("way"), kind="symlink", content=b"/tmp")
    sent = Change(path=Path("way/lego-verifier/reward.txt"), kind="file", content=b"1")
    with pytest.raises(VerdictError, match="path=way/lego-verifier"):
        await grade(says(task, "true"), (way, sent), sandbox)


async def test_of_two_reward_files_the_text_counts(task: Task, sandbox: Sandbox):
    both = "cd /logs/verifier; echo 0.25 > reward.txt; echo '{\"reward\": 1}' > reward.json"
    assert (await grade(says(task, both), (), sandbox)).reward == 0.25
    json_alone = 'echo \'{"reward": 0.75, "parts": 4}\' > /logs/verifier/reward.json'
    assert (await grade(says(task, json_alone), (), sandbox)).reward == 0.75


@pytest.mark.parametrize(
    "left",
    [
        "echo 1 > one; ln -s one reward.txt",
        "ln -s /etc/passwd reward.json",
        "mkdir reward.txt; echo '{\"reward\": 1}' > reward.json",
        "mkfifo reward.txt",
        "touch reward.txt",
        "yes 1 | head -c 100000 > reward.txt",
        "echo 2 > reward.txt",
        "cd /; rm -rf /logs/verifier /tmp/lego-verifier",
    ],
)
async def test_v05_what_is_no_plain_number_in_a_plain_file_is_an_error(task: Task, sandbox: Sandbox, left: str):
    with pytest.raises(VerdictError, match="task words: "):
        await grade(says(task, f"cd /logs/verifier; {left}"), (GOOD,), sandbox)


@pytest.mark.parametrize(
    ("name", "content", "reward"),
    [
        ("reward.txt", b"1", 1.0),
        ("reward.txt", b" 0.50\n", 0.5),
        ("reward.txt", b"1e-3\n", 0.001),
        ("reward.json", b'{"reward": 1}', 1.0),
        ("reward.json", b'{"accuracy": 0.5}', 0.5),
        ("reward.json", b'{"reward": 0.5, "accuracy": 1}', 0.5),
        ("reward.txt", b"", None),
        ("reward.txt", b"nan", None),
        ("reward.txt", b"inf", None),
        ("reward.txt", b"1.5", None),
        ("reward.txt", b"-0.1", None),
        ("reward.txt", b"1 0", None),
        ("reward.txt", b"1\n0\n", None),
        ("reward.txt", "١".encode(), None),
        ("reward.txt", b"\xff1", None),
        ("reward.txt", b"True", None),
        ("reward.json", b"1", None),
        ("reward.json", b"{}", None),
        ("reward.json", b'{"a": 1, "b": 0}', None),
        ("reward.json", b'{"reward": true}', None),
        ("reward.json", b'{"reward": "1"}', None),
        ("reward.json", b'{"reward": NaN}', None),
        ("reward.json", b'{"reward": 1e999}', None),
        ("reward.json", b'{"reward": 1' + b"0" * 3000 + b"}", None),
        ("reward.json", b"[" * 3000, None),
        ("reward.json", b'{"reward": 1', None),
    ],
)
def test_a_reward_is_one_finite_number_from_0_to_1(name: str, content: bytes, reward: float | None):
    if reward is None:
        with pytest.raises(ValueError, match=rf"^{name}: "):
            parse_reward(name, content)
    else:
        assert math.isclose(parse_reward(name, content), reward)


@pytest.mark.parametrize("own", ["echo 0 > /logs/verifier/reward.txt", "true"])
async def test_a_background_writer_is_dead_before_the_reward_is_read(task: Task, sandbox: Sandbox, own: str):
    late = "(setsid sh -c 'trap \"\" TERM HUP; sleep 1; echo 1 > /logs/verifier/reward.txt' >/dev/null 2>&1 &)"
    try:
        assert (await grade(says(task, f"{late}\n{own}"), (), sandbox)).reward == 0.0
    except VerdictError as error:
        assert own == "true" and "left neither" in str(error)
    else:
        assert own != "true"


async def test_a_script_without_an_end_is_a_failure_whatever_it_wrote(task: Task, sandbox: Sandbox):
    start = time.monotonic()
    hangs = says(task, "echo 1 > /logs/verifier/reward.txt; echo begun; sleep 300", timeout_s=1.0)
    verdict = await grade(hangs, (GOOD,), sandbox)
    assert (verdict.outcome, verdict.reward) == (Outcome.FAILED, 0.0)
    assert verdict.log.startswith("test.sh ran longer than 1 s\nbegun") and time.monotonic() - start < 10


async def test_a_verifier_that_runs_out_of_memory_is_an_error(task: Task, sandbox: Sandbox):
    if not sandbox.probe().memory:
        pytest.skip("this host does not limit memory")
    hog = says(task, "echo 1 > /logs/verifier/reward.txt; head -c 400M /dev/zero | tail -n 1 | wc -c")
    with pytest.raises(VerdictError, match="out of memory"):
        await grade(replace(hog, limits=replace(LIMITS, memory_gib=0.125)), (), sandbox)


async def test_the_tests_cannot_be_written_and_the_base_is_as_it_was(task: Task, sandbox: Sandbox):
    code = "echo evil > /tests/test.sh; rm -f /tests/test.sh; rm -rf /app/*; cat /tests/test.sh >&2"
    verdict = await grade(says(task, f"{code}; echo 0 > /logs/verifier/reward.txt"), (), sandbox)
    assert "Read-only file system" in verdict.log and "echo evil" in verdict.log
    assert (task.base / "answer.txt").read_text() == "bad\n"


async def test_the_first_line_of_a_script_names_what_runs_it(task: Task, sandbox: Sandbox):
    shown = "#!/bin/sh -e\necho shell=$0; false; echo unreached"
    with pytest.raises(VerdictError, match=r"shell=/tests/test\.sh\n\nexit status 1"):
        await grade(says(task, shown), (), sandbox)
    bash = says(task, 'reward=1; [[ $reward == 1 ]] && echo "$reward" > /logs/verifier/reward.txt')
    assert (await grade(bash, (), sandbox)).reward == 1.0, "without one it is bash, as in Harbor"


async def test_a_long_log_keeps_its_head_and_its_tail(task: Task, sandbox: Sandbox):
    verbose = says(task, "echo first; seq 100000; echo last; echo 0 > /logs/verifier/reward.txt")
    log = (await grade(verbose, (), sandbox)).log
    assert log.startswith("first\n1\n") and log.endswith("last\n\nexit status 0") and len(log) < 4100


async def test_all_that_an_agent_did_is_judged_and_the_same_work_once(task: Task, sandbox: Sandbox):
    """A script's agent may be asked for tests, settings or binaries: what pytest tasks leave out is in the box."""
    names = ["tests/test_a.py", "conftest.py", "pyproject.toml", "lib/x.so", ".git/config"]
    changes = [Change(path=Path(name), kind="file", content=b"import pytest\n") for name in names]
    changes += [Change(path=Path("way"), kind="symlink", content=b"/usr/bin/env"), GOOD]
    seen = says(task, f"ls {' '.join(names)} way && grep -q good answer.txt && echo 1 > /logs/verifier/reward.txt")
    grader = Grader(sandbox)
    first, second = await grader.grade(seen, changes), await grader.grade(seen, changes)
    assert (first.outcome, first.reward, first.excluded) == (Outcome.SOLVED, 1.0, ()), first.log
    assert second.reused and second.reward == 1.0 and grader.graded == 1


async def test_a_script_that_is_gone_is_an_error(task: Task, sandbox: Sandbox):
    assert isinstance(task.verifier, Script)
    (task.verifier.folder / "test.sh").unlink()
    with pytest.raises(VerdictError, match=r"test\.sh is not there"):
        await grade(task, (GOOD,), sandbox)
