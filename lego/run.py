"""One run from its recipe to its report: opens the parts, hands them to the loop, closes them again."""

import asyncio
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lego.budget import check_tasks
from lego.capture.server import Proxy
from lego.capture.session import Limits as SessionLimits
from lego.chat.render import Renderer
from lego.cli import described, first_expected
from lego.engine.base import Engine
from lego.engine.folder import read_model_folder
from lego.engine.timely import TimelyEngine
from lego.errors import UsageError
from lego.learn.checkpoint_folder import Keep
from lego.learn.client import Trainer
from lego.loop import Loop
from lego.observe.account import SPLITS, Account
from lego.observe.interval import Rate
from lego.observe.memory import PeakMemory
from lego.observe.outputs import Outputs
from lego.observe.store import open_run
from lego.observe.terminal import View, number, open_view
from lego.recipe import Recipe
from lego.rollout.sessions import Sessions
from lego.rollout.trial import Trials
from lego.structured import together
from lego.tasks.task import TaskSet
from lego.tasks.verdict import Grader
from sandbox.base import Mount, Progress, Sandbox

log = logging.getLogger(__name__)
SHM = Path("/dev/shm")
MARK = "lego-run-"
FIDELITY = {"pearson": ".6f", "k3": ".1e", "routing_coverage": ".1%", "trainable_share": ".1%"}


@dataclass(frozen=True, kw_only=True)
class Ready:
    """What was found out before anything was opened or written."""

    mounts: tuple[Mount, ...]
    experts: int
    renderer: Renderer


async def run(recipe: Recipe, folder: Path, title: str) -> None:
    """Trains as the recipe says; everything it found out lies in `folder` afterwards."""
    ready = _ready(recipe)
    with open_run(folder) as store, _log_file(folder / "run.log"), open_view(title) as view, shared_folder() as shared:
        store.document("recipe.json", described(recipe))
        log.info("times: %s", recipe.budget.times(recipe.crew))
        template = ready.renderer.append_only()
        if template is not None:
            log.warning("the policy's chat template is not append-only; sampled turns stay as sampled: %s", template)
            store.event("template", difference=template)
        memory = PeakMemory()
        out = Outputs(store=store, view=view, account=Account(memory))
        try:
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(memory.watch())
                await _opened(recipe, ready, folder, out, shared)
                watching.cancel()
        except BaseException as error:
            out.account.stopped = str(first_expected(error) or repr(error))
            store.event("stopped", cause=out.account.stopped)
            raise
        finally:
            store.document("summary.json", out.account.summary())
    _report(view, folder, out.account)


def _ready(recipe: Recipe) -> Ready:
    """Refuses what cannot run on this machine or with this policy; nothing is left behind."""
    if shutil.which("git") is None:
        raise UsageError("git is not installed; the patches of trials are made with it")
    experts = read_model_folder(recipe.policy).experts
    return Ready(
        mounts=recipe.harness.mounts(recipe.cache.expanduser()),
        experts=experts,
        renderer=Renderer.load(recipe.policy, thinking=recipe.chat.thinking, name=recipe.chat.family),
    )


async def _opened(recipe: Recipe, ready: Ready, folder: Path, out: Outputs, shared: Path) -> None:
    """Tasks, engine, trainer and proxy opened, trained with, and closed."""
    await recipe.sandbox.reap()
    out.view.phase("tasks")
    await recipe.sandbox.prepare((), out.view.progress)  # tasks are verified in boxes too
    tasks = await recipe.tasks.build(recipe.cache.expanduser(), recipe.sandbox, out.view.progress)
    if not tasks.train:
        raise UsageError("tasks: none of them is for training (split train)")
    check_tasks(tasks, recipe.budget)
    await _prepared(recipe.sandbox, tasks, out.view.progress)
    out.view.phase("starting engine and trainer")
    async with (
        together(
            recipe.engine.open(
                recipe.policy, folder / "logs", seed=recipe.seed, shared=shared, stop_ids=ready.renderer.stop_ids
            ),
            recipe.trainer.open(
                recipe.policy,
                folder,
                recipe.algorithm,
                temperature=recipe.sampling.temperature,
                steps=recipe.steps,
                keep=Keep(last=recipe.checkpoints.keep_last, best=recipe.checkpoints.keep_best),
                shared=shared,
            ),
        ) as (engine, trainer),
        _proxy(recipe, ready, engine).open() as proxy,
    ):
        trials = _trials(recipe, ready, proxy, folder)
        first = await trainer.load(recipe.resume) if recipe.resume else 0
        if first >= recipe.steps:
            raise UsageError(f"steps: {recipe.steps}, but {recipe.resume} has {first} behind it; wanted more")
        await Loop(recipe, tasks, trials, engine, trainer, out, shared, first).run()
        await _keep(trainer, recipe.steps, out.view, folder)


async def _prepared(sandbox: Sandbox, tasks: TaskSet, progress: Progress) -> None:
    """Brings every image that boxes will need, and says in the log what is enforced in them."""
    images = dict.fromkeys(task.image for task in tasks)
    await sandbox.prepare([image for image in images if image is not None], progress)
    # A task without an image is refused here where boxes are made of nothing else.
    tried = None if None in images else next(iter(images))
    log.info("boxes here: %s", await asyncio.to_thread(sandbox.probe, tried))


def _proxy(recipe: Recipe, ready: Ready, engine: Engine) -> Proxy:
    limits = SessionLimits(
        context_tokens=recipe.engine.max_model_len,
        max_turns=recipe.rollout.max_turns,
        max_sampled=recipe.rollout.max_trial_tokens,
        experts=ready.experts if ready.experts and recipe.engine.routing is not False else None,
    )
    engine = TimelyEngine(engine, recipe.budget.times(recipe.crew).call_s)
    return Proxy(engine=engine, renderer=ready.renderer, sampling=recipe.sampling, limits=limits)


def _trials(recipe: Recipe, ready: Ready, proxy: Proxy, folder: Path) -> Trials:
    return Trials(
        sandbox=recipe.sandbox,
        harness=recipe.harness,
        mounts=ready.mounts,
        proxy=proxy,
        grader=Grader(recipe.sandbox, folder / "verdicts.jsonl"),
        sessions=Sessions(folder=folder / "sessions", which=recipe.rollout.keep_sessions, renderer=ready.renderer),
        limits=recipe.rollout.limits,
        context_tokens=recipe.engine.max_model_len,
        output_tokens=recipe.sampling.max_tokens,
        times=recipe.budget.times(recipe.crew),
    )


async def _keep(trainer: Trainer, step: int, view: View, folder: Path) -> None:
    """The whole training state, and the policy alone for everyone else."""
    view.phase("checkpoint and export")
    await trainer.save(step, {})
    await trainer.save_hf(folder / "policy")
    await trainer.saved()


def _report(view: View, folder: Path, account: Account) -> None:
    """The end table and where to look."""
    rates = account.rates
    rows = [(split, *(str(rates[moment].get(split, Rate(0, 0))) for moment in rates)) for split in SPLITS]
    view.report(
        ("tasks", "solved at the start, 95 %", "solved at the end, 95 %"),
        rows,
        (
            "   ".join(f"{name} {number(account.fidelity()[name], form)}" for name, form in FIDELITY.items()),
            f"{account.trials} trials, {account.reused} verdicts reused, peak memory {account.memory.peak_gib:.1f} GiB",
            f"numbers: {folder / 'summary.json'}   every trial: {folder / 'trials.jsonl'}",
            f"trained policy: {folder / 'policy'}   curves: tensorboard --logdir {folder / 'tensorboard'}",
        ),
    )
    view.picture(folder / "screen.svg")


@contextmanager
def _log_file(path: Path) -> Iterator[None]:
    """Sends the log of this program to the run folder, and only there."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.setLevel(before)
        root.removeHandler(handler)
        handler.close()


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder in shared memory, removed at the end; those of dead runs are removed first."""
    home = SHM if os.access(SHM, os.W_OK) else Path(tempfile.gettempdir())
    for old in home.glob(f"{MARK}*"):
        owner = re.match(rf"{MARK}(\d+)-", old.name)
        if owner and not Path("/proc", owner[1]).exists():
            shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{MARK}{os.getpid()}-", dir=home) as folder:
        yield Path(folder)
