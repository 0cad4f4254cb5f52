"""One run from its recipe to its report: opens the parts, hands them to the loop, closes them again."""

import asyncio
import logging
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from harnesses.checks import checked
from lego.budget import check_tasks
from lego.capture.server import Proxy
from lego.capture.session import Limits as SessionLimits
from lego.chat.render import Renderer
from lego.cli import described, first_expected
from lego.engine.base import Engine
from lego.engine.folder import read_model_folder
from lego.engine.pool import EnginePool
from lego.engine.timely import TimelyEngine
from lego.errors import UsageError
from lego.journal import Journal, digest
from lego.keeper import Keeper
from lego.learn.checkpoint_folder import Keep, find, latest, read_meta
from lego.learn.client import Trainer
from lego.loop import Loop, Parts
from lego.observe.account import SPLITS, Account
from lego.observe.interval import Rate
from lego.observe.memory import PeakMemory
from lego.observe.outputs import Outputs
from lego.observe.store import open_run
from lego.observe.terminal import View, number, open_view
from lego.recipe import Recipe
from lego.resume import SESSIONS, claimed, identity, open_journal
from lego.rollout.mix import Mix, Weighted, mounted, named_by
from lego.rollout.sessions import Sessions
from lego.rollout.stored import GROUPS, Stored
from lego.rollout.trial import Trials
from lego.structured import together
from lego.tasks.task import TaskSet
from lego.tasks.verdict import Grader
from lego.validation import Validator
from sandbox.base import Image, Progress, Sandbox

log = logging.getLogger(__name__)
SHM = Path("/dev/shm")
MARK = "lego-run-"
FIDELITY = {"pearson": ".6f", "k3": ".1e", "routing_coverage": ".1%", "trainable_share": ".1%"}


@dataclass(frozen=True, kw_only=True)
class Ready:
    """What was found out before anything was opened or written."""

    mix: Mix
    experts: int
    renderer: Renderer


async def run(recipe: Recipe, folder: Path, title: str) -> None:
    """Trains as the recipe says; everything it found out lies in `folder` afterwards."""
    _refuse(await checked(recipe.harnesses, recipe.cache.expanduser(), None))
    ready = _ready(recipe)
    first = 0 if recipe.resume is None else read_meta(find(recipe.resume)).step
    with claimed(folder), ExitStack() as stack:
        journal = open_journal(folder, identity(recipe), first)
        store = stack.enter_context(open_run(folder, journal.past.done))
        stack.enter_context(_log_file(folder / "run.log"))
        view, shared = stack.enter_context(open_view(title)), stack.enter_context(shared_folder())
        store.document("recipe.json", described(recipe))
        _say(
            view, f"going on after {journal.past.done} steps in {folder}" if journal.past.begun else f"new run {folder}"
        )
        log.info("times: %s", recipe.budget.times(recipe.crew))
        template = ready.renderer.append_only()
        if template is not None:
            log.warning("the policy's chat template is not append-only; sampled turns stay as sampled: %s", template)
            store.event("template", difference=template)
        memory = PeakMemory()
        out = Outputs(store=store, view=view, account=Account(memory))
        out.restore(folder, journal.past.measured, journal.past.done)
        try:
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(memory.watch())
                await _Run(recipe, ready, folder, out, journal, shared).opened()
                watching.cancel()
        except BaseException as error:
            interrupted = isinstance(error, asyncio.CancelledError)
            out.account.stopped = "interrupted" if interrupted else str(first_expected(error) or repr(error))
            store.event("stopped", cause=out.account.stopped)
            raise
        finally:
            store.document("summary.json", out.account.summary())
        journal.finish()
        _report(view, folder, out.account)


def _say(view: View, text: str) -> None:
    """On the screen and in the log."""
    view.phase(text)
    log.info(text)


def _ready(recipe: Recipe) -> Ready:
    """Refuses what cannot run on this machine or with this policy; nothing is left behind."""
    if shutil.which("git") is None:
        raise UsageError("git is not installed; the patches of trials are made with it")
    experts = read_model_folder(recipe.policy).experts
    return Ready(
        mix=_mix(recipe),
        experts=experts,
        renderer=Renderer.load(recipe.policy, thinking=recipe.chat.thinking, name=recipe.chat.family),
    )


def _mix(recipe: Recipe) -> Mix:
    """Which harness runs what; HarnessNotFetched where one that trials will run is not there."""
    return Mix(
        weights={part.harness.name: part.weight for part in recipe.mix or (Weighted(harness=recipe.harness),)},
        measured=recipe.measured_harness.name,
        seed=recipe.seed,
        ready=mounted(recipe.harnesses, recipe.cache.expanduser()),
    )


class _Run:
    """One life of a run: what its parts are made of."""

    def __init__(
        self, recipe: Recipe, ready: Ready, folder: Path, out: Outputs, journal: Journal, shared: Path
    ) -> None:
        self.recipe, self.ready, self.folder, self.out = recipe, ready, folder, out
        self.journal, self.shared = journal, shared
        self.checkpoints = folder / "checkpoints"
        self.grader = Grader(recipe.sandbox, folder / "verdicts.jsonl")
        self.patches: dict[tuple[str, str], str] = {}
        self.mix = ready.mix

    async def opened(self) -> None:
        """Tasks, engine and trainer opened, trained with, and closed."""
        recipe = self.recipe
        tasks = await self._tasks()
        self.out.view.phase("starting engine and trainer")
        async with together(self._engine(), self._trainer()) as (engine, trainer):
            version = await self._loaded(trainer)
            async with self._trials(engine) as trials:
                parts = Parts(
                    recipe=recipe,
                    tasks=tasks,
                    trials=trials,
                    engine=engine,
                    trainer=trainer,
                    validator=Validator(
                        recipe=recipe,
                        tasks=tasks,
                        pool=engine,
                        open_trials=self._trials,
                        out=self.out,
                        journal=self.journal,
                    ),
                    keeper=Keeper(self.journal, Stored(folder=self.folder / GROUPS), self.out.store),
                    out=self.out,
                    checkpoints=self.checkpoints,
                )
                await Loop(parts, version).run()
            await _keep(trainer, recipe.steps, self.out.view, self.folder)
            await parts.keeper.learned(recipe.steps)

    async def _tasks(self) -> TaskSet:
        """The tasks, verified and with their images; UsageError for those that the run cannot have."""
        recipe, progress = self.recipe, self.out.view.progress
        await recipe.sandbox.reap()
        self.out.view.phase("tasks")
        await recipe.sandbox.prepare((), progress)  # tasks are verified in boxes too
        tasks = await recipe.tasks.build(recipe.cache.expanduser(), recipe.sandbox, progress)
        if not tasks.train:
            raise UsageError("tasks: none of them is for training (split train)")
        check_tasks(tasks, recipe.budget)
        own = named_by(tasks, recipe.known_harnesses).values()
        self.mix = self.ready.mix.with_ready(mounted(own, recipe.cache.expanduser()))
        self.journal.tasks(digest([[task.id, task.split, task.digest] for task in tasks]))
        image = await _prepared(recipe.sandbox, tasks, progress)
        runs = [one.harness for one in self.mix.ready.values()]
        _refuse(await checked(runs, recipe.cache.expanduser(), recipe.sandbox, image))
        return tasks

    def _engine(self) -> AbstractAsyncContextManager[EnginePool]:
        recipe = self.recipe
        return recipe.engine.open(
            recipe.policy,
            self.folder / "logs",
            seed=recipe.seed,
            shared=self.shared,
            stop_ids=self.ready.renderer.stop_ids,
        )

    def _trainer(self) -> AbstractAsyncContextManager[Trainer]:
        recipe = self.recipe
        return recipe.trainer.open(
            recipe.policy,
            self.folder,
            recipe.algorithm,
            temperature=recipe.sampling.temperature,
            steps=recipe.steps,
            keep=Keep(last=recipe.checkpoints.keep_last, best=recipe.checkpoints.keep_best),
            shared=self.shared,
            transfer=recipe.engine.transfer,
            direct=recipe.engine.direct,
        )

    async def _loaded(self, trainer: Trainer) -> int:
        """The steps behind the weights that the trainer goes on from: the run's own newest checkpoint, or another's."""
        own, past = latest(self.checkpoints), self.journal.past
        start = own or self.recipe.resume
        version = await trainer.load(start) if start else 0
        if not past.first <= version <= (past.done if own else past.first):
            raise UsageError(f"{start}: a checkpoint after step {version} in a run that has {past.done} behind it")
        return version

    @asynccontextmanager
    async def _trials(self, engine: Engine) -> AsyncIterator[Trials]:
        """Trials whose model is this engine, behind a proxy of their own."""
        recipe, times = self.recipe, self.recipe.budget.times(self.recipe.crew)
        async with self._proxy(engine).open() as proxy:
            yield Trials(
                sandbox=recipe.sandbox,
                cast=self.mix.of,
                proxy=proxy,
                grader=self.grader,
                sessions=Sessions(
                    folder=self.folder / SESSIONS, which=recipe.rollout.keep_sessions, renderer=self.ready.renderer
                ),
                limits=recipe.rollout.limits,
                context_tokens=recipe.engine.max_model_len,
                output_tokens=recipe.sampling.max_tokens,
                times=times,
                patches=self.patches,
            )

    def _proxy(self, engine: Engine) -> Proxy:
        recipe, experts = self.recipe, self.ready.experts
        limits = SessionLimits(
            context_tokens=recipe.engine.max_model_len,
            max_turns=recipe.rollout.max_turns,
            max_sampled=recipe.rollout.max_trial_tokens,
            experts=experts if experts and recipe.engine.routing is not False else None,
            train_calls=recipe.rollout.train_calls,
        )
        timely = TimelyEngine(engine, recipe.budget.times(recipe.crew).call_s)
        return Proxy(engine=timely, renderer=self.ready.renderer, sampling=recipe.sampling, limits=limits)


def _refuse(problems: Sequence[str]) -> None:
    """UsageError for harnesses that cannot run here."""
    if problems:
        raise UsageError("\n  ".join(["the harnesses cannot run here:", *problems]))


async def _prepared(sandbox: Sandbox, tasks: TaskSet, progress: Progress) -> Image | None:
    """Brings every image that boxes will need, and says in the log what is enforced in them; returns the one tried."""
    images = dict.fromkeys(task.image for task in tasks)
    await sandbox.prepare([image for image in images if image is not None], progress)
    # A task without an image is refused here where boxes are made of nothing else.
    tried = None if None in images else next(iter(images))
    log.info("boxes here: %s", await asyncio.to_thread(sandbox.probe, tried))
    return tried


async def _keep(trainer: Trainer, step: int, view: View, folder: Path) -> None:
    """The whole training state, and the policy alone for everyone else."""
    view.phase("checkpoint and export")
    await trainer.save(step, {})
    await trainer.saved()
    await trainer.save_hf(folder / "policy")


def _report(view: View, folder: Path, account: Account) -> None:
    """The end table and where to look."""
    rates = account.rates
    rows = [(split, *(str(rates[moment].get(split, Rate(0, 0))) for moment in ("start", "end"))) for split in SPLITS]
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
