"""Which tasks are fit to train on: toy tasks with each fault that others met, judged in real boxes."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import date, timedelta
from pathlib import Path

import pytest

from lego.errors import UsageError
from lego.lines import append
from lego.tasks import admission, clock
from lego.tasks.admission import Admission, Admitter, patch_beside
from lego.tasks.clock import Shifted, library
from lego.tasks.copies import Listing, copies, listing, modules
from lego.tasks.folder import Folder
from lego.tasks.task import Task, TaskSet
from sandbox.base import Box, BoxSpec, Mount, Sandbox, SandboxError, StoredImage
from sandbox.bubble import Bubblewrap
from sandbox.gitsnap import unified_patch
from sandbox.podman import Podman
from tests.tasks.conftest import FIXED, SOURCE, changed, judged_by
from tools.base_image import NAME

SOON = repr(date.today() + timedelta(days=365))
COIN = "open('/opt/tests/coin').read() == '1'"
CHECKS = {
    "good": "toy.largest([1, 3, 2]) == 3",
    "always": "toy.double(4) == 8",
    "broken": "toy.largest([1, 3, 2]) == 4",
    "coin": COIN,
    "shaky": f"toy.largest([1, 3, 2]) == 3 and {COIN}",
    "dated": f"toy.largest([1, 3, 2]) == 3 and datetime.date.today() < {SOON}",
    "ripens": f"toy.largest([1, 3, 2]) == 3 or datetime.date.today() > {SOON}",
}


def write(root: Path, name: str, check: str) -> None:
    """A task folder as `lego.tasks.folder` reads it, with a reference solution that mends `largest`."""
    for folder in ("base/toy", "tests"):
        (root / name / folder).mkdir(parents=True)
    (root / name / "base" / "toy" / "__init__.py").write_text(SOURCE)
    (root / name / "tests" / "coin").write_text("1")
    test = f"import datetime\nimport toy\n\ndef test_a():\n    assert {check}\n"
    (root / name / "tests" / "test_toy.py").write_text(test)
    given = {"package": "toy", "split": "train", "test_file": "test_toy.py", "instruction": "mend it"}
    (root / name / "task.json").write_text(json.dumps(given | {"fail_to_pass": ["test_toy::test_a"]}))
    patch = unified_patch(root / name / "base", [changed("toy/__init__.py", FIXED)], lambda path: False)
    (root / name / "solution.patch").write_text(patch)


async def read(root: Path, testenv: Path, sandbox: Bubblewrap) -> TaskSet:
    return await Folder(path=root, testenv=testenv).build(root, sandbox, lambda *_: None)


@dataclass(frozen=True)
class Tossing:
    """A sandbox under which the file `coin` of the hidden tests is 0 and 1 in turn, one box after the other."""

    sandbox: Bubblewrap

    def __getattr__(self, name: str):
        return getattr(self.sandbox, name)

    @asynccontextmanager
    async def open(self, spec: BoxSpec) -> AsyncIterator[Box]:
        for mount in spec.mounts:
            coin = mount.source / "coin"
            if coin.exists():
                coin.write_text("0" if coin.read_text() == "1" else "1")
        async with self.sandbox.open(spec) as box:
            yield box


ASKED = Admission(runs=2, days=1200, at_once=1)


async def test_only_the_good_task_is_admitted_and_each_other_with_its_reason(
    tmp_path: Path, testenv: Path, sandbox: Bubblewrap, monkeypatch: pytest.MonkeyPatch
):
    for name, check in CHECKS.items():
        write(tmp_path / "tasks", name, check)
    tasks, store = await read(tmp_path / "tasks", testenv, sandbox), tmp_path / "decisions.jsonl"
    told: list[str] = []
    tossing = Tossing(sandbox)
    decisions = await Admitter(tossing, ASKED, store).decide_all(tasks, patch_beside, lambda *row: told.append(row[2]))
    said = {decision.task: decision.reason for decision in decisions}
    assert {name for name in said if not said[name]} == {"good"} and [d.task for d in decisions if d.admitted] == [
        "good"
    ]
    for name, reason in {
        "always": "always passes",
        "broken": "reference fails: required but not passed: ",
        "coin": "flaky: 1 of 2 runs of the unchanged base",
        "shaky": "flaky: 1 of 2 runs of the reference solution",
        "dated": "depends on the date: the reference solution fails 1200 days later",
        "ripens": "depends on the date: the unchanged base is judged solved 1200 days later",
    }.items():
        assert said[name].startswith(reason)
    assert len(told) == len(CHECKS) and "good: admitted" in told

    async def never(*_: object) -> None:
        raise AssertionError("a decision was taken twice")

    monkeypatch.setattr(admission, "grade", never)
    again = await Admitter(tossing, ASKED, store).decide_all(tasks, patch_beside, lambda *_: None)
    assert [replace(decision, reused=False) for decision in again] == list(decisions)
    assert all(decision.reused for decision in again)
    with pytest.raises(AssertionError, match="taken twice"):
        await Admitter(tossing, ASKED, store).decide(replace(tasks["good"], digest="another"), patch_beside)


def test_a_store_of_something_else_is_refused(tmp_path: Path):
    append(tmp_path / "store.jsonl", {"key": "1", "outcome": "solved"})
    with pytest.raises(UsageError, match=r"store\.jsonl: a line is no decision"):
        admission.load(tmp_path / "store.jsonl")


async def test_what_cannot_be_judged_is_refused_and_not_kept(toy: Task, sandbox: Bubblewrap, tmp_path: Path):
    store = tmp_path / "store.jsonl"
    admitter = Admitter(sandbox, replace(ASKED, days=0), store)
    good = [changed("toy/__init__.py", FIXED)]
    nothing = await admitter.decide(toy, lambda task: None)
    assert (nothing.admitted, nothing.reason) == (False, "no reference solution")
    (toy.base.parent / "solution.patch").write_text("--- a/toy/none.py\n+++ b/toy/none.py\n@@ -1 +1 @@\n-a\n+b\n")
    assert "does not fit" in (await admitter.decide(toy, patch_beside)).reason
    (tmp_path / "empty").mkdir()
    unjudged = await admitter.decide(judged_by(toy, testenv=tmp_path / "empty"), lambda task: good)
    assert not unjudged.admitted and unjudged.reason.startswith("no verdict: ")
    assert not store.exists()
    assert (await admitter.decide(toy, lambda task: good)).admitted


def test_a_wrong_wish_is_named():
    for wish in ({"runs": 0}, {"days": -1}, {"at_once": 0}):
        with pytest.raises(ValueError, match=next(iter(wish))):
            Admission(**wish)


async def test_a_shifted_box_lives_later_and_measures_as_before(toy: Task, sandbox: Bubblewrap):
    await lives_later(sandbox, BoxSpec(base=toy.base))


@pytest.mark.podman
async def test_on_podman_too(toy: Task, podman_sandbox: Podman):
    await lives_later(podman_sandbox, BoxSpec(base=toy.base, image=StoredImage(name=NAME)))


async def lives_later(sandbox: Sandbox, spec: BoxSpec) -> None:
    source = "import datetime,time,subprocess as s;a=time.monotonic();time.sleep(.1);b=time.monotonic()-a;"
    source += "print(datetime.date.today(), s.check_output(['date','+%F'],text=True).strip(), .1 <= b < 60)"
    later = Shifted(sandbox=sandbox, days=1200, library=library())
    async with later.open(spec) as box:
        result = await box.exec(["python3", "-c", source])
        day = date.today() + timedelta(days=1200)
        assert result.stdout.decode() == f"{day} {day} True\n", result.stderr
        await box.put(Path("/tmp/a"), b"a")
        assert await box.get(Path("/tmp/a")) == b"a" and await box.changes() == ()
    with pytest.raises(SandboxError, match="cannot be shifted"):
        async with replace(later, library=Path(__file__)).open(spec):
            pass


def test_without_the_library_the_command_that_brings_it_is_said(sandbox: Bubblewrap, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(clock.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(clock.Path, "glob", lambda *_: iter(()))
    with pytest.raises(UsageError, match="pip install libfaketime"):
        Admitter(sandbox, ASKED)
    Admitter(sandbox, replace(ASKED, days=0))


PACKAGED = {
    "/usr/lib/python3/dist-packages/toy": "/usr/lib/python3/dist-packages/toy/__init__.py",
    "/opt/x/site-packages/toy-1.2.dist-info": "",
    "/opt/x/site-packages/Toy-1.2-py3.11.egg-info": "",
    "/opt/x/site-packages/toy.egg-link": "",
    "/opt/x/site-packages/__editable__.toy-0.1.pth": "",
    "/wheels/toy-2.0-py3-none-any.whl": "",
    "/wheels/toy-2.0.tar.gz": "",
    "/var/cache/apt/archives/python3-toy_1.0-1_all.deb": "",
    "/opt/conda/pkgs/toy-1.0-py311_0": "",
    "/opt/conda/conda-meta/toy-1.0-py311_0.json": "",
    "/srv/pypi/simple/toy": "",
    "/opt/uv/wheels-v5/pypi/toy": "",
    "/opt/pip/http-v2/a/b/c": "",
    "/opt/tool/_vendor/toy": "/opt/tool/_vendor/toy/__pycache__/core.cpython-311.pyc",
    "/opt/lib/toy": "/opt/lib/toy.cpython-311-x86_64-linux-gnu.so",
}
NOT_COPIES = (
    "/usr/lib/python3/dist-packages/toys/__init__.py",
    "/opt/x/site-packages/toy_box-1.0.dist-info",
    "/opt/x/site-packages/mytoy-1.0.dist-info",
    "/usr/share/toy-1.svg",
    "/usr/share/toy/readme.py.txt",
    "/opt/x/site-packages/other/io.py",
)


@pytest.mark.parametrize(("path", "shown"), PACKAGED.items(), ids=PACKAGED)
def test_every_kind_of_copy_is_found(toy: Task, path: str, shown: str):
    (toy.base / "toy" / "core.py").touch()
    assert copies(toy, Listing(paths=(*NOT_COPIES, shown or path))) == (path,)


def test_names_are_compared_as_indexes_do_and_likeness_is_no_copy(toy: Task):
    assert copies(toy, Listing(paths=NOT_COPIES)) == ()
    dotted = replace(toy, package="My.Toy")
    assert copies(dotted, Listing(paths=("/w/my_toy-1.0-py3-none-any.whl", "/w/mytoy-1.0.zip"))) == (
        "/w/my_toy-1.0-py3-none-any.whl",
    )


def test_a_module_of_another_name_is_a_copy_by_its_files(toy: Task):
    task = replace(toy, package="PyToy")
    for name in ("core", "io", "text"):
        (toy.base / "toy" / f"{name}.py").touch()
    (toy.base / "tests").mkdir()
    (toy.base / "tests" / "test_a.py").touch()
    assert modules(task).keys() == {"toy"}
    few = ("/s/toy/__init__.py", "/s/toy/core.py", "/s/toy/io.py", "/s/tests/test_a.py")
    assert copies(task, Listing(paths=few)) == ()
    assert copies(task, Listing(paths=(*few, "/s/toy/text.py"))) == ("/s/toy",)


def test_a_package_installed_from_the_work_folder_is_no_copy(toy: Task):
    info, pth, link = "/s/toy-1.dist-info", "/s/__editable__.toy-1.pth", "/s/toy.egg-link"
    home = {f"{info}/direct_url.json": '{"url": "file:///repo"}', pth: "/repo/src\n", link: "/repo\n."}
    assert copies(toy, Listing(paths=(info, pth, link), links=home)) == ()
    away = {path: text.replace("/repo", "/repository") for path, text in home.items()}
    assert copies(toy, Listing(paths=(info, pth, link), links=away)) == (info, pth, link)


async def test_a_copy_among_the_tools_of_a_box_is_found_and_the_solution_is_not_in_it(
    toy: Task, sandbox: Bubblewrap, tmp_path: Path
):
    tools = tmp_path / "tools"
    (tools / "toy").mkdir(parents=True)
    (tools / "toy" / "__init__.py").write_text(FIXED)
    for name, url in (("toy", "file:///elsewhere"), ("other", "file:///repo")):
        (tools / f"{name}-1.dist-info").mkdir()
        (tools / f"{name}-1.dist-info" / "direct_url.json").write_text(json.dumps({"url": url}))
    (toy.base.parent / "solution.patch").write_text("secret")
    mounts = (Mount(source=tools, target=Path("/opt/agent/site-packages")),)
    decision = await Admitter(sandbox, replace(ASKED, days=0), mounts=mounts).decide(
        toy, lambda task: [changed("a", "")]
    )
    assert not decision.admitted and "/opt/agent/site-packages/toy" in decision.reason
    seen = await listing(toy, sandbox, mounts)
    found = ("/opt/agent/site-packages/toy-1.dist-info", "/opt/agent/site-packages/toy")
    assert copies(toy, seen) == found and not [path for path in seen.paths if path.startswith("/repo")]
    assert copies(toy, await listing(toy, sandbox, ())) == ()
    # The interpreter's own folder is in these boxes too.
    assert "/pip-" in " ".join(copies(replace(toy, package="pip"), seen))
    async with sandbox.open(BoxSpec(base=toy.base, mounts=mounts)) as box:
        assert (await box.exec(["find", "/", "-name", "solution.patch"])).stdout == b""


def test_the_command_line_says_what_it_refused(tmp_path: Path, testenv: Path):
    write(tmp_path, "always", CHECKS["always"])
    argv = [sys.executable, "-m", "lego.tasks.admission", str(tmp_path), "--testenv", str(testenv), "--runs", "1"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 1 and "1/1 always: always passes" in done.stderr and "1 refused: always" in done.stderr
    assert json.loads((tmp_path / "admission.jsonl").read_text())["reason"].startswith("always passes")
