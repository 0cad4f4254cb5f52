"""The driver's side of the trainer: starts the ranks, hands over batches, waits for answers; imports no torch."""

import asyncio
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import zmq
import zmq.asyncio

from lego.child import Child
from lego.errors import GateError, TrainerError, UsageError
from lego.learn import packing
from lego.learn.algorithms import GSPO, Algorithm, name_of
from lego.learn.checkpoint_folder import Keep, find
from lego.learn.layout import MODEL_TYPES, Layout, layout_problems, model_sizes
from lego.learn.ranks import Ranks
from lego.learn.report import StepReport, Worst
from lego.learn.schedule import Schedule
from lego.records import Sample

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
STOP_S = 10.0
ROUNDS = 64
"""Rounds of micro-batches that the cost of a document is fitted to."""
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


@dataclass(frozen=True, kw_only=True)
class TrainerSpec:
    """torchtitan ranks that train the policy."""

    lr: float = 1e-6
    """Learning rate of AdamW."""
    lr_warmup_steps: int = 0
    """Steps over which the learning rate rises from 0."""
    lr_decay: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes on from there, to `lr_min_share` of itself at the last step."""
    lr_min_share: float = 0.0
    """Share of the learning rate that a decay ends at."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's two moments."""
    weight_decay: float = 0.0
    """Decay of matrices; norms have none."""
    grad_clip: float = 1.0
    """Largest global gradient norm; larger ones are scaled down."""
    world_size: int = 1
    """Trainer ranks: processes, one a GPU where there are GPUs. FSDP2 shards over those that nothing else takes."""
    replicate: int = 1
    """Copies of the sharded weights (HSDP); divides world_size."""
    expert_parallel: int = 1
    """Ranks over which the experts are spread; divides world_size."""
    tensor_parallel: int = 1
    """Ranks over which each matrix is spread; divides world_size and the key-value heads."""
    context_parallel: int = 1
    """Ranks over which a sequence is spread; only 1: torchtitan 0.3 has it for no packed (varlen) attention."""
    cpu_offload: bool = False
    """Weights, gradients and optimizer state wait in CPU memory; slower, and smaller on the GPU."""
    token_budget: int = 8192
    """Tokens of one micro-batch of one rank; the longest segment that is trained whole."""
    over_budget: Literal["error", "drop", "split"] = "error"
    """A longer segment stops the run, is left out and counted, or is trained in pieces whose context is cut."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the computation; master weights are float32."""
    export_dtype: Literal["float32", "bfloat16"] | None = None
    """Type of exported weights; as `dtype` if not given."""
    threads: int = 2
    """CPU threads of all ranks together; each gets an equal part, at least one."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass to save memory."""
    stall_s: float = 30.0
    """A rank without progress for so long inside a command is taken for stuck."""
    start_timeout_s: float = 300.0
    """Time for all ranks to load the model."""

    @property
    def layout(self) -> Layout:
        """How the ranks share the model."""
        return Layout(
            world_size=self.world_size,
            replicate=self.replicate,
            expert_parallel=self.expert_parallel,
            tensor_parallel=self.tensor_parallel,
            dtype=self.dtype,
            max_length=self.token_budget,
            checkpointing=self.activation_checkpointing,
            offload=self.cpu_offload,
            stall_s=self.stall_s,
        )

    def schedule(self, steps: int | None) -> Schedule:
        """The learning rate over a run of so many steps."""
        return Schedule(
            warmup_steps=self.lr_warmup_steps, decay=self.lr_decay, min_share=self.lr_min_share, steps=steps
        )

    def problems(self, config: Mapping[str, Any] | None, steps: int | None) -> Iterator[str]:
        """Each thing that cannot be, with a model of this config.json if it is known, as `field: value, wanted`."""
        if not self.lr > 0:
            yield f"trainer.lr: {self.lr}, wanted more than 0"
        for name in ("token_budget", "threads"):
            if getattr(self, name) < 1:
                yield f"trainer.{name}: {getattr(self, name)}, wanted 1 or more"
        if self.context_parallel != 1:
            yield (
                f"trainer.context_parallel: {self.context_parallel}, wanted 1: torchtitan 0.3 spreads no sequence of "
                "packed (varlen) attention or of Qwen3.5 over ranks; tensor_parallel spreads activations too"
            )
        try:
            self.schedule(steps)
        except ValueError as error:
            yield f"trainer.{error}"
        if config is not None and config.get("model_type") not in MODEL_TYPES:
            yield f"policy: model_type {config.get('model_type')!r}, wanted one of {', '.join(MODEL_TYPES)}"
        elif config is not None:
            for problem in layout_problems(self.layout, model_sizes(config)):
                yield f"trainer.{problem}"

    @asynccontextmanager
    async def open(
        self,
        model: Path,
        run: Path,
        algorithm: Algorithm | None = None,
        *,
        temperature: float = 1.0,
        steps: int | None = None,
        keep: Keep | None = None,
        shared: Path | None = None,
    ) -> "AsyncIterator[Trainer]":
        """Starts the ranks on a model folder; logs go to `run`/trainer. The ranks end with the block, or the driver.

        Batches pass through a new folder in `shared`, by default the machine's shared memory; checkpoints go to
        `run`/checkpoints, where `keep` says which stay. `steps` are those of the whole run, for the learning rate.

        `temperature` is the one all tokens were sampled at. Raises UsageError for a model that is not there or that
        this layout does not fit, before any process starts; TrainerError if a rank fails.
        """
        _check_model(model)
        problems = list(self.problems(json.loads((model / "config.json").read_text()), steps))
        if problems:
            raise UsageError("\n".join(problems))
        logs = run / "trainer"
        logs.mkdir(parents=True, exist_ok=True)
        (logs / "failure.json").unlink(missing_ok=True)
        with _wire_folder(shared) as wire:
            settings = _settings(self, model, run, wire, algorithm or GSPO()) | {
                "schedule": asdict(self.schedule(steps)),
                "keep": asdict(keep or Keep()),
            }
            async with _opened(self, settings, logs, wire, temperature) as trainer:
                yield trainer


@contextmanager
def _wire_folder(home: Path | None) -> Iterator[Path]:
    """A private folder in `home`, by default in shared memory, for batches and the control socket."""
    home = home or (SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)
    folder = Path(tempfile.mkdtemp(prefix="lego-trainer-", dir=home))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_model(model: Path) -> None:
    if not (model / "config.json").is_file():
        raise UsageError(f"policy: {model} has no config.json; wanted a model folder in HF layout")
    if not any(model.glob("*.safetensors")):
        raise UsageError(f"policy: {model} has no .safetensors file; wanted a model folder in HF layout")


def _settings(spec: TrainerSpec, model: Path, run: Path, shared: Path, algorithm: Algorithm) -> dict[str, Any]:
    """What `worker.Settings` reads, but its schedule and what is kept."""
    return {
        "control": f"ipc://{shared / 'control'}",
        "progress": str(shared / "progress.{rank}"),
        "model": str(model.resolve()),
        "layout": asdict(spec.layout),
        "export_dtype": spec.export_dtype or spec.dtype,
        "lr": spec.lr,
        "betas": spec.betas,
        "weight_decay": spec.weight_decay,
        "grad_clip": spec.grad_clip,
        "algorithm_name": name_of(algorithm),
        "algorithm": asdict(algorithm),
        "checkpoints": str((run / "checkpoints").resolve()),
    }


@asynccontextmanager
async def _opened(
    spec: TrainerSpec, settings: Mapping[str, Any], logs: Path, shared: Path, temperature: float
) -> "AsyncIterator[Trainer]":
    path = shared / "settings.json"
    path.write_text(json.dumps(settings))
    threads = max(1, spec.threads // spec.world_size)
    env = dict(os.environ) | THREADING | {"OMP_NUM_THREADS": str(threads)}
    argv = [sys.executable, "-m", "lego.learn.launch", str(spec.world_size), str(logs), str(path)]
    with zmq.asyncio.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(settings["control"])
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
        self._cost: packing.Cost | None = None
        self._seen: list[tuple[Sequence[int], float]] = []
        self._stepped = False
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
        path = self.shared / "batch.safetensors"
        try:
            batch = await asyncio.to_thread(self._pack, samples, path)
        except ValueError as error:
            raise TrainerError(f"the batch cannot be packed: {error}") from error
        try:
            answer = await self._command("step", batch=str(path), gates=_thresholds(gates, on_policy))
        finally:
            path.unlink(missing_ok=True)
        self._learn_cost(batch, answer.pop("part_seconds"))
        worst = _worst(answer.pop("worst"), samples)
        breach = answer.pop("breach")
        if breach is not None:
            raise GateError(f"{breach}; worst: {worst}; the optimizer did not step")
        seconds = answer.pop("seconds") | {"wall": answer.pop("wall_s")}
        answer["log_ratio_counts"] = tuple(answer["log_ratio_counts"])
        return StepReport(
            **answer,
            fed=batch.fed,
            segments=batch.segments,
            micro_batches=len(batch.ranks[0]),
            dropped=len(batch.dropped),
            split_tokens=batch.split_tokens,
            worst=worst,
            seconds=seconds,
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
            cost=self._cost,
        )
        for lost in batch.dropped:
            log.warning("sample %d of %s is not trained on: %s (%d tokens)", *vars(lost).values())
        packing.write(batch, path)
        return batch

    def _learn_cost(self, batch: packing.Batch, seconds: Sequence[float]) -> None:
        """Fits what documents cost to the last rounds; each lasts as long as its dearest micro-batch."""
        cost = self._cost or packing.Cost()
        rounds = [[part.documents for part in parts] for parts in zip(*batch.ranks, strict=True)]
        seen = [(max(parts, key=cost.seconds), took) for parts, took in zip(rounds, seconds, strict=True)]
        # The first step is slower for reasons that have nothing to do with its documents.
        if self._stepped:
            self._seen = [*self._seen, *seen][-ROUNDS:]
            self._cost = packing.Cost.fit(self._seen)
        self._stepped = True

    async def export(self, path: Path) -> None:
        """Writes all weights as one safetensors file with HF names; it appears complete or not at all."""
        await self._command("export", path=str(path))

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


def _worst(token: Mapping[str, Any] | None, samples: Sequence[Sample]) -> Worst | None:
    if token is None:
        return None
    values = dict(token)
    return Worst(trial=samples[values.pop("sample")].trial, token=values.pop("place"), **values)


def _thresholds(gates: Gates | None, on_policy: bool) -> dict[str, float]:
    if gates is None:
        return {}
    agreement = {"min_pearson": gates.min_pearson, "max_k3": gates.max_k3} if on_policy else {}
    return agreement | {"min_routing_coverage": gates.min_routing_coverage}
