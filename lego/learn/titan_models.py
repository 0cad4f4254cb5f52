"""HF config.json to torchtitan's model: its config tree, weight names and sharding, one `Family` a kind of model."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from lego.errors import UsageError
from lego.learn import titan_cpu  # before torchtitan, which it makes importable without an accelerator
from lego.learn.heads import chunked_logprobs
from lego.learn.replay import Replay

# isort: split
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.models.common.config_utils import (
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import TokenChoiceTopKRouter
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.parallelize import parallelize_qwen3
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

Head = Literal["logprobs", "values"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of model."""

    config: Callable[[Mapping[str, Any], int], Decoder.Config]
    """torchtitan's config of an HF config, for sequences of so many tokens."""
    adapter: type[BaseStateDictAdapter]
    parallelize: Callable[..., Any]
    fixed: Mapping[str, Any]
    """Fields of the HF config that must have this value, or be absent: another would be another model."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the model's forward."""
    frozen: str | None = None
    """Parameters that do not learn, as a regular expression of torchtitan names."""
    carried: str | None = None
    """HF tensors that have no place in the model and are written back as they came, as a regular expression."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model folder's network, described."""

    hf: Mapping[str, Any]
    family: Family
    config: Decoder.Config
    adapter: Any

    @property
    def moe_layers(self) -> int:
        """Layers with a router."""
        return sum(layer.moe is not None for layer in self.config.layers)

    @property
    def experts(self) -> int:
        """Routed experts of an MoE layer; 0 in a dense model."""
        return next((layer.moe.num_experts for layer in self.config.layers if layer.moe is not None), 0)

    @property
    def top_k(self) -> int:
        """Experts that a token goes to; 0 in a dense model."""
        return next((layer.moe.router.top_k for layer in self.config.layers if layer.moe is not None), 0)


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


def architecture(folder: Path, max_length: int, head: Head = "logprobs") -> Architecture:
    """The network of a model folder. Raises UsageError if this trainer would compute another model than it says."""
    hf = read_config(folder)
    family = FAMILIES[hf["model_type"]]
    config = family.config(hf, max_length)
    if head == "values":
        config.enable_weight_tying = False
        config.lm_head = Linear.Config(
            in_features=config.dim, out_features=1, param_init={"weight": torch.nn.init.zeros_}
        )
    if titan_cpu.on_cpu():
        titan_cpu.swap(config)
    return Architecture(hf=hf, family=family, config=config, adapter=family.adapter(config, None))  # type: ignore[arg-type]


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json, checked against what its family can be."""
    config = json.loads((folder / "config.json").read_text())
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise UsageError(f"{folder / 'config.json'}: model_type {kind!r}, wanted one of {', '.join(FAMILIES)}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    wrong = [
        f"{name}={config.get(name, want)!r} (want {want!r})"
        for name, want in FAMILIES[kind].fixed.items()
        if (config.get(name, want) or want) != want
    ]
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        wrong.append(f"rope type {rope!r} (want the default)")
    if wrong:
        raise UsageError(f"{folder / 'config.json'}: cannot train a model with {', '.join(wrong)}")
    config["rope_theta"] = config.get("rope_theta") or rope.get("rope_theta", 10000.0)
    return config


def matches(pattern: str | None, name: str) -> bool:
    """Whether a family's pattern, if it has one, is found in a name."""
    return pattern is not None and re.search(pattern, name) is not None


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


def qwen3_moe(hf: Mapping[str, Any], max_length: int) -> Qwen3Model.Config:
    """Qwen3-MoE."""
    width, vocabulary = hf["hidden_size"], hf["vocab_size"]
    skip = {"weight": skip_param_init}
    return Qwen3Model.Config(
        vocab_size=vocabulary,
        dim=width,
        norm=_norm(width, hf["rms_norm_eps"]),
        enable_weight_tying=bool(hf.get("tie_word_embeddings")),
        tok_embeddings=Embedding.Config(num_embeddings=vocabulary, embedding_dim=width, param_init=skip),
        lm_head=LogprobLinear.Config(in_features=width, out_features=vocabulary, param_init=skip),
        layers=[_block(hf, max_length) for _ in range(hf["num_hidden_layers"])],
    )


FAMILIES: Mapping[str, Family] = {
    "qwen3_moe": Family(
        config=qwen3_moe,
        adapter=Qwen3StateDictAdapter,
        parallelize=parallelize_qwen3,
        fixed={
            "hidden_act": "silu",
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "use_sliding_window": False,
        },
    ),
}
"""By the config's model_type."""
