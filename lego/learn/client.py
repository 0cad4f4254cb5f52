"""The driver's side of the trainer: starts the ranks, hands over batches, waits for answers; imports no torch."""

import asyncio
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
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
WATCHDOG = "Timeout ("
"""What a rank writes when it ends itself for lack of progress."""
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
        self,
        model: Path,
        run: Path,
        algorithm: Algorithm | None = None,
        *,
        temperature: float = 1.0,
        shared: Path | None = None,
    ) -> "AsyncIterator[Trainer]":
        """Starts the ranks on a model folder; logs go to `run`/trainer. The ranks end with the block, or the driver.

        Batches pass through a new folder in `shared`, by default the machine's shared memory.

        `temperature` is the one all tokens were sampled at. Raises UsageError if there is no model, TrainerError
        if a rank fails.
        """
        _check_model(model)
        logs = run / "trainer"
        logs.mkdir(parents=True, exist_ok=True)
        (logs / "failure.json").unlink(missing_ok=True)
        with _wire_folder(shared) as wire:
            async with _opened(self, model, logs, wire, algorithm or GSPO(), temperature) as trainer:
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


def _settings(spec: TrainerSpec, model: Path, shared: Path, algorithm: Algorithm) -> dict[str, Any]:
    return {
        "control": f"ipc://{shared / 'control'}",
        "progress": str(shared / "progress.{rank}"),
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
    values, path = _settings(spec, model, shared, algorithm), shared / "settings.json"
    path.write_text(json.dumps(values))
    threads = max(1, spec.threads // spec.world_size)
    env = dict(os.environ) | THREADING | {"OMP_NUM_THREADS": str(threads)}
    argv = [sys.executable, "-m", "lego.learn.launch", str(spec.world_size), str(logs), str(path)]
    with zmq.asyncio.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(values["control"])
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
        self.spec, self.logs, self.shared, self.temperature = spec, logs, shared, temperature
        self._child, self._socket = child, socket
        self._busy = asyncio.Lock()
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
            async with asyncio.timeout(0 if self._broken or self._child.status() is not None else STOP_S):
                await self._socket.send(json.dumps({"op": "stop", "args": {}}).encode())
                await self._child.wait()
        except TimeoutError:
            log.warning("trainer ranks did not stop by themselves; ending them")

    async def _command(self, op: str, **args: Any) -> dict[str, Any]:
        async with self._busy:
            if self._child.status() is not None:
                raise self._failure()
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
                    raise self._failure()
                if not answer.done() and self._overdue():
                    raise self._stuck()
            return json.loads(answer.result())
        finally:
            answer.cancel()
            ended.cancel()

    def _progress(self) -> dict[int, tuple[int, float]]:
        """Of each rank that lives: how many steps of work it began, and when (monotonic) the next is due."""
        found = {}
        for rank in range(self.spec.world_size):
            path = self.shared / f"progress.{rank}"
            words = path.read_text().split() if path.exists() else []
            found |= {rank: (int(words[0]), float(words[1]))} if len(words) == 2 else {}
        return found

    def _overdue(self) -> bool:
        return any(due < time.monotonic() for _, due in self._progress().values())

    def _stuck(self) -> TrainerError:
        """The rank that is furthest behind; of those level with it, one that does not just wait for others."""
        counts = {rank: count for rank, (count, _) in self._progress().items()}
        level = [rank for rank, count in counts.items() if count == min(counts.values())]
        tails = {rank: self._tail(rank) for rank in level}
        rank = next((r for r in level if "/torch/" not in _innermost(tails[r])), level[0])
        return TrainerError(
            f"trainer rank {rank} failed: no progress in time (stall_s={self.spec.stall_s:g})\n{tails[rank]}"
        )

    def _failure(self) -> Exception:
        """What stopped the ranks: the first cause, and the last lines its rank wrote."""
        path = self.logs / "failure.json"
        if not path.is_file():
            return TrainerError(
                f"the trainer's launcher ended with status {self._child.status()}\n{self._child.tail()}"
            )
        failure = json.loads(path.read_text())
        rank, what = failure["rank"], failure["what"]
        if WATCHDOG in self._tail(rank):
            return self._stuck()
        if what.startswith("UsageError: "):
            return UsageError(what.removeprefix("UsageError: ").rpartition(" (exit")[0])
        return TrainerError(f"trainer rank {rank} failed: {what}\n{self._tail(rank)}")

    def _tail(self, rank: int) -> str:
        logs = sorted(self.logs.glob(f"*/attempt_0/{rank}/stderr.log"), key=lambda p: p.stat().st_mtime)
        text = logs[-1].read_text(errors="replace") if logs else ""
        return "\n".join(text.splitlines()[-LOG_LINES:])


def _thresholds(gates: Gates | None, on_policy: bool) -> dict[str, float]:
    if gates is None:
        return {}
    agreement = {"min_pearson": gates.min_pearson, "max_k3": gates.max_k3} if on_policy else {}
    return agreement | {"min_routing_coverage": gates.min_routing_coverage}


def _innermost(tail: str) -> str:
    """The innermost frame of the last stack in a log, the main thread's; nothing if no stack was written."""
    _, found, stack = tail.rpartition("(most recent call first):\n")
    return stack.partition("\n")[0] if found else ""
