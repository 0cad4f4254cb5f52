"""Before a run loads a model it has what its boxes need, and knows what this host enforces in them."""

import asyncio
import logging
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from lego.cli import load_recipe
from lego.journal import Journal
from lego.recipe import Recipe
from lego.run import _Run
from lego.tasks.task import Script, Task, TaskSet
from sandbox.base import Box, BoxSpec, Capabilities, FolderImage, Image, Sandbox, SandboxError
from sandbox.bubble import Bubblewrap
from sandbox.docker import Docker
from sandbox.podman import Podman

ROOT = Path(__file__).parent.parent.parent
OUT: Any = SimpleNamespace(view=SimpleNamespace(phase=lambda *_: None, progress=lambda *_: None))


class Nobody:
    """A mix without a harness."""

    ready: ClassVar[dict[str, Any]] = {}

    def with_ready(self, more: object) -> "Nobody":
        return self


READY: Any = SimpleNamespace(renderer=SimpleNamespace(stop_ids=()), mix=Nobody())


class Loaded(Exception):
    """The engine would load its model now."""


@dataclass(frozen=True)
class Told:
    """bubblewrap that tells what it is asked for; images are names only."""

    calls: list[str] = field(default_factory=list)
    boxes: Bubblewrap = Bubblewrap()

    async def reap(self) -> int:
        self.calls.append("reap")
        return 0

    async def prepare(self, images, progress) -> None:
        self.calls.append(f"prepare {[image.path.name for image in images]}")

    def probe(self, image: Image | None = None) -> Capabilities:
        self.calls.append(f"probe {image.path.name if isinstance(image, FolderImage) else image}")
        return self.boxes.probe()

    def open(self, spec: BoxSpec) -> AbstractAsyncContextManager[Box]:
        return self.boxes.open(spec)


def task(name: str, image: str | None = None) -> Task:
    verifier = Script(folder=Path("/tests"), timeout_s=1.0)
    return Task(
        id=name, package=name, split="train", digest=name, base=Path("/base"), instruction="do", verifier=verifier,
        image=None if image is None else FolderImage(path=Path("/", image)),
    )  # fmt: skip


def recipe(sandbox: Any, *tasks: Task) -> Recipe:
    async def build(cache: Path, given: Sandbox, progress) -> TaskSet:
        if isinstance(given, Told):
            given.calls.append("build")
        return TaskSet(tasks)

    def load(*_, **__):
        raise Loaded

    parts: dict[str, Any] = {"tasks": SimpleNamespace(build=build), "engine": SimpleNamespace(open=load)}
    return replace(load_recipe(ROOT / "recipes" / "demo.py"), sandbox=sandbox, **parts)


async def until_loaded(sandbox: Any, folder: Path, *tasks: Task) -> None:
    await _Run(recipe(sandbox, *tasks), READY, folder, OUT, Journal(folder), folder).opened()


async def test_images_are_brought_and_limits_tried_before_a_model_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    told = Told()
    with caplog.at_level(logging.INFO), pytest.raises(Loaded):
        await until_loaded(told, tmp_path, task("a", "one"), task("b", "two"), task("c", "one"))
    assert told.calls == ["reap", "prepare []", "build", "prepare ['one', 'two']", "probe one"]
    assert f"boxes here: {told.boxes.probe()}" in caplog.text


async def test_boxes_of_tasks_without_an_image_are_tried_too(tmp_path: Path):
    told = Told()
    with pytest.raises(Loaded):
        await until_loaded(told, tmp_path, task("a", "one"), task("b"))
    assert told.calls[-2:] == ["prepare ['one']", "probe None"]


@pytest.mark.podman
async def test_containers_of_no_image_are_refused_before_a_model_is_loaded(tmp_path: Path):
    sandbox = Podman(storage=tmp_path / "storage", state=tmp_path / "state")
    with pytest.raises(SandboxError, match=r"sandbox\.image: None, and a task without an image"):
        await until_loaded(sandbox, tmp_path, task("a"))


@pytest.mark.parametrize(
    ("sandbox", "told"),
    [
        (Podman(runtime="runc"), "Podman is not installed: apt-get install --no-install-recommends podman"),
        (Docker(socket=Path("/nowhere.sock")), "no Docker daemon: there is no socket /nowhere.sock; run `systemctl"),
    ],
    ids=["podman", "docker"],
)
def test_without_its_engine_a_recipe_cannot_run_and_a_run_stops_at_once(
    sandbox: Podman | Docker, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    demo = replace(load_recipe(ROOT / "recipes" / "demo.py"), sandbox=sandbox)
    problems = [line for line in demo.problems() if line.startswith("sandbox: ")]
    assert len(problems) == 1 and (told in problems[0] or "want root" in problems[0])
    with pytest.raises(SandboxError) as caught:
        asyncio.run(until_loaded(sandbox, tmp_path, task("a", "one")))
    assert told in str(caught.value)
