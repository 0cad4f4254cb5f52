"""Pieces that several model families share, as torchtitan configs: norms, rope, head, feed-forward, experts, router.

Every weight comes from a model folder, so no piece asks for an initial value.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lego.learn import titan_cpu  # before torchtitan, which it makes importable without an accelerator
from lego.learn.heads import VocabularyShard, chunked_logprobs, values
from lego.learn.layout import model_sizes
from lego.learn.replay import Replay

# isort: split
from torchtitan.models.common import Embedding, Linear
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_moe_config,
    make_routed_experts_config,
    make_token_dispatcher_config,
)
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.common.rope import RoPE

SKIP = {"weight": skip_param_init, "bias": skip_param_init}
"""Leaves a layer's weights for the loader to fill."""


class LogprobLinear(Linear):
    """The output head, asked for log-probabilities of labels and never for logits."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(  # type: ignore[override]
        self, input: torch.Tensor, *, labels_R: torch.Tensor, temperature_R: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(self.weight, DTensor):
            return chunked_logprobs(input, self.weight, labels_R, temperature_R)
        assert isinstance(input, DTensor)
        mesh, places = self.weight.device_mesh, self.weight.placements
        _, offset = compute_local_shape_and_global_offset(self.weight.shape, mesh, places)
        shard = VocabularyShard(offset=offset[0], group=mesh.get_group())
        own = self.weight.to_local()
        return chunked_logprobs(input.to_local(), own, labels_R, temperature_R, shard=shard)


class ValueLinear(Linear):
    """The critic's head: one float32 number a row. Tensor-parallel ranks each hold and compute all of it."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return values(input, self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight)


class Gate(Linear):
    """A router's linear layer, in float32 whatever the model computes in."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        with torch.autocast(device_type=input.device.type, enabled=False):
            return F.linear(input.float(), self.weight.float(), bias)


class ReplayRouter(TokenChoiceTopKRouter):
    """Router whose selection comes from `replay`; the gate weights are live, normalised and scaled as the model's."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        pass

    replay: Replay
    layer: int

    def forward(
        self, x_BLD: torch.Tensor, expert_bias_E: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits_BLE = self.gate(x_BLD)
        scores_BLE = torch.sigmoid(logits_BLE) if self.score_func == "sigmoid" else torch.softmax(logits_BLE, dim=-1)
        ids_BLK = self._select(scores_BLE.detach(), expert_bias_E)
        chosen_BLK = scores_BLE.gather(-1, ids_BLK)
        if self.route_norm:
            chosen_BLK = chosen_BLK / (chosen_BLK.sum(-1, keepdim=True) + 1e-20)
        return chosen_BLK * self.route_scale, ids_BLK, scores_BLE

    def _select(self, scores_BLE: torch.Tensor, expert_bias_E: torch.Tensor | None) -> torch.Tensor:
        """Recorded ids, or the live choice: by score and bias, within the best groups."""
        for_choice = scores_BLE if expert_bias_E is None else scores_BLE + expert_bias_E
        if self.num_expert_groups is not None:
            for_choice = self._get_node_limited_routing_scores(for_choice)
        whole = for_choice.full_tensor() if isinstance(for_choice, DTensor) else for_choice
        ids = self.replay.choose(self.layer, whole.flatten(0, -2)).view(*whole.shape[:-1], self.top_k)
        if isinstance(for_choice, DTensor):  # tensor parallel: each rank routes its part of the tokens
            mesh = for_choice.device_mesh
            same = DTensor.from_local(ids, mesh, [Replicate()] * mesh.ndim, run_check=False)
            return same.redistribute(placements=for_choice.placements)
        return ids


class BiasedMoE(MoE):
    """An MoE layer with the folder's own selection bias, which stays as it was read."""

    @dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        del self.expert_bias_E  # None, since nothing here balances load
        self.register_buffer("expert_bias_E", torch.zeros(config.num_experts, dtype=torch.float32))


def norm(hf: Mapping[str, Any], width: int, eps: float | None = None) -> RMSNorm.Config:
    """An RMS norm with the model's epsilon, or another."""
    return RMSNorm.Config(normalized_shape=width, eps=hf["rms_norm_eps"] if eps is None else eps, param_init=SKIP)


def norms(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The two norms of a layer."""
    return {name: norm(hf, hf["hidden_size"]) for name in ("attention_norm", "ffn_norm")}


def ends(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes, embedding and head of a decoder."""
    width, vocabulary = hf["hidden_size"], hf["vocab_size"]
    return {
        "dim": width,
        "vocab_size": vocabulary,
        "enable_weight_tying": bool(hf.get("tie_word_embeddings")),
        "tok_embeddings": Embedding.Config(num_embeddings=vocabulary, embedding_dim=width, param_init=SKIP),
        "lm_head": LogprobLinear.Config(in_features=width, out_features=vocabulary, param_init=SKIP),
    }


def linear(width_in: int, width_out: int, bias: bool = False) -> Linear.Config:
    """A linear layer."""
    return Linear.Config(in_features=width_in, out_features=width_out, bias=bias, param_init=SKIP)


def exchanged(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The last two axes of fused experts exchanged, all else as it is."""
    return {n: t.transpose(-1, -2).contiguous() if ".experts." in n and t.ndim == 3 else t for n, t in tensors.items()}


def feed_forward(hf: Mapping[str, Any], hidden: int) -> FeedForward.Config:
    """A gated feed-forward layer."""
    return make_ffn_config(dim=hf["hidden_size"], hidden_dim=hidden, w1_param_init=SKIP, w2w3_param_init=SKIP)


def rope(kind: type[RoPE], hf: Mapping[str, Any], width: int, max_length: int, **more: Any) -> Any:
    """The rotary embedding that `hf["rope"]` describes, of torchtitan's class `kind`."""
    given = hf["rope"]
    scaling: dict[str, Any] = {}
    longest = given.get("original_max_position_embeddings") or hf.get("max_position_embeddings")
    if given["rope_type"] == "llama3":
        scaling = {"scaling": "llama", "scaling_factor": given["factor"], "original_max_position_embeddings": longest}
        scaling |= {name: given[name] for name in ("low_freq_factor", "high_freq_factor")}
    elif given["rope_type"] == "yarn":
        scaling = {"scaling": "yarn", "rope_factor": given["factor"], "original_seq_len": longest}
        scaling |= {"beta_fast": given.get("beta_fast") or 32.0, "beta_slow": given.get("beta_slow") or 1.0}
        scaling |= {"truncate": given.get("truncate", True)}
    return kind.Config(dim=width, max_seq_len=max_length, theta=given["rope_theta"], **scaling, **more)


def expert_count(hf: Mapping[str, Any]) -> int:
    """Routed experts of a layer; 0 in a dense model."""
    return model_sizes(hf).experts


def experts(hf: Mapping[str, Any], hidden: int) -> RoutedExperts.Config:
    """Routed experts of the usual gated kind."""
    return make_routed_experts_config(
        dim=hf["hidden_size"],
        hidden_dim=hidden,
        num_experts=expert_count(hf),
        top_k=hf["num_experts_per_tok"],
        param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), skip_param_init),
        comm_backend="standard",
    )


def experts_of(hf: Mapping[str, Any], inner: GroupedExperts.Config) -> RoutedExperts.Config:
    """Routed experts of a given kind."""
    dispatcher = make_token_dispatcher_config(
        num_experts=inner.num_experts, top_k=hf["num_experts_per_tok"], comm_backend="standard"
    )
    return RoutedExperts.Config(inner_experts=inner, token_dispatcher=dispatcher)


def router(
    hf: Mapping[str, Any],
    *,
    score: Literal["softmax", "sigmoid"] = "softmax",
    normalised: bool = True,
    bias: bool = False,
    **more: Any,
) -> ReplayRouter.Config:
    """A router; `more` are fields of torchtitan's."""
    count = expert_count(hf)
    gate = Gate.Config(in_features=hf["hidden_size"], out_features=count, bias=bias, param_init=SKIP)
    return ReplayRouter.Config(
        num_experts=count,
        gate=gate,
        top_k=hf["num_experts_per_tok"],
        score_func=score,
        route_norm=normalised,
        **more,
    )


def moe(
    router: ReplayRouter.Config,
    experts: RoutedExperts.Config,
    shared: FeedForward.Config | None = None,
    *,
    biased: bool = False,
) -> MoE.Config:
    """An MoE layer. Nothing balances its load: that would move a bias which neither file nor engine has."""
    config = make_moe_config(
        num_experts=router.num_experts,
        router=router,
        routed_experts=experts,
        shared_experts=shared,
        load_balance_coeff=None,
    )
    return titan_cpu.derive(config, BiasedMoE.Config) if biased else config
