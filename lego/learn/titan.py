"""torchtitan as a library: a model folder's network, sharded over the ranks, and its weights in and out.

With `titan_models` and its parts (which network), `titan_weights` (its weights, in and out) and `titan_cpu` (what it
needs without an accelerator), the only files that touch torchtitan.
"""

import collections
import logging
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import spmd_types as spmd
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lego.learn import hf_folder, titan_cpu  # before torchtitan, which it makes importable without an accelerator
from lego.learn.layout import Layout
from lego.learn.progress import FILE_PATIENCE
from lego.learn.replay import Replay
from lego.learn.titan_models import Architecture, Head, architecture, matches
from lego.learn.titan_parts import ReplayRouter
from lego.learn.titan_weights import Weights, clean

# isort: split
from torchtitan.config import CommConfig, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.protocols.sharding import ShardingConfig
from torchtitan.tools.utils import get_local_device

log = logging.getLogger(__name__)

ATTENTION = r"\.(attention|attn|attention_norm)\."
"""Parameters of the attention layers, each with the norm before it."""


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """What torchtitan's models read of a trainer's config."""

    parallelism: ParallelismConfig


def init_distributed(layout: Layout) -> torch.device:
    """Joins this rank's process group and returns its device."""
    # The watchdog ends a stuck rank; the others wait as long as it may, as in a sending whose server is slow.
    comm = CommConfig(init_timeout_seconds=int(2 * FILE_PATIENCE * layout.stall_s), trace_buf_size=0)
    # Offloaded gradients are summed for their norm where they lie.
    dist_utils.init_distributed(comm, enable_cpu_backend=_offloads(layout))
    dist_utils.set_spmd_backend("partial_dtensor")
    if titan_cpu.on_cpu():
        return torch.device("cpu")
    device = get_local_device()
    torch.accelerator.set_device_index(device.index)
    return device


def join_alone() -> torch.device:
    """Makes this process the only rank, on the CPU and without a port."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    dist_utils.set_spmd_backend("partial_dtensor")
    return torch.device("cpu")


def control_group() -> dist.ProcessGroup:
    """A group for commands: ranks may wait in it for days without a timeout or any work."""
    group = dist.new_group(backend="gloo", timeout=timedelta(days=30))
    assert isinstance(group, dist.ProcessGroup)
    return group


def _data_group(layout: Layout) -> dist.ProcessGroup:
    """The ranks that hold each part of a batch once: sums over tokens are taken in it, alike on all ranks."""
    tp, group = layout.tensor_parallel, dist.group.WORLD
    if tp > 1:
        groups = [dist.new_group(list(range(first, layout.world_size, tp))) for first in range(tp)]
        group = groups[dist.get_rank() % tp]
    assert isinstance(group, dist.ProcessGroup)
    return group


def _offloads(layout: Layout) -> bool:
    """Without an accelerator weights are in CPU memory anyway, and pinned memory is not to be had."""
    return layout.cpu_offload and not titan_cpu.on_cpu()


def _parallelism(layout: Layout) -> ParallelismConfig:
    """A layout in torchtitan's words; sharding takes the ranks that are left."""
    return ParallelismConfig(
        data_parallel_replicate_degree=layout.replicate,
        tensor_parallel_degree=layout.tensor_parallel,
        enable_sequence_parallel=layout.tensor_parallel > 1,
        expert_parallel_degree=layout.expert_parallel,
        # The backend that torch 2.13 and gloo have; see docs/architecture.md.
        spmd_backend="partial_dtensor",
    )


def _shard(arch: Architecture, layout: Layout, replay: Replay, frozen: str | None) -> tuple[Decoder, ParallelDims]:
    parallelism = _parallelism(layout)
    dims = ParallelDims.from_config(parallelism, layout.world_size)
    arch.config.update_from_config(config=_Sizes(parallelism=parallelism))
    if arch.head == "values":  # a head of one row is not to be split
        whole = dense_param_placement(tp=spmd.R)
        arch.config.lm_head.sharding_config = ShardingConfig(state_shardings={"weight": whole})
    with torch.device("meta"):
        model: Decoder = arch.config.build()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not matches(frozen, name))
    _attach(model, replay)
    if layout.tensor_parallel > 1 and layout.expert_parallel == 1:
        _await_rows(model)
    checkpointing = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}
    arch.family.parallelize(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param=layout.dtype, enable_cpu_offload=_offloads(layout)),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=checkpointing[layout.activation_checkpointing],
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


def _await_rows(model: Decoder) -> None:
    """Copies what goes to the experts: of rows still on their way between ranks torch's local_map drops the gradient.

    Only so without expert parallelism, which leaves the rows where they are.
    """
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            module.register_forward_pre_hook(lambda _, args: (args[0].clone(), *args[1:]))


class Network:
    """A network with its HF weights, spread over the ranks. All its methods are collective."""

    def __init__(
        self, folder: Path, layout: Layout, device: torch.device, head: Head = "logprobs", frozen: str | None = None
    ) -> None:
        """`frozen` parameters do not learn, a regular expression of torchtitan names."""
        self.layout, self.device = layout, device
        self.data_group = _data_group(layout)
        self.arch = architecture(folder, layout.max_length, head)
        self.replay = Replay(layers=self.arch.moe_layers, experts=self.arch.experts, top_k=self.arch.top_k)
        self.model, self.dims = _shard(self.arch, layout, self.replay, frozen)
        self.model.to_empty(device="cpu" if layout.cpu_offload else device)
        with torch.no_grad():
            self.model.init_weights(buffer_device=device if layout.cpu_offload else None)
        self.weights = Weights(self.arch, self.model, folder)
        self.weights.load()
        # Taken once: while FSDP has gathered a layer, the model's own attributes are other, passing tensors.
        self._parameters = {clean(name): p for name, p in self.model.named_parameters()}
        self.model.train()

    def hidden(self, ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """The last hidden states [T, D] of one packed row; positions restart at 0 with each document.

        T is a multiple of the tensor-parallel degree, whose ranks give and get the same row.
        """
        positions = positions_T[None]
        masks = self.model.get_attention_masks(positions)
        extra = self.arch.family.extra
        hidden = self.model(ids_T[None], positions=positions, attention_masks=masks, **extra)
        return (hidden.to_local() if isinstance(hidden, DTensor) else hidden)[0]

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Parameters by torchtitan name; a tied head appears once."""
        return self._parameters

    def clip_gradients(self, max_norm: float) -> float:
        """Scales gradients down to a global norm of at most `max_norm`; returns the norm before. inf only measures."""
        parameters = [p for p in self._parameters.values() if p.grad is not None]
        norm = dist_utils.clip_grad_norm_(parameters, max_norm, foreach=True, ep_enabled=self.dims.ep_enabled)
        # Of a gradient that several ranks have a copy of, each measures its own: an inf in one is to stop them all.
        norms = [torch.empty_like(norm) for _ in range(self.layout.world_size)]
        dist.all_gather(norms, norm)
        return float(torch.stack(norms).max())

    def expert_gradient_norm(self) -> float:
        """Norm of the routed experts' gradients alone; ask before they are clipped. 0 in a dense model."""
        grads = [p.grad for n, p in self._parameters.items() if "routed_experts" in n and p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads, foreach=True)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def export_folder(
        self, folder: Path, dtype: torch.dtype | None = None, shard_bytes: int = hf_folder.SHARD_BYTES
    ) -> None:
        """Writes HF-named weights into an existing folder, with an index if they fill several files."""
        stream = self.weights.stream(dtype)
        if dist.get_rank() == 0:
            sizes = {name: form.nbytes for name, form in self.weights.forms(dtype).items()}
            hf_folder.save_sharded(folder, sizes, stream, shard_bytes)
        else:
            collections.deque(stream, maxlen=0)


class Policy(Network):
    """The network that is trained, asked for log-probabilities of what was sampled."""

    def forward(
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        rows_R: torch.Tensor,
        *,
        labels_R: torch.Tensor,
        temperature_R: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logprobs, entropies) of `labels_R` at input rows `rows_R` of one packed row; see `chunked_logprobs`."""
        hidden_RD = self.hidden(ids_T, positions_T)[rows_R]
        return self.model.lm_head(hidden_RD, labels_R=labels_R, temperature_R=temperature_R)


class Critic(Network):
    """The value model: the policy's network with a head of one number, which begins at zero."""

    def __init__(self, folder: Path, layout: Layout, device: torch.device, frozen: str | None = None) -> None:
        super().__init__(folder, layout, device, head="values", frozen=frozen)

    def forward(self, ids_T: torch.Tensor, positions_T: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        """Values [R] in float32 at input rows `rows_R` of one packed row."""
        return self.model.lm_head(self.hidden(ids_T, positions_T)[rows_R])
