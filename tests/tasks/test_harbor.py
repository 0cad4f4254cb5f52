"""Tasks in Harbor's format: read whole, refused with file and field, and solved by their own solution in real boxes."""

import logging
import shutil
from pathlib import Path, PurePosixPath

import pytest

from lego.errors import UsageError
from lego.records import Outcome
from lego.tasks.harbor import HarborTasks
from lego.tasks.script_verifier import grade_script
from lego.tasks.task import Script, Task
from sandbox.base import BoxSpec, BuiltImage, Image, Limits, RegistryImage, Sandbox, StoredImage, no_progress
from sandbox.bubble import Bubblewrap
from sandbox.podman import Podman
from tools.base_image import NAME

TOML = """
schema_version = "1.1"
[task]
name = "toys/sum"
authors = [{ name = "A", email = "a@example.org" }]
[metadata]
difficulty = "easy"
tags = ["toy"]
[verifier]
timeout_sec = 30.0
[agent]
timeout_sec = 40
[solution]
env = { KEY = "secret" }
[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 1536
storage_mb = 64
gpus = 0
mcp_servers = []
env = {}
"""
TEST = """#!/bin/bash
cd /app
if python3 - <<'END'
from sums import total
assert total([1, 2, 3]) == 6
END
then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
SOLVE = """#!/bin/bash
sed -i 's/return 0/return sum(numbers)/' /app/sums.py
"""
CHATTY = "#!/bin/sh\ngrep -qx hello greeting.txt && echo '{\"reward\": 1.0}' > /logs/verifier/reward.json || exit 3\n"


def write(root: Path, name: str = "sum", toml: str = TOML, base: bool = True) -> Path:
    """A task folder as `harbor init` makes it, and a base/ beside."""
    files = {
        "task.toml": toml,
        "instruction.md": "Make total add up.\n",
        "environment/Dockerfile": "FROM scratch AS first\nWORKDIR /else\nFROM scratch\nworkdir /srv\nWORKDIR app\n",
        "tests/test.sh": TEST,
        "solution/solve.sh": SOLVE,
    }
    if base:
        files["base/sums.py"] = "def total(numbers):\n    return 0\n"
    for path, text in files.items():
        (root / name / path).parent.mkdir(parents=True, exist_ok=True)
        (root / name / path).write_text(text)
    return root / name


class Store(Bubblewrap):
    """Boxes by bubblewrap, and images that only their names are known of."""

    prepared: list[Image]

    async def prepare(self, images, progress=no_progress) -> None:
        object.__setattr__(self, "prepared", list(images))

    async def extract(self, image: Image, folder: PurePosixPath, into: Path) -> Path:
        (into / "copy").mkdir(parents=True, exist_ok=True)
        (into / "copy/whence.txt").write_text(f"{image} {folder}")
        return into / "copy"


async def build(source: HarborTasks, sandbox: Sandbox, cache: Path) -> list[Task]:
    return list(await source.build(cache, sandbox, lambda *_: None))


async def test_a_folder_becomes_a_task_with_all_that_its_toml_says(tmp_path: Path, sandbox: Bubblewrap):
    folder = write(tmp_path / "toys")
    (task,) = await build(HarborTasks(path=tmp_path / "toys", host=True), sandbox, tmp_path)
    assert (task.id, task.package, task.split, task.image) == ("sum", "toys", "train", None)
    assert (task.instruction, task.base, task.workdir) == ("Make total add up.", folder / "base", Path("/srv/app"))
    assert task.verifier == Script(folder=folder / "tests", timeout_s=30.0, user="agent")
    assert task.harness_s == 40.0 and task.limits == Limits(memory_gib=1.5, cpus=1.0, disk_mib=64)


async def test_what_the_toml_leaves_out_is_the_recipes(tmp_path: Path, sandbox: Bubblewrap):
    (write(tmp_path, toml="") / "environment/Dockerfile").unlink()
    (task,) = await build(HarborTasks(path=tmp_path, host=True), sandbox, tmp_path)
    assert task.limits is None and task.harness_s is None and task.workdir == Path("/app")
    assert isinstance(task.verifier, Script) and task.verifier.timeout_s == 600.0, "Harbor's own default"


async def test_a_task_may_name_its_harness_among_what_people_say_of_it(tmp_path: Path, sandbox: Bubblewrap):
    write(tmp_path / "toys", toml=TOML.replace('difficulty = "easy"', 'difficulty = "easy"\nharness = "pi"'))
    write(tmp_path / "toys", "other")
    other, named = await build(HarborTasks(path=tmp_path / "toys", host=True), sandbox, tmp_path)
    assert (other.harness, named.harness) == (None, "pi")


async def test_older_spellings_are_read(tmp_path: Path, sandbox: Bubblewrap):
    write(tmp_path, toml='version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "10 GiB"\n')
    (task,) = await build(HarborTasks(path=tmp_path, host=True), sandbox, tmp_path)
    assert task.limits == Limits(memory_gib=2.0, disk_mib=10240)


@pytest.mark.parametrize(
    ("toml", "network", "image"),
    [
        ("", False, None),
        ("", True, None),
        ('docker_image = "org/image:1"\nworkdir = "/app"', False, StoredImage(name="org/image:1")),
        ('docker_image = "org/image:1"\nworkdir = "/app"', True, RegistryImage(reference="org/image:1")),
    ],
)
async def test_a_task_runs_on_its_image_and_works_on_what_that_holds(
    tmp_path: Path, toml: str, network: bool, image: Image | None
):
    folder = write(tmp_path, toml=f"[environment]\n{toml}\n", base=False)
    image = image or BuiltImage(context=folder / "environment", network=network)
    store = Store()
    (task,) = await build(HarborTasks(path=tmp_path, network=network), store, tmp_path / "cache")
    assert task.image == image and store.prepared == [image], "nothing reaches out unless the recipe allows"
    workdir = "/app" if toml else "/srv/app"
    assert (task.base / "whence.txt").read_text() == f"{image} {workdir}" and task.workdir == Path(workdir)


async def test_a_base_beside_the_task_comes_before_the_images_own_folder(tmp_path: Path):
    folder = write(tmp_path)
    (task,) = await build(HarborTasks(path=tmp_path), Store(), tmp_path / "cache")
    assert task.base == folder / "base" and isinstance(task.image, BuiltImage)


async def test_images_are_refused_where_there_are_none(tmp_path: Path, sandbox: Bubblewrap):
    write(tmp_path)
    with pytest.raises(UsageError, match=r"tasks\.host: False, but Bubblewrap has no images; wanted Podman or Docker"):
        await build(HarborTasks(path=tmp_path), sandbox, tmp_path)


async def test_without_an_image_there_must_be_a_base(tmp_path: Path, sandbox: Bubblewrap):
    write(tmp_path, base=False)
    with pytest.raises(UsageError, match=r"sum/task\.toml: no folder base/"):
        await build(HarborTasks(path=tmp_path, host=True), sandbox, tmp_path)


@pytest.mark.parametrize(
    ("toml", "told"),
    [
        ("[environment]\ngpus = 1", "environment.gpus: 1, "),
        ("[environment]\ncpus = -1", "environment.cpus: -1, "),
        ('[environment]\nmemory = "lots"', "environment.memory: 'lots', "),
        ('[environment]\nenv = { TOKEN = "x" }', "environment.env.*: {'TOKEN': 'x'}, "),
        ("[environment]\nhealthcheck = { command = 'x' }", "environment.healthcheck.*: "),
        ("[environment]\nmemory_gb = 2", "environment.memory_gb: 2, "),
        ('[verifier]\nuser = "judge"', "verifier.user.*: 'judge', "),
        ("[verifier]\ntimeout_sec = 0", "verifier.timeout_sec: 0, "),
        ("[verifier]\ntimeout_sec = inf", "verifier.timeout_sec: inf, "),
        ('[verifier]\nenvironment_mode = "separate"', "verifier.environment_mode: 'separate', "),
        ('[agent]\nuser = "root"', "agent.user.*: 'root', "),
        ("[metadata]\nharness = 5", "metadata.harness: 5, "),
        ('[metadata]\nharness = ""', "metadata.harness: '', "),
        ("[[steps]]\nname = 'a'", "steps.*: "),
        ("[surprise]\nx = 1", "surprise: "),
        ("[verifier", r".*\(at (line|end)"),
        ('[environment]\nworkdir = "app"', "environment.workdir: app, wanted an absolute path"),
        ('[environment]\nworkdir = "/"', "workdir: /, wanted a folder apart from /"),
        ('[environment]\nworkdir = "/logs/x"', "workdir: /logs/x, wanted a folder apart from /logs"),
        ('[environment]\nworkdir = "/app/../tests"', "workdir: /app/../tests, wanted an absolute path without"),
    ],
)
async def test_what_a_box_cannot_give_is_refused_with_file_and_field(
    tmp_path: Path, sandbox: Bubblewrap, toml: str, told: str
):
    write(tmp_path, toml=toml)
    with pytest.raises(UsageError, match=rf"sum/task\.toml: {told}"):
        await build(HarborTasks(path=tmp_path, host=True), sandbox, tmp_path)


@pytest.mark.parametrize(("user", "runs"), [("'root'", "root"), ("0", "root"), ("'agent'", "agent"), ("1000", "agent")])
async def test_who_runs_the_script_is_the_tasks_choice(tmp_path: Path, sandbox: Bubblewrap, user: str, runs: str):
    write(tmp_path, toml=f"[verifier]\nuser = {user}")
    (task,) = await build(HarborTasks(path=tmp_path, host=True), sandbox, tmp_path)
    assert isinstance(task.verifier, Script) and task.verifier.user == runs


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda folder: (folder / "instruction.md").write_text(" \n"), r"sum/instruction\.md: missing or empty"),
        (lambda folder: (folder / "instruction.md").unlink(), r"sum/instruction\.md: missing or empty"),
        (lambda folder: (folder / "tests/test.sh").unlink(), r"sum/task\.toml: .*sum/tests/test\.sh is not there"),
        (lambda folder: (folder / "environment/docker-compose.yaml").touch(), r"docker-compose\.yaml: services"),
        (lambda folder: (folder / "environment/Dockerfile").write_text("WORKDIR $X"), r"Dockerfile:1: WORKDIR \$X"),
    ],
)
async def test_a_file_that_is_missing_or_not_supported_is_named(tmp_path: Path, sandbox: Bubblewrap, spoil, told: str):
    spoil(write(tmp_path))
    with pytest.raises(UsageError, match=told):
        await build(HarborTasks(path=tmp_path, host=True), sandbox, tmp_path)


async def test_an_image_without_a_place_to_work_is_refused(tmp_path: Path):
    folder = write(tmp_path, base=False)
    (folder / "environment/Dockerfile").write_text("FROM a AS b\nWORKDIR /x\nFROM b\n")
    with pytest.raises(UsageError, match=r"task\.toml: environment\.workdir: None, wanted an absolute path"):
        await build(HarborTasks(path=tmp_path), Store(), tmp_path / "cache")
    (folder / "environment/Dockerfile").unlink()
    with pytest.raises(UsageError, match=r"environment\.docker_image: not given, and no environment/Dockerfile"):
        await build(HarborTasks(path=tmp_path), Store(), tmp_path / "cache")


async def test_an_empty_folder_is_one_clear_message(tmp_path: Path, sandbox: Bubblewrap):
    with pytest.raises(UsageError, match=r"no NAME/task\.toml"):
        await build(HarborTasks(path=tmp_path), sandbox, tmp_path)


async def test_tasks_that_are_held_out_are_named_by_pattern(tmp_path: Path, sandbox: Bubblewrap):
    for name in ("a1", "a2", "b1"):
        write(tmp_path, name)
    tasks = await build(HarborTasks(path=tmp_path, host=True, heldout=("a*",)), sandbox, tmp_path)
    assert [(task.id, task.split) for task in tasks] == [("a1", "heldout"), ("a2", "heldout"), ("b1", "train")]
    with pytest.raises(UsageError, match=r"tasks\.heldout: 'c\*' names no task"):
        await build(HarborTasks(path=tmp_path, host=True, heldout=("c*",)), sandbox, tmp_path)


async def test_a_task_that_wants_the_internet_is_told_of(
    tmp_path: Path, sandbox: Bubblewrap, caplog: pytest.LogCaptureFixture
):
    write(tmp_path, toml="[environment]\nallow_internet = true")
    with caplog.at_level(logging.WARNING):
        await build(HarborTasks(path=tmp_path, host=True), sandbox, tmp_path)
    assert "1 tasks may use the internet, which no box has: sum" in caplog.text


async def test_the_digest_follows_all_that_decides_a_verdict_and_not_the_solution(tmp_path: Path, sandbox: Bubblewrap):
    folder, source = write(tmp_path), HarborTasks(path=tmp_path, host=True)
    (first,) = await build(source, sandbox, tmp_path)
    seen = {first.digest}
    (folder / "solution/solve.sh").write_text("other")
    (same,) = await build(source, sandbox, tmp_path)
    assert same.digest == first.digest
    for path, text in {"tests/new": "", "base/sums.py": "x", "environment/new": "", "task.toml": ""}.items():
        (folder / path).write_text(text)
        seen.add((await build(source, sandbox, tmp_path))[0].digest)
    (folder / "base/link").symlink_to("sums.py")
    seen.add((await build(source, sandbox, tmp_path))[0].digest)
    (folder / "base/sums.py").chmod(0o755)
    seen.add((await build(source, sandbox, tmp_path))[0].digest)
    assert len(seen) == 7


async def verdicts(task: Task, sandbox: Sandbox, solve: str) -> tuple[float, float]:
    """Rewards of doing nothing, and of what `solve` does in an agent's box."""
    assert isinstance(task.verifier, Script)
    spec = BoxSpec(base=task.base, image=task.image, workdir=task.workdir, limits=task.limits or Limits())
    async with sandbox.open(spec) as box:
        shown = await box.exec(["sh", "-c", "ls -d /tests /logs /solution; find . -name solve.sh -o -name test.sh"])
        assert shown.stdout == b"", "neither tests nor solution are in the agent's box"
        assert (await box.exec(["sh", "-c", solve])).code == 0
        changes = await box.changes()
    idle = await grade_script(task, task.verifier, (), sandbox)
    done = await grade_script(task, task.verifier, changes, sandbox)
    assert done.outcome == (Outcome.SOLVED if done.reward == 1 else Outcome.FAILED)
    return idle.reward, done.reward


async def test_the_solution_is_rewarded_and_idleness_is_not(tmp_path: Path, sandbox: Bubblewrap):
    write(tmp_path, toml=TOML + 'workdir = "/app"\n')
    (task,) = await build(HarborTasks(path=tmp_path, host=True), sandbox, tmp_path)
    assert await verdicts(task, sandbox, SOLVE) == (0.0, 1.0)


async def test_a_task_with_pytest_is_judged_by_it(tmp_path: Path, sandbox: Bubblewrap, testenv: Path):
    folder = write(tmp_path, toml='[environment]\nworkdir = "/app"\n')
    shutil.copytree(testenv, folder / "tests/lib")
    (folder / "tests/test_sum.py").write_text(
        "from sums import total\ndef test_some(): assert total([1]) == 1\ndef test_none(): assert total([]) == 0\n"
    )
    (folder / "tests/test.sh").write_text(
        "PYTHONPATH=/app:/tests/lib python3 -m pytest -q -p no:cacheprovider /tests/test_sum.py | tee /tmp/out\n"
        "passed=$(grep -o '[0-9]* passed' /tmp/out | cut -d' ' -f1)\n"
        'python3 -c "print(${passed:-0} / 2)" > /logs/verifier/reward.txt\n'
    )
    (task,) = await build(HarborTasks(path=tmp_path, host=True), sandbox, tmp_path)
    assert await verdicts(task, sandbox, SOLVE) == (0.5, 1.0)


@pytest.mark.podman
async def test_on_podman_a_task_runs_on_the_image_that_its_dockerfile_makes(tmp_path: Path, podman_sandbox: Podman):
    folder = write(tmp_path / "toys", base=False)
    (folder / "environment/sums.py").write_text("def total(numbers):\n    return 0\n")
    (folder / "environment/Dockerfile").write_text(f"FROM {NAME}\nRUN touch /built\nWORKDIR /app\nCOPY sums.py .\n")
    (task,) = await build(HarborTasks(path=tmp_path / "toys"), podman_sandbox, tmp_path / "cache")
    assert isinstance(task.image, BuiltImage) and (task.base / "sums.py").is_file()
    assert await verdicts(task, podman_sandbox, f"test -e /built\n{SOLVE}") == (0.0, 1.0)


@pytest.mark.podman
async def test_on_podman_a_stored_image_serves_too(tmp_path: Path, podman_sandbox: Podman):
    write(tmp_path, toml=f'[environment]\ndocker_image = "{NAME}"\nworkdir = "/app"\n[verifier]\nuser = "root"\n')
    (task,) = await build(HarborTasks(path=tmp_path), podman_sandbox, tmp_path / "cache")
    assert await verdicts(task, podman_sandbox, SOLVE) == (0.0, 1.0)
