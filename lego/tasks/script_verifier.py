"""The verdict of a task's own `test.sh`, as Harbor has it: a fresh box, base + changes, one run, and its reward file.

The script finds its folder at /tests and leaves one number in /logs/verifier: `reward.txt`, or else `reward.json`
(where both are there the text counts, as in Harbor). What it cannot keep from the code it tests is told in
docs/reward-hacking.md.
"""

import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from lego.budget import box_s
from lego.errors import VerdictError
from lego.records import Outcome
from lego.tasks.task import Script, Task
from lego.tasks.verdict import Verdict, clip
from sandbox.base import Box, BoxSpec, Change, ExecResult, Limits, Mount, Sandbox, SandboxError, User
from sandbox.laying import apply_changes

TESTS, LOGS = Path("/tests"), Path("/logs")
WRITABLE = Path("/tmp/lego-verifier")
"""What /logs/verifier leads to: the box's root is read-only, its /tmp is fresh and its own."""
KEPT = (TESTS, LOGS, *map(Path, ("/tmp", "/run", "/proc", "/dev", "/sys", "/usr", "/bin", "/sbin", "/lib", "/etc")))
"""What the verdict relies on: no work folder may hold it or lie in it."""
HOME = Path("/home/agent")
"""A work folder may lie in it, but not hold it: programs take settings from there."""
LIMITS = Limits(memory_gib=2.0, pids=256, cpus=2.0, disk_mib=512)
OUTPUT_BYTES = 1 << 22
REWARD_BYTES = 4096
NAMES = ("reward.txt", "reward.json")
NOT_REGULAR, NOTHING = 3, 4
_READ = f"""
cd {WRITABLE} || exit {NOTHING}
for name in {" ".join(NAMES)}; do
    if [ -L "$name" ]; then echo "$name"; exit {NOT_REGULAR}; fi
    if [ -f "$name" ]; then echo "$name"; head -c {REWARD_BYTES + 1} "$name"; exit; fi
    if [ -e "$name" ]; then echo "$name"; exit {NOT_REGULAR}; fi
done
exit {NOTHING}
"""


async def grade_script(task: Task, script: Script, changes: Sequence[Change], sandbox: Sandbox) -> Verdict:
    """Runs the script on `base` + `changes`; VerdictError where it says nothing about the changes.

    A reward of 1 is `solved`, any other `failed` with its number. A script that runs out of time is `failed` with 0:
    the changes can cause that.
    """
    check_script(task.workdir, script)
    try:
        with _logs() as logs:
            mounts = (Mount(source=script.folder, target=TESTS), Mount(source=logs, target=LOGS))
            limits = replace(task.limits or LIMITS, deadline_s=box_s(script.timeout_s))
            spec = BoxSpec(base=task.base, image=task.image, workdir=task.workdir, mounts=mounts, limits=limits)
            async with sandbox.open(spec) as box:
                return await _graded(task, script, changes, box)
    except SandboxError as error:
        raise VerdictError(f"task {task.id}: the verifier's box failed: {error}") from error


def check_script(workdir: Path, script: Script) -> None:
    """VerdictError for a task whose agent could reach what the verdict relies on, or without a script."""
    if not workdir.is_absolute() or ".." in workdir.parts:
        raise VerdictError(f"workdir: {workdir}, wanted an absolute path without `..`")
    for kept in (*KEPT, HOME):
        inside = kept in workdir.parents and kept != HOME
        if workdir == kept or workdir in kept.parents or inside:
            raise VerdictError(f"workdir: {workdir}, wanted a folder apart from {kept}, which the verdict relies on")
    if not (script.folder / "test.sh").is_file():
        raise VerdictError(f"the tests cannot run: {script.folder / 'test.sh'} is not there")


@contextmanager
def _logs() -> Iterator[Path]:
    """A folder for /logs, where `verifier` leads to a place that the box can write."""
    with tempfile.TemporaryDirectory(prefix="lego-logs-") as folder:
        Path(folder).chmod(0o755)
        Path(folder, "verifier").symlink_to(WRITABLE)
        yield Path(folder)


async def _graded(task: Task, script: Script, changes: Sequence[Change], box: Box) -> Verdict:
    try:
        await apply_changes(box, changes, task.workdir)
    except ValueError as error:
        raise VerdictError(f"task {task.id}: {error}") from error
    user = await _empty_logs(box, script.user)
    result = await box.exec(
        _command(script.folder / "test.sh"),
        cwd=task.workdir,
        user=user,
        timeout_s=script.timeout_s,
        max_output=OUTPUT_BYTES,
    )
    await box.kill()  # what the script left running shall not write the reward
    log = _log(result)
    if result.oom:
        raise VerdictError(f"task {task.id}: the verifier's box ran out of memory\n{log}")
    if result.timed_out:
        told = f"test.sh ran longer than {script.timeout_s:g} s\n"
        return Verdict(outcome=Outcome.FAILED, reward=0.0, log=told + log)
    try:
        reward = parse_reward(*await _reward_file(box, user))
    except ValueError as error:
        raise VerdictError(f"task {task.id}: {error}\n{log}") from error
    return Verdict(outcome=Outcome.SOLVED if reward == 1.0 else Outcome.FAILED, reward=reward, log=log)


async def _empty_logs(box: Box, user: User) -> User:
    """Makes the reward's folder, for its writer alone, and returns who that is: `agent` where a box has no root."""
    argv = ["mkdir", "-m", "700", "--", str(WRITABLE)]
    try:
        made = await box.exec(argv, user=user)
    except ValueError:
        user = "agent"
        made = await box.exec(argv, user=user)
    if made.code != 0:
        raise SandboxError(f"cannot make {WRITABLE}: {made.stderr.decode(errors='replace').strip() or made}")
    return user


def _command(test_sh: Path) -> list[str]:
    """The script by its first line, for it need not be executable; by bash where that names no program."""
    with test_sh.open("rb") as file:
        first = file.readline(1024)
    words = first[2:].decode(errors="replace").split(None, 1) if first.startswith(b"#!") else []
    return [*(word.strip() for word in words or ["bash"]), str(TESTS / "test.sh")]


async def _reward_file(box: Box, user: User) -> tuple[str, bytes]:
    """Name and content of the reward file; ValueError where there is none that counts."""
    found = await box.exec(["sh", "-c", _READ], user=user, cwd=Path("/"), max_output=2 * REWARD_BYTES)
    name, _, content = found.stdout.partition(b"\n")
    if found.code == NOTHING:
        raise ValueError(f"test.sh left neither {' nor '.join(NAMES)} in /logs/verifier")
    if found.code == NOT_REGULAR:
        raise ValueError(f"{name.decode(errors='replace')}: a link or a folder, wanted a file")
    if found.code != 0:
        raise SandboxError(f"cannot read the reward: {found.stderr.decode(errors='replace').strip() or found}")
    return name.decode(), content


def parse_reward(name: str, content: bytes) -> float:
    """The one number of a reward file; ValueError unless it is finite and between 0 and 1.

    JSON is an object with `reward`, or with a single number of another name.
    """
    if len(content) > REWARD_BYTES:
        raise ValueError(f"{name}: larger than {REWARD_BYTES} bytes")
    try:
        text = content.decode("ascii").strip()
        value = _of_json(json.loads(text)) if name.endswith(".json") else float(text)
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{name}: {content[:80]!r} is no reward ({error})") from error
    if not (math.isfinite(value) and 0 <= value <= 1):
        raise ValueError(f"{name}: {value}, wanted 0 to 1")
    return value


def _of_json(value: object) -> float:
    if not isinstance(value, dict):
        raise ValueError("wanted an object")
    number = value["reward"] if "reward" in value else next(iter(value.values())) if len(value) == 1 else None
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ValueError("wanted a number named `reward`, or one number alone")
    return float(number)


def _log(result: ExecResult) -> str:
    """Output and exit status: of a long one the head and the tail."""
    text = (result.stdout + result.stderr).decode("utf-8", "replace")
    end = f"\nexit status {result.code}" + (", more output was dropped" if result.truncated else "")
    return clip(text + end)
