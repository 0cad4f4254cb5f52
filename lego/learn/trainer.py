"""The trainer as a recipe names it: fields, what they cannot be, how it is opened; imports neither torch nor zmq."""

import json
import math
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from lego.engine.transfer import Direct, SharedMemory, Transfer
from lego.errors import UsageError
from lego.learn.algorithms import GSPO, Algorithm
from lego.learn.checkpoint_folder import Keep
from lego.learn.layout import MODEL_TYPES, Checkpointing, DType, Layout, layout_problems, model_sizes
from lego.learn.schedule import Decay, Schedule
from lego.learn.settings import Places, Settings

if TYPE_CHECKING:
    from lego.learn.client import Trainer


@dataclass(frozen=True, kw_only=True)
class TrainerSpec:
    """torchtitan ranks that train the policy."""

    lr: float = 1e-6
    """Learning rate of AdamW."""
    lr_warmup_steps: int = 0
    """Steps over which the learning rate rises from 0."""
    lr_decay: Decay = "constant"
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
    """Ranks over which the experts are spread; divides the experts and world_size / replicate."""
    tensor_parallel: int = 1
    """Ranks over which each matrix is spread; divides world_size, the model's heads and token_budget."""
    context_parallel: int = 1
    """Ranks over which a sequence is spread; only 1: torchtitan 0.3 has it for no packed (varlen) attention."""
    cpu_offload: bool = False
    """Weights, gradients and optimizer state wait in CPU memory; slower, and smaller on the GPU."""
    token_budget: int = 8192
    """Tokens of one micro-batch of one rank; the longest segment that is trained whole."""
    over_budget: Literal["error", "drop", "split"] = "error"
    """A longer segment stops the run, is left out and counted, or is trained in pieces whose context is cut."""
    dtype: DType = "float32"
    """Type of the computation; master weights are float32."""
    export_dtype: DType | None = None
    """Type of exported weights; as `dtype` if not given."""
    threads: int = 2
    """CPU threads of all ranks together; each gets an equal part, at least one."""
    activation_checkpointing: Checkpointing = "none"
    """Activations computed again in the backward pass to save memory."""
    stall_s: float = 25.0
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
            activation_checkpointing=self.activation_checkpointing,
            cpu_offload=self.cpu_offload,
            stall_s=self.stall_s,
        )

    def schedule(self, steps: int | None) -> Schedule:
        """The learning rate over a run of so many steps."""
        return Schedule(
            warmup_steps=self.lr_warmup_steps, decay=self.lr_decay, min_share=self.lr_min_share, steps=steps
        )

    def problems(self, config: Mapping[str, Any] | None, steps: int | None) -> Iterator[str]:
        """Each thing that cannot be, with a model of this config.json if it is known, as `field: value, wanted`."""
        yield from self._wrong_numbers()
        yield from self._wrong_words()
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

    def _wrong_numbers(self) -> Iterator[str]:
        for name in ("lr", "start_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                yield f"trainer.{name}: {getattr(self, name)}, wanted more than 0 and finite"
        if not self.grad_clip > 0:
            yield f"trainer.grad_clip: {self.grad_clip}, wanted more than 0; inf for no bound"
        if not 0 <= self.weight_decay < math.inf:
            yield f"trainer.weight_decay: {self.weight_decay}, wanted 0 or more and finite"
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            yield f"trainer.betas: {self.betas}, wanted two numbers, each 0 or more and less than 1"
        if not 1 <= self.stall_s < math.inf:
            yield f"trainer.stall_s: {self.stall_s}, wanted 1 or more and finite"
        for name in ("token_budget", "threads"):
            if getattr(self, name) < 1:
                yield f"trainer.{name}: {getattr(self, name)}, wanted 1 or more"
        if self.tensor_parallel > 1 and self.token_budget % self.tensor_parallel:
            wanted = f"a multiple of tensor_parallel {self.tensor_parallel}"
            yield f"trainer.token_budget: {self.token_budget}, wanted {wanted}"

    def _wrong_words(self) -> Iterator[str]:
        """Of a recipe's own: the command line takes none that is not in a field's list."""
        for name, hint in get_type_hints(type(self)).items():
            kinds = [kind for kind in (hint, *get_args(hint)) if get_origin(kind) is Literal]
            words = [word for kind in kinds for word in get_args(kind)]
            value = getattr(self, name)
            if words and value not in words and not (value is None and hint not in kinds):
                yield f"trainer.{name}: {value!r}, wanted one of {', '.join(words)}"

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
        transfer: Transfer | None = None,
        direct: Direct | None = None,
    ) -> "AsyncIterator[Trainer]":
        """Starts the ranks on a model folder; logs go to `run`/trainer. The ranks end with the block, or the driver.

        Batches pass through a new folder in `shared`, by default the machine's shared memory; checkpoints go to
        `run`/checkpoints, where `keep` says which stay. `transfer` is how exported weights reach engines, by default
        through that new folder; `direct` is how `send` brings them there. `steps` are those of the whole run, for
        the learning rate.

        `temperature` is the one all tokens were sampled at. Raises UsageError for a model that is not there or that
        this layout does not fit, before any process starts; TrainerError if a rank fails.
        """
        problems = list(self.problems(_model_config(model), steps))
        if problems:
            raise UsageError("\n".join(problems))
        from lego.learn.client import opened, weights_folder, wire_folder  # here, so that a recipe loads no ZeroMQ

        logs = run / "trainer"
        logs.mkdir(parents=True, exist_ok=True)
        (logs / "failure.json").unlink(missing_ok=True)
        with wire_folder(shared) as wire, weights_folder(transfer or SharedMemory(), wire) as weights:
            places = Places(
                control=f"ipc://{wire / 'control'}",
                shared=str(wire),
                weights=str(weights),
                in_place=weights == wire,
                direct=direct,
            )
            settings = self._settings(model, run, places, algorithm or GSPO(), self.schedule(steps), keep or Keep())
            async with opened(self, settings, logs, temperature) as trainer:
                yield trainer

    def _settings(
        self, model: Path, run: Path, places: Places, algorithm: Algorithm, schedule: Schedule, keep: Keep
    ) -> Settings:
        return Settings(
            places=places,
            model=str(model.resolve()),
            layout=self.layout,
            export_dtype=self.export_dtype or self.dtype,
            lr=self.lr,
            betas=self.betas,
            weight_decay=self.weight_decay,
            grad_clip=self.grad_clip,
            schedule=schedule,
            algorithm=algorithm,
            checkpoints=str((run / "checkpoints").resolve()),
            keep=keep,
        )


def _model_config(model: Path) -> Mapping[str, Any]:
    """The config.json of a model folder; UsageError if this is none."""
    if not (model / "config.json").is_file():
        raise UsageError(f"policy: {model} has no config.json; wanted a model folder in HF layout")
    try:
        config = json.loads((model / "config.json").read_bytes())
    except ValueError as error:
        raise UsageError(f"policy: {model / 'config.json'} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise UsageError(f"policy: {model / 'config.json'} holds a {type(config).__name__}, wanted an object")
    if not any(model.glob("*.safetensors")):
        raise UsageError(f"policy: {model} has no .safetensors file; wanted a model folder in HF layout")
    return config
