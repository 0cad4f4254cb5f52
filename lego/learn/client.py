"""The driver's side of the trainer: starts the ranks, hands over batches, waits for answers; imports no torch."""

import asyncio
import glob
import json
import logging
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import zmq
import zmq.asyncio

from lego.child import Child
from lego.engine.transfer import SharedMemory, Transfer
from lego.errors import EngineError, GateError, TrainerError, UsageError
from lego.learn import packing
from lego.learn.checkpoint_folder import find
from lego.learn.costs import Costs
from lego.learn.ranks import Ranks
from lego.learn.report import Measured, StepReport
from lego.learn.settings import Settings
from lego.learn.trainer import TrainerSpec
from lego.records import Sample

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
STOP_S = 10.0
# Threads that spin while they wait for each other take the cores from those they wait for: 5x slower on a busy machine.
THREADING = {"OMP_WAIT_POLICY": "PASSIVE"}


class Gates(Protocol):
    """What a step must hold before the optimizer moves."""

    @property
    def min_pearson(self) -> float: ...
    @property
    def max_k3(self) -> float: ...
    @property
    def min_routing_coverage(self) -> float: ...


@contextmanager
def wire_folder(home: Path | None) -> Iterator[Path]:
    """A private folder in `home`, by default in shared memory, for batches and the control socket."""
    home = home or (SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)
    folder = Path(tempfile.mkdtemp(prefix="lego-trainer-", dir=home))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def weights_folder(transfer: Transfer, wire: Path) -> Iterator[Path]:
    """Where this run's weights pass to engines: `wire`, or a folder of its own among those of other runs.

    There, the folders of this machine's dead runs are removed first. UsageError if the shared folder does not exist.
    """
    if isinstance(transfer, SharedMemory):
        yield wire
        return
    if not transfer.path.is_dir():
        raise UsageError(f"engine.transfer.path: {transfer.path}, wanted an existing folder")
    mark = f"lego-weights-{platform.node()}-"
    for old in transfer.path.glob(f"{glob.escape(mark)}*"):
        owner = old.name.removeprefix(mark).partition("-")[0]
        if owner.isdecimal() and not Path("/proc", owner).exists():
            shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{mark}{os.getpid()}-", dir=transfer.path.resolve()) as folder:
        yield Path(folder)


@asynccontextmanager
async def opened(spec: TrainerSpec, settings: Settings, logs: Path, temperature: float) -> "AsyncIterator[Trainer]":
    """The ranks started with these settings, and ready."""
    shared = Path(settings.places.shared)
    path = shared / "settings.json"
    settings.write(path)
    threads = max(1, spec.threads // spec.world_size)
    env = dict(os.environ) | THREADING | {"OMP_NUM_THREADS": str(threads)}
    argv = [sys.executable, "-m", "lego.learn.launch", str(spec.world_size), str(logs), str(path)]
    with zmq.asyncio.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(settings.places.control)
        async with Child(argv, env=env, log=logs / "launch.log", grace_s=5.0) as child:
            trainer = Trainer(spec, child, socket, logs, shared, temperature)
            await trainer.ready()
            yield trainer
            await trainer.stop()


class Trainer:
    """Running trainer ranks. One command at a time."""

    def __init__(
        self,
        spec: TrainerSpec,
        child: Child,
        socket: zmq.asyncio.Socket,
        logs: Path,
        shared: Path,
        temperature: float,
    ) -> None:
        self.spec, self.shared, self.temperature = spec, shared, temperature
        self._ranks = Ranks(logs=logs, shared=shared, count=spec.world_size, stall_s=spec.stall_s)
        self._child, self._socket = child, socket
        self._busy = asyncio.Lock()
        self._costs = Costs()
        self._batches = 0
        self._broken = False

    @property
    def pid(self) -> int:
        """Root of the tree of trainer processes."""
        return self._child.pid

    async def ready(self) -> None:
        """Waits until all ranks have the model."""
        try:
            async with asyncio.timeout(self.spec.start_timeout_s):
                answer = await self._answer()
        except TimeoutError:
            raise TrainerError(f"trainer not ready after {self.spec.start_timeout_s} s\n{self._child.tail()}") from None
        log.info("trainer ready in %.1f s, %.1f CPU s of rank 0", answer["ready_s"], answer["cpu_s"])

    async def step(
        self, samples: Sequence[Sample], gates: Gates | None = None, *, on_policy: bool = True
    ) -> StepReport:
        """One optimizer step on these samples, whose sampled log-probabilities stand for the old policy's.

        The gates are checked before the optimizer moves: routing coverage always, agreement of probabilities only
        if `on_policy`, that is if all tokens were sampled by the weights now held. Raises GateError if one is
        breached, and then nothing was stepped; TrainerError for samples that cannot be packed.
        """
        # Of its own: a step that was cut short may still be packing, and is not to write over the next one's.
        self._batches += 1
        path = self.shared / f"batch-{self._batches}.safetensors"
        try:
            batch = await asyncio.to_thread(self._pack, samples, path)
        except ValueError as error:
            raise TrainerError(f"the batch cannot be packed: {error}") from error
        try:
            answer = await self._command("step", batch=str(path), gates=_thresholds(gates, on_policy))
        finally:
            path.unlink(missing_ok=True)
        found = Measured.parse(answer)
        rounds = [[part.documents for part in parts] for parts in zip(*batch.ranks, strict=True)]
        self._costs.learn(rounds, found.part_seconds)
        if found.worst is not None:
            found = replace(found, worst=replace(found.worst, trial=samples[found.worst.sample].trial))
        if found.breach is not None:
            raise GateError(f"{found.breach}; worst: {found.worst}; the optimizer did not step")
        return StepReport(
            **vars(found),
            fed=batch.fed,
            segments=batch.segments,
            micro_batches=len(batch.ranks[0]),
            dropped=len(batch.dropped),
            split_tokens=batch.split_tokens,
        )

    def _pack(self, samples: Sequence[Sample], path: Path) -> packing.Batch:
        spec = self.spec
        batch = packing.pack(
            samples,
            ranks=spec.layout.data_ranks,
            token_budget=spec.token_budget,
            temperature=self.temperature,
            over_budget=spec.over_budget,
            multiple_of=spec.tensor_parallel,
            cost=self._costs.cost,
        )
        for lost in batch.dropped:
            said = lost.sample, lost.trial, lost.reason, lost.tokens
            log.warning("sample %d of %s is not trained on: %s (%d tokens)", *said)
        packing.write(batch, path)
        return batch

    async def export(self, version: int) -> Path:
        """Writes all weights as `version` into one safetensors file with HF names, for engines to load; returns it.

        The file is whole or refused by its readers, and stays as it is until the export after the next begins; nobody
        else is to write or remove it. Raises TrainerError, before anything is written, where there is no room.
        """
        return Path((await self._command("export", version=version))["path"])

    async def send(self, url: str, life: str, version: int) -> None:
        """Sends all weights as `version` straight to the server at this URL, whose way is kept for its `life`.

        EngineError if they did not arrive whole, for whatever reason: the server is to be started again.
        """
        failure = (await self._command("send", url=url, life=life, version=version))["failure"]
        if failure is not None:
            raise EngineError(f"weights from the trainer: {failure}")

    async def save(self, step: int, metrics: Mapping[str, float]) -> None:
        """Begins to write the checkpoint of a step, all weights and optimizer state; training may go on meanwhile."""
        await self._command("save", step=step, metrics=dict(metrics))

    async def saved(self) -> None:
        """Waits until the checkpoint in flight is whole. Raises TrainerError if it could not be written."""
        await self._command("saved")

    async def load(self, folder: Path) -> int:
        """Goes on from a checkpoint, or the newest in a folder, written by any number of ranks; returns its step."""
        return (await self._command("load", folder=str(find(folder).resolve())))["step"]

    async def save_hf(self, folder: Path) -> None:
        """Writes a whole HF model folder, with the config and tokenizer of the one it began with."""
        await self._command("save_hf", folder=str(folder))

    async def stop(self) -> None:
        """Lets the ranks end by themselves, for a few seconds."""
        try:
            async with asyncio.timeout(0 if self._broken or self._child.status() is not None else STOP_S):
                await self._socket.send(json.dumps({"op": "stop", "args": {}}).encode())
                await self._child.wait()
        except TimeoutError:
            log.warning("trainer ranks did not stop by themselves; ending them")

    async def _command(self, op: str, **args: Any) -> dict[str, Any]:
        async with self._busy:
            if self._child.status() is not None:
                raise self._ranks.failure(self._child.status(), self._child.tail())
            if self._broken:
                raise TrainerError("an earlier command failed or was cut short; open the trainer again")
            self._broken = True
            await self._socket.send(json.dumps({"op": op, "args": args}).encode())
            answer = await self._answer()
            self._broken = False
            return answer

    async def _answer(self) -> dict[str, Any]:
        """The next answer of rank 0, or the failure of whichever rank failed or stopped first."""
        answer = asyncio.ensure_future(self._socket.recv())
        ended = asyncio.ensure_future(self._child.wait())
        try:
            while not answer.done():
                await asyncio.wait((answer, ended), timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                if not answer.done() and ended.done():
                    raise self._ranks.failure(self._child.status(), self._child.tail())
                if not answer.done() and self._ranks.overdue():
                    raise self._ranks.stuck()
            return json.loads(answer.result())
        finally:
            answer.cancel()
            ended.cancel()


def _thresholds(gates: Gates | None, on_policy: bool) -> dict[str, float]:
    if gates is None:
        return {}
    agreement = {"min_pearson": gates.min_pearson, "max_k3": gates.max_k3} if on_policy else {}
    return agreement | {"min_routing_coverage": gates.min_routing_coverage}
