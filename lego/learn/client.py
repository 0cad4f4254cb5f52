"""The driver's side of the trainer: starts the ranks, hands over batches, waits for answers; imports no torch."""

import asyncio
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import zmq
import zmq.asyncio

from lego.child import Child
from lego.errors import GateError, TrainerError, UsageError
from lego.learn import packing
from lego.learn.algorithms import GSPO, Algorithm
from lego.records import Sample

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
LOG_LINES = 30
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


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one optimizer step found; sums are over all ranks."""

    loss: float
    grad_norm: float
    tokens: int
    """Trained (sampled) tokens."""
    fed: int
    """Tokens that passed the network."""
    segments: int
    micro_batches: int
    """Of each rank."""
    pearson: float
    """Correlation of sampled and trainer probabilities on trained tokens."""
    max_logprob_difference: float
    max_probability_difference: float
    k3: float
    ratio_mean: float
    clip_fraction: float
    entropy: float
    ess: float
    """Effective share of the tokens under their ratios, 0 to 1."""
    rows_needed: int
    """MoE layers x fed tokens."""
    rows_replayed: int
    rows_live: int
    peak_rss_gib: float
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def routing_coverage(self) -> float:
        """Share of the needed routing rows that were replayed."""
        return self.rows_replayed / self.rows_needed

    def metrics(self) -> dict[str, float]:
        """Its numbers by metric name."""
        numbers = {f"train/{k}": float(v) for k, v in asdict(self).items() if k != "seconds"}
        phases = {f"seconds/train_{k}": v for k, v in self.seconds.items()}
        return numbers | phases | {"train/routing_coverage": self.routing_coverage}


@dataclass(frozen=True, kw_only=True)
class TrainerSpec:
    """torchtitan ranks that train the policy."""

    lr: float = 1e-6
    """Learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's two moments."""
    weight_decay: float = 0.0
    """Decay of matrices; norms have none."""
    grad_clip: float = 1.0
    """Largest global gradient norm; larger ones are scaled down."""
    world_size: int = 1
    """Trainer ranks: processes, one a GPU where there are GPUs."""
    expert_parallel: int = 1
    """Ranks over which the experts are spread; divides world_size."""
    token_budget: int = 8192
    """Tokens of one micro-batch of one rank; the longest trainable segment."""
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

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"trainer.lr: {self.lr}, wanted more than 0")
        for name in ("world_size", "expert_parallel", "token_budget", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"trainer.{name}: {getattr(self, name)}, wanted 1 or more")
        if self.world_size % self.expert_parallel:
            raise ValueError(
                f"trainer.expert_parallel: {self.expert_parallel}, wanted a divisor of world_size={self.world_size}"
            )

    @asynccontextmanager
    async def open(
        self, model: Path, run: Path, algorithm: Algorithm | None = None, *, temperature: float = 1.0
    ) -> "AsyncIterator[Trainer]":
        """Starts the ranks on a model folder; logs go to `run`/trainer. The ranks end with the block, or the driver.

        `temperature` is the one all tokens were sampled at. Raises UsageError if there is no model, TrainerError
        if a rank fails.
        """
        _check_model(model)
        logs = run / "trainer"
        logs.mkdir(parents=True, exist_ok=True)
        (logs / "failure.json").unlink(missing_ok=True)
        shared = Path(tempfile.mkdtemp(prefix="lego-trainer-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None))
        try:
            async with _opened(self, model, logs, shared, algorithm or GSPO(), temperature) as trainer:
                yield trainer
        finally:
            shutil.rmtree(shared, ignore_errors=True)


def _check_model(model: Path) -> None:
    if not (model / "config.json").is_file():
        raise UsageError(f"policy: {model} has no config.json; wanted a model folder in HF layout")
    if not any(model.glob("*.safetensors")):
        raise UsageError(f"policy: {model} has no .safetensors file; wanted a model folder in HF layout")


def _settings(spec: TrainerSpec, model: Path, control: str, algorithm: Algorithm) -> dict[str, Any]:
    return {
        "control": control,
        "model": str(model.resolve()),
        "world_size": spec.world_size,
        "expert_parallel": spec.expert_parallel,
        "dtype": spec.dtype,
        "export_dtype": spec.export_dtype or spec.dtype,
        "token_budget": spec.token_budget,
        "checkpointing": spec.activation_checkpointing,
        "stall_s": spec.stall_s,
        "lr": spec.lr,
        "betas": spec.betas,
        "weight_decay": spec.weight_decay,
        "grad_clip": spec.grad_clip,
        "algorithm": type(algorithm).__name__,
        "algorithm_fields": asdict(algorithm),
    }


@asynccontextmanager
async def _opened(
    spec: TrainerSpec, model: Path, logs: Path, shared: Path, algorithm: Algorithm, temperature: float
) -> "AsyncIterator[Trainer]":
    control, settings = f"ipc://{shared / 'control'}", shared / "settings.json"
    settings.write_text(json.dumps(_settings(spec, model, control, algorithm)))
    threads = max(1, spec.threads // spec.world_size)
    env = dict(os.environ) | THREADING | {"OMP_NUM_THREADS": str(threads)}
    argv = [sys.executable, "-m", "lego.learn.launch", str(spec.world_size), str(logs), str(settings)]
    with zmq.asyncio.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(control)
        async with Child(argv, env=env, log=logs / "launch.log") as child:
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
        self.spec, self.logs, self.shared, self.temperature = spec, logs, shared, temperature
        self._child, self._socket = child, socket
        self._busy = asyncio.Lock()

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

    async def step(self, samples: Sequence[Sample], gates: Gates | None = None, *, on_policy: bool = True) -> StepReport:
        """One optimizer step on these samples, whose sampled log-probabilities stand for the old policy's.

        The gates are checked before the optimizer moves: routing coverage always, agreement of probabilities only
        if `on_policy`, that is if all tokens were sampled by the weights now held. Raises GateError if one is
        breached, and then nothing was stepped; ValueError for samples that cannot be packed.
        """
        path = self.shared / "batch.safetensors"
        batch = await asyncio.to_thread(self._pack, samples, path)
        try:
            answer = await self._command("step", batch=str(path), gates=_thresholds(gates, on_policy))
        finally:
            path.unlink(missing_ok=True)
        breach = answer.pop("breach")
        if breach is not None:
            raise GateError(f"{breach}; the optimizer did not step")
        seconds = answer.pop("seconds") | {"wall": answer.pop("wall_s")}
        return StepReport(
            **answer,
            fed=batch.fed,
            segments=batch.segments,
            micro_batches=len(batch.ranks[0]),
            seconds=seconds,
        )

    def _pack(self, samples: Sequence[Sample], path: Path) -> packing.Batch:
        batch = packing.pack(
            samples, ranks=self.spec.world_size, token_budget=self.spec.token_budget, temperature=self.temperature
        )
        packing.write(batch, path)
        return batch

    async def export(self, path: Path) -> None:
        """Writes all weights as one safetensors file with HF names; it appears complete or not at all."""
        await self._command("export", path=str(path))

    async def save(self, folder: Path) -> None:
        """Writes a distributed checkpoint: weights and optimizer state."""
        await self._command("save", folder=str(folder))

    async def load(self, folder: Path) -> None:
        """Continues from a checkpoint, written by any number of ranks."""
        if not (folder / ".metadata").is_file():
            raise UsageError(f"{folder}: no trainer checkpoint here")
        await self._command("load", folder=str(folder))

    async def save_hf(self, folder: Path) -> None:
        """Writes a whole HF model folder, with the config and tokenizer of the one it began with."""
        await self._command("save_hf", folder=str(folder))

    async def stop(self) -> None:
        """Lets the ranks end by themselves, for a few seconds."""
        try:
            async with asyncio.timeout(STOP_S if self._child.status() is None else 0):
                await self._socket.send(json.dumps({"op": "stop", "args": {}}).encode())
                await self._child.wait()
        except TimeoutError:
            log.warning("trainer ranks did not stop by themselves")

    async def _command(self, op: str, **args: Any) -> dict[str, Any]:
        async with self._busy:
            if self._child.status() is not None:
                raise self._failure()
            await self._socket.send(json.dumps({"op": op, "args": args}).encode())
            return await self._answer()

    async def _answer(self) -> dict[str, Any]:
        """The next answer of rank 0, or the failure of whichever rank failed first."""
        answer = asyncio.ensure_future(self._socket.recv())
        ended = asyncio.ensure_future(self._child.wait())
        try:
            await asyncio.wait((answer, ended), return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return json.loads(answer.result())
            raise self._failure()
        finally:
            answer.cancel()
            ended.cancel()

    def _failure(self) -> Exception:
        """What stopped the ranks: the first cause, and the last lines its rank wrote."""
        path = self.logs / "failure.json"
        if not path.is_file():
            return TrainerError(f"the trainer's launcher ended with status {self._child.status()}\n{self._child.tail()}")
        failure = json.loads(path.read_text())
        tails = {rank: self._tail(rank) for rank in range(self.spec.world_size)}
        rank, what = _culprit(failure, tails, self.spec.stall_s)
        usage = "UsageError: "
        if usage in what:
            return UsageError(what.partition(usage)[2])
        return TrainerError(f"trainer rank {rank} failed: {what}\n{tails[rank]}")

    def _tail(self, rank: int) -> str:
        logs = sorted(self.logs.glob(f"*/attempt_0/{rank}/stderr.log"), key=lambda p: p.stat().st_mtime)
        text = logs[-1].read_text(errors="replace") if logs else ""
        return "\n".join(text.splitlines()[-LOG_LINES:])


def _thresholds(gates: Gates | None, on_policy: bool) -> dict[str, float]:
    if gates is None:
        return {}
    agreement = {"min_pearson": gates.min_pearson, "max_k3": gates.max_k3} if on_policy else {}
    return agreement | {"min_routing_coverage": gates.min_routing_coverage}


def _culprit(failure: Mapping[str, Any], tails: Mapping[int, str], stall_s: float) -> tuple[int, str]:
    """The rank to blame and why.

    When a watchdog fired, ranks that wait for others inside torch are stuck too: the one to blame is one
    that is not, or that could not even write its stack.
    """
    rank, what = failure["rank"], failure["what"]
    if "Timeout (" not in tails[rank]:
        return rank, what
    waiting = {r for r, tail in tails.items() if "/torch/" in _innermost(tail)}
    suspects = [r for r in tails if r not in waiting] or [rank]
    return suspects[0], f"no progress for {stall_s:g} s"


def _innermost(tail: str) -> str:
    """The innermost frame of the last stack in a log, the main thread's; nothing if no stack was written."""
    _, found, stack = tail.rpartition("(most recent call first):\n")
    return stack.partition("\n")[0] if found else ""
