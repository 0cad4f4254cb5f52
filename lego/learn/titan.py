"""torchtitan as a library: a model folder's network, sharded over the ranks, its weights in and out, its optimizer.

With `titan_models` (which network) and `titan_cpu` (what it needs without an accelerator) these are the only
files that touch torchtitan.
"""

import json
import logging
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from torch.distributed.tensor import DTensor

from lego.errors import UsageError
from lego.learn import titan_cpu  # before torchtitan, which it makes importable without an accelerator
from lego.learn.replay import Replay
from lego.learn.titan_models import Architecture, Head, ReplayRouter, architecture, matches

# isort: split
from torchtitan.config import CommConfig, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools.utils import get_local_device

log = logging.getLogger(__name__)

Checkpointing = Literal["none", "selective", "full"]
DType = Literal["float32", "bfloat16"]
_WRAPPER = "_checkpoint_wrapped_module."
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the model is spread and computed. The ranks are replicate x shard x tensor_parallel."""

    world_size: int = 1
    replicate: int = 1
    """Copies of the sharded weights (HSDP)."""
    expert_parallel: int = 1
    tensor_parallel: int = 1
    dtype: DType = "float32"
    max_length: int = 4096
    checkpointing: Checkpointing = "none"
    offload: bool = False
    """Weights, gradients and optimizer state wait in CPU memory."""
    stall_s: float = 30.0

    def parallelism(self) -> ParallelismConfig:
        """These degrees in torchtitan's words; sharding takes the ranks that are left."""
        return ParallelismConfig(
            data_parallel_replicate_degree=self.replicate,
            tensor_parallel_degree=self.tensor_parallel,
            enable_sequence_parallel=self.tensor_parallel > 1,
            expert_parallel_degree=self.expert_parallel,
            # The backend that torch 2.13 and gloo have; see docs/architecture.md.
            spmd_backend="partial_dtensor",
        )


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """What torchtitan's models read of a trainer's config."""

    parallelism: ParallelismConfig


def init_distributed(layout: Layout) -> torch.device:
    """Joins this rank's process group and returns its device."""
    dist_utils.init_distributed(CommConfig(init_timeout_seconds=int(2 * layout.stall_s), trace_buf_size=0))
    dist_utils.set_spmd_backend("partial_dtensor")
    if titan_cpu.on_cpu():
        return torch.device("cpu")
    device = get_local_device()
    torch.accelerator.set_device_index(device.index)
    return device


def control_group() -> dist.ProcessGroup:
    """A group for commands: ranks may wait in it for days without a timeout or any work."""
    group = dist.new_group(backend="gloo", timeout=timedelta(days=30))
    assert isinstance(group, dist.ProcessGroup)
    return group


def _shard(arch: Architecture, layout: Layout, replay: Replay) -> tuple[Decoder, ParallelDims]:
    parallelism = layout.parallelism()
    dims = ParallelDims.from_config(parallelism, layout.world_size)
    arch.config.update_from_config(config=_Sizes(parallelism=parallelism))
    with torch.device("meta"):
        model: Decoder = arch.config.build()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not matches(arch.family.frozen, name))
    _attach(model, replay)
    checkpointing = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}
    arch.family.parallelize(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param=layout.dtype, enable_cpu_offload=layout.offload),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=checkpointing[layout.checkpointing],
        dump_folder="",
    )
    if titan_cpu.on_cpu():
        titan_cpu.use_sum_reduction(model)
    return model, dims


def _attach(model: Decoder, replay: Replay) -> None:
    """Gives each router the replay and its number among the MoE layers."""
    model._skip_lm_head = True
    for block in model.layers.values():
        block.register_forward_pre_hook(lambda _, args: replay.enter(args[2]))
    routers = [module for module in model.modules() if isinstance(module, ReplayRouter)]
    for index, router in enumerate(routers):
        router.replay, router.layer = replay, index


class Network:
    """A network with its HF weights, spread over the ranks. All its methods are collective."""

    def __init__(self, folder: Path, layout: Layout, device: torch.device, head: Head = "logprobs") -> None:
        self.layout, self.device = layout, device
        self.arch = architecture(folder, layout.max_length, head)
        self.replay = Replay(layers=self.arch.moe_layers, experts=self.arch.experts, top_k=self.arch.top_k)
        self.model, self.dims = _shard(self.arch, layout, self.replay)
        self.model.to_empty(device="cpu" if layout.offload else device)
        with torch.no_grad():
            self.model.init_weights(buffer_device=device if layout.offload else None)
        self.keys = frozenset(self._load_hf(folder))
        # Taken once: while FSDP has gathered a layer, the model's own attributes are other, passing tensors.
        self._parameters = {name.replace(_WRAPPER, ""): p for name, p in self.model.named_parameters()}
        self.model.train()

    def hidden(self, ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """The last hidden states [T, D] of one packed row; positions restart at 0 with each document."""
        positions = positions_T[None]
        masks = self.model.get_attention_masks(positions)
        extra = self.arch.family.extra
        return self.model(ids_T[None], positions=positions, attention_masks=masks, **extra)[0]

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Parameters by torchtitan name; a tied head appears once."""
        return self._parameters

    def clip_gradients(self, max_norm: float) -> float:
        """Scales gradients down to a global norm of at most `max_norm`; returns the norm before. inf only measures."""
        parameters = [p for p in self._parameters.values() if p.grad is not None]
        return float(dist_utils.clip_grad_norm_(parameters, max_norm, foreach=True, ep_enabled=self.dims.ep_enabled))

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        blank = {n.replace(_WRAPPER, ""): torch.empty(p.shape, device="meta") for n, p in self._named()}
        return {name: tuple(t.shape) for name, t in self.arch.adapter.to_hf(blank).items()}

    def _named(self) -> list[tuple[str, torch.nn.Parameter]]:
        return list(self.model.named_parameters(remove_duplicate=False))

    def _load_hf(self, folder: Path) -> set[str]:
        found = _stored_shapes(folder)
        wanted = self._shapes()
        places = set(wanted) | ({_HEAD} if self.arch.config.enable_weight_tying else set())
        unread, unfilled = sorted(set(found) - places), sorted(set(wanted) - set(found))
        misfit = [
            f"{n} {found[n]} (want {wanted[n]})" for n in sorted(set(found) & set(wanted)) if found[n] != wanted[n]
        ]
        for what, names in (("have no place", unread), ("are missing", unfilled), ("have another shape", misfit)):
            if names:
                raise UsageError(f"{folder}: {len(names)} tensors {what} in this model: {', '.join(names[:4])}")
        if _HEAD in found and self.arch.config.enable_weight_tying:
            _check_tied(folder)
        state = self.arch.adapter.to_hf(self.model.state_dict())
        load_sharded(state, storage_reader=HuggingFaceStorageReader(str(folder)))
        self.model.load_state_dict(self.arch.adapter.from_hf(state))
        return set(found)

    def hf_weights(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """All weights on CPU under the names the source folder used; on ranks above 0 an empty dict."""
        full = {}
        for name, parameter in self.parameters().items():
            value = parameter.detach()
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if dist.get_rank() == 0:
                full[name] = whole.to(device="cpu", dtype=dtype)
        if not full:
            return {}
        weights = {name: t.contiguous() for name, t in self.arch.adapter.to_hf(full).items()}
        if self.arch.config.enable_weight_tying and _HEAD in self.keys:
            weights[_HEAD] = weights[_EMBEDDING].clone()
        assert weights.keys() == self.keys
        return weights

    def export(self, path: Path, dtype: torch.dtype) -> None:
        """Writes one safetensors file of HF-named weights; it appears complete or not at all."""
        weights = self.hf_weights(dtype)
        if weights:
            part = path.with_name(path.name + ".part")
            save_file(weights, part, metadata={"format": "pt"})
            part.rename(path)


class Policy(Network):
    """The network that is trained, asked for log-probabilities of what was sampled."""

    def forward(
        self, ids_T: torch.Tensor, positions_T: torch.Tensor, rows_R: torch.Tensor, **head: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logprobs, entropies) of `labels_R` at input rows `rows_R` of one packed row; see `chunked_logprobs`."""
        return self.model.lm_head(self.hidden(ids_T, positions_T)[rows_R], **head)


class Critic(Network):
    """The value model: the policy's network with a head of one number, which begins at zero."""

    def __init__(self, folder: Path, layout: Layout, device: torch.device) -> None:
        super().__init__(folder, layout, device, head="values")

    def forward(self, ids_T: torch.Tensor, positions_T: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        """Values [R] in float32 at input rows `rows_R` of one packed row."""
        return self.model.lm_head(self.hidden(ids_T, positions_T)[rows_R]).squeeze(-1).float()


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return sorted(folder.glob("*.safetensors"))


def _stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for path in _weight_files(folder):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def _check_tied(folder: Path) -> None:
    tensors = {}
    for path in _weight_files(folder):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in (_HEAD, _EMBEDDING) if name in file.keys()}  # noqa: SIM118
    if not torch.equal(tensors[_HEAD], tensors[_EMBEDDING]):
        raise UsageError(f"{folder}: tie_word_embeddings is set but {_HEAD} differs from {_EMBEDDING}")


class AdamW:
    """torch's AdamW over a policy; decay applies to matrices, not to norms. Its state is saved by name."""

    def __init__(self, policy: Policy, *, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        self.policy = policy
        named = policy.parameters()
        groups = [
            {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in named.values() if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.inner = torch.optim.AdamW(groups, lr=lr, betas=betas, foreach=True)

    def step(self) -> None:
        """Applies the gradients and clears them."""
        self.inner.step()
        self.clear()

    def clear(self) -> None:
        """Drops the gradients."""
        self.inner.zero_grad(set_to_none=True)

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for name, parameter in self.policy.parameters().items():
            moments = self.inner.state[parameter]
            if not moments:
                moments |= {"step": torch.tensor(0.0)}
                moments |= {key: torch.zeros_like(parameter.detach()) for key in ("exp_avg", "exp_avg_sq")}
            state |= {f"model.{name}": parameter.detach()}
            state |= {f"optimizer.{name}.{key}": value for key, value in moments.items()}
        return state

    def save(self, folder: Path) -> None:
        """Writes weights and moments as a distributed checkpoint, readable by any number of ranks."""
        save_sharded(self._state(), checkpoint_id=str(folder))

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote, in place. Raises UsageError if there is no checkpoint."""
        if not (folder / ".metadata").is_file():
            raise UsageError(f"{folder}: no trainer checkpoint here")
        load_sharded(self._state(), checkpoint_id=str(folder))
