"""The one file that touches torchtitan: a Qwen3-MoE from an HF folder, sharded, trained and written back."""

import json
import logging
from collections.abc import Mapping
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
from lego.learn.heads import chunked_logprobs
from lego.learn.replay import Replay

# isort: split
from torchtitan.config import CommConfig, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.models.common.config_utils import (
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.moe import TokenChoiceTopKRouter
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.parallelize import parallelize_qwen3
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.tools.utils import get_local_device

log = logging.getLogger(__name__)

Checkpointing = Literal["none", "selective", "full"]
_WRAPPER = "_checkpoint_wrapped_module."
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_FIXED = {
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "use_sliding_window": False,
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the model is spread and computed."""

    world_size: int = 1
    expert_parallel: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_length: int = 4096
    checkpointing: Checkpointing = "none"
    stall_s: float = 30.0


class LogprobLinear(Linear):
    """The output head, asked for log-probabilities of labels and never for logits."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(  # type: ignore[override]
        self, input: torch.Tensor, *, labels_R: torch.Tensor, temperature_R: torch.Tensor, chunk: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return chunked_logprobs(input, self.weight, labels_R, temperature_R, chunk=chunk)


class ReplayRouter(TokenChoiceTopKRouter):
    """Softmax router whose selection comes from `replay`; the gate weights are live and normalised once."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        pass

    replay: Replay
    layer: int

    def forward(
        self, x_BLD: torch.Tensor, expert_bias_E: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with torch.autocast(device_type=x_BLD.device.type, enabled=False):
            scores = torch.softmax(torch.nn.functional.linear(x_BLD.float(), self.gate.weight.float()), dim=-1)
        ids = self.replay.choose(self.layer, scores.flatten(0, -2)).view(*scores.shape[:-1], self.top_k)
        chosen = scores.gather(-1, ids)
        if self.route_norm:
            chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
        return chosen, ids, scores


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json. Raises UsageError if this trainer would compute another model than it says."""
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    wrong = [
        f"{name}={config.get(name, want)!r} (want {want!r})"
        for name, want in _FIXED.items()
        if (config.get(name, want) or want) != want
    ]
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        wrong.append(f"rope type {rope!r} (want the default)")
    if wrong:
        raise UsageError(f"{folder / 'config.json'}: cannot train a model with {', '.join(wrong)}")
    config["rope_theta"] = config.get("rope_theta") or rope.get("rope_theta", 10000.0)
    return config


def _norm(width: int, eps: float) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=width, eps=eps, param_init={"weight": skip_param_init})


def _block(hf: Mapping[str, Any], max_length: int) -> Qwen3TransformerBlock.Config:
    width, eps = hf["hidden_size"], hf["rms_norm_eps"]
    head_dim = hf.get("head_dim") or width // hf["num_attention_heads"]
    skip = {"weight": skip_param_init}
    attention = make_gqa_config(
        dim=width,
        n_heads=hf["num_attention_heads"],
        n_kv_heads=hf["num_key_value_heads"],
        head_dim=head_dim,
        wqkv_param_init=skip,
        wo_param_init=skip,
        inner_attention=VarlenAttention.Config(),
        rope=CosSinRoPE.Config(dim=head_dim, max_seq_len=max_length, theta=hf["rope_theta"]),
        qk_norm=_norm(head_dim, eps),
    )
    experts = make_routed_experts_config(
        dim=width,
        hidden_dim=hf["moe_intermediate_size"],
        num_experts=hf["num_experts"],
        top_k=hf["num_experts_per_tok"],
        param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), skip_param_init),
        comm_backend="standard",
    )
    router = make_router_config(
        dim=width,
        num_experts=hf["num_experts"],
        gate_param_init=skip,
        top_k=hf["num_experts_per_tok"],
        score_func="softmax",
        route_norm=hf["norm_topk_prob"],
    )
    replaying = titan_cpu.derive(router, ReplayRouter.Config)
    moe = make_moe_config(
        num_experts=hf["num_experts"], router=replaying, routed_experts=experts, load_balance_coeff=None
    )
    return Qwen3TransformerBlock.Config(
        attention_norm=_norm(width, eps), ffn_norm=_norm(width, eps), attention=attention, moe=moe
    )


def model_config(hf: Mapping[str, Any], max_length: int) -> Qwen3Model.Config:
    """torchtitan's config of the Qwen3-MoE that an HF config describes."""
    width, vocabulary = hf["hidden_size"], hf["vocab_size"]
    skip = {"weight": skip_param_init}
    config = Qwen3Model.Config(
        vocab_size=vocabulary,
        dim=width,
        norm=_norm(width, hf["rms_norm_eps"]),
        enable_weight_tying=bool(hf.get("tie_word_embeddings")),
        tok_embeddings=Embedding.Config(num_embeddings=vocabulary, embedding_dim=width, param_init=skip),
        lm_head=LogprobLinear.Config(in_features=width, out_features=vocabulary, param_init=skip),
        layers=[_block(hf, max_length) for _ in range(hf["num_hidden_layers"])],
    )
    if titan_cpu.on_cpu():
        titan_cpu.swap(config)
    return config


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


def _shard(config: Qwen3Model.Config, layout: Layout, replay: Replay) -> tuple[Qwen3Model, ParallelDims]:
    parallelism = ParallelismConfig(expert_parallel_degree=layout.expert_parallel, spmd_backend="partial_dtensor")
    dims = ParallelDims.from_config(parallelism, layout.world_size)
    set_qwen3_sharding_config(config, enable_sp=False, enable_ep=layout.expert_parallel > 1)
    with torch.device("meta"):
        model: Qwen3Model = config.build()
    _attach(model, replay)
    checkpointing = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}
    parallelize_qwen3(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param=layout.dtype),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=checkpointing[layout.checkpointing],  # type: ignore[arg-type]
        dump_folder="",
    )
    if titan_cpu.on_cpu():
        titan_cpu.use_sum_reduction(model)
    return model, dims


def _attach(model: Qwen3Model, replay: Replay) -> None:
    model._skip_lm_head = True
    routers = [module for module in model.modules() if isinstance(module, ReplayRouter)]
    for index, (router, block) in enumerate(zip(routers, model.layers.values(), strict=True)):
        router.replay, router.layer = replay, index
        block.register_forward_pre_hook(lambda _, args: replay.enter(args[2]))


class Policy:
    """A Qwen3-MoE with its HF weights, spread over the ranks. All its methods are collective."""

    def __init__(self, folder: Path, layout: Layout, device: torch.device) -> None:
        hf = read_config(folder)
        self.layout, self.device = layout, device
        self.replay = Replay(layers=hf["num_hidden_layers"], experts=hf["num_experts"], top_k=hf["num_experts_per_tok"])
        self.config = model_config(hf, layout.max_length)
        self.adapter = Qwen3StateDictAdapter(self.config, None)
        self.model, self.dims = _shard(self.config, layout, self.replay)
        self.model.to_empty(device=device)
        with torch.no_grad():
            self.model.init_weights(buffer_device=None)
        self.keys = frozenset(self._load_hf(folder))
        # Taken once: while FSDP has gathered a layer, the model's own attributes are other, passing tensors.
        self._parameters = {name.replace(_WRAPPER, ""): p for name, p in self.model.named_parameters()}
        self.model.train()

    def forward(
        self, ids_T: torch.Tensor, positions_T: torch.Tensor, rows_R: torch.Tensor, **head: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logprobs, entropies) of `labels_R` at input rows `rows_R` of one packed row; see `chunked_logprobs`."""
        positions = positions_T[None]
        masks = self.model.get_attention_masks(positions)
        hidden = self.model(ids_T[None], positions, masks)
        return self.model.lm_head(hidden[0, rows_R], **head)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Parameters by torchtitan name; a tied head appears once."""
        return self._parameters

    def clip_gradients(self, max_norm: float) -> float:
        """Scales gradients down to a global norm of at most `max_norm`; returns the norm before. inf only measures."""
        parameters = [p for p in self._parameters.values() if p.grad is not None]
        return float(dist_utils.clip_grad_norm_(parameters, max_norm, foreach=True, ep_enabled=self.dims.ep_enabled))

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        blank = {n.replace(_WRAPPER, ""): torch.empty(p.shape, device="meta") for n, p in self._named()}
        return {name: tuple(t.shape) for name, t in self.adapter.to_hf(blank).items()}

    def _named(self) -> list[tuple[str, torch.nn.Parameter]]:
        return list(self.model.named_parameters(remove_duplicate=False))

    def _load_hf(self, folder: Path) -> set[str]:
        found = _stored_shapes(folder)
        wanted = self._shapes()
        places = set(wanted) | ({_HEAD} if self.config.enable_weight_tying else set())
        unread, unfilled = sorted(set(found) - places), sorted(set(wanted) - set(found))
        misfit = [
            f"{n} {found[n]} (want {wanted[n]})" for n in sorted(set(found) & set(wanted)) if found[n] != wanted[n]
        ]
        for what, names in (("have no place", unread), ("are missing", unfilled), ("have another shape", misfit)):
            if names:
                raise UsageError(f"{folder}: {len(names)} tensors {what} in this model: {', '.join(names[:4])}")
        if _HEAD in found and self.config.enable_weight_tying:
            _check_tied(folder)
        state = self.adapter.to_hf(self.model.state_dict())
        load_sharded(state, storage_reader=HuggingFaceStorageReader(str(folder)))
        self.model.load_state_dict(self.adapter.from_hf(state))
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
        weights = {name: t.contiguous() for name, t in self.adapter.to_hf(full).items()}
        if self.config.enable_weight_tying and _HEAD in self.keys:
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
