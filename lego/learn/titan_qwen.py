"""Qwen3, dense and MoE, and Qwen3.5's text model, as torchtitan configs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lego.learn import titan_parts as parts

# isort: split
from torchtitan.models.common import Conv1d, CosSinRoPE
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.models.common.config_utils import make_gqa_config
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.feed_forward import FeedForward, SigmoidGatedFeedForward
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3_5 import MRoPE, Qwen35Model, Qwen35StateDictAdapter, _qwen35_vision_encoder_config
from torchtitan.models.qwen3_5.model import (
    GatedDeltaKernel,
    GatedDeltaNet,
    OffsetRMSNorm,
    Qwen35Attention,
    Qwen35TransformerBlock,
    RMSNormGated,
)

_HEAD = "lm_head.weight"


def _sparse(hf: Mapping[str, Any], layer: int) -> bool:
    """Whether a Qwen3 layer routes; decoder_sparse_step counts layers from one."""
    if not parts.expert_count(hf) or layer in (hf.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % (hf.get("decoder_sparse_step") or 1) == 0


def _qwen3_block(hf: Mapping[str, Any], layer: int, max_length: int) -> Qwen3TransformerBlock.Config:
    width = hf["hidden_size"]
    head_dim = hf.get("head_dim") or width // hf["num_attention_heads"]
    attention = make_gqa_config(
        dim=width,
        n_heads=hf["num_attention_heads"],
        n_kv_heads=hf["num_key_value_heads"],
        head_dim=head_dim,
        wqkv_param_init=parts.SKIP,
        wo_param_init=parts.SKIP,
        inner_attention=VarlenAttention.Config(),
        rope=parts.rope(CosSinRoPE, hf, head_dim, max_length),
        qk_norm=parts.norm(hf, head_dim),
    )
    moe, dense = None, None
    if _sparse(hf, layer):
        router = parts.router(hf, normalised=hf["norm_topk_prob"])
        moe = parts.moe(router, parts.experts(hf, hf["moe_intermediate_size"]))
    else:
        dense = parts.feed_forward(hf, hf["intermediate_size"])
    return Qwen3TransformerBlock.Config(attention=attention, moe=moe, feed_forward=dense, **parts.norms(hf))


def qwen3(hf: Mapping[str, Any], max_length: int) -> Qwen3Model.Config:
    """Qwen3, dense or MoE."""
    layers = [_qwen3_block(hf, layer, max_length) for layer in range(hf["num_hidden_layers"])]
    return Qwen3Model.Config(norm=parts.norm(hf, hf["hidden_size"]), layers=layers, **parts.ends(hf))


class Qwen35Text(Qwen35Model):
    """Qwen3.5 without its vision tower, whose tensors stay in their files."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen35Model.Config):
        pass

    def __init__(self, config: Config) -> None:
        Decoder.__init__(self, config)
        self.vision_encoder = None


class Qwen35Adapter(Qwen35StateDictAdapter):
    """torchtitan's adapter with the experts as the files have them: [E, 2F, D] and [E, D, F].

    torchtitan 0.3.0 reads and writes both with their last two axes exchanged. It also wants the embedding in
    every call; this one takes any part of a model.
    """

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return parts.exchanged(super().to_hf(state_dict))

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        out = super().from_hf({_HEAD: None} | parts.exchanged(hf_state_dict))
        return {name: tensor for name, tensor in out.items() if tensor is not None}


def _offset_norm(hf: Mapping[str, Any], width: int) -> OffsetRMSNorm.Config:
    return OffsetRMSNorm.Config(dim=width, eps=hf["rms_norm_eps"], param_init=parts.SKIP)


def _full_attention(hf: Mapping[str, Any], max_length: int) -> Qwen35Attention.Config:
    width, heads, kv_heads, head_dim = (
        hf[n] for n in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    rotary = int(head_dim * (hf["rope"].get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 0.25))
    return Qwen35Attention.Config(
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary,
        rope=parts.rope(MRoPE, hf, rotary, max_length),
        wq=parts.linear(width, heads * head_dim * 2),
        wk=parts.linear(width, kv_heads * head_dim),
        wv=parts.linear(width, kv_heads * head_dim),
        wo=parts.linear(heads * head_dim, width),
        q_norm=_offset_norm(hf, head_dim),
        k_norm=_offset_norm(hf, head_dim),
        inner_attention=VarlenAttention.Config(),
    )


def _delta_net(hf: Mapping[str, Any]) -> GatedDeltaNet.Config:
    width, kernel = hf["hidden_size"], hf["linear_conv_kernel_dim"]
    key_dim, value_dim = hf["linear_key_head_dim"], hf["linear_value_head_dim"]
    value_heads = hf["linear_num_value_heads"]
    keys, values = hf["linear_num_key_heads"] * key_dim, value_heads * value_dim

    def conv(channels: int) -> Conv1d.Config:
        return Conv1d.Config(
            in_channels=channels,
            out_channels=channels,
            kernel_size=kernel,
            groups=channels,
            bias=False,
            param_init=parts.SKIP,
        )

    return GatedDeltaNet.Config(
        key_head_dim=key_dim,
        value_head_dim=value_dim,
        conv_kernel_size=kernel,
        in_proj_q=parts.linear(width, keys),
        in_proj_k=parts.linear(width, keys),
        in_proj_v=parts.linear(width, values),
        in_proj_z=parts.linear(width, values),
        in_proj_a=parts.linear(width, value_heads),
        in_proj_b=parts.linear(width, value_heads),
        conv_q=conv(keys),
        conv_k=conv(keys),
        conv_v=conv(values),
        kernel=GatedDeltaKernel.Config(),
        norm=RMSNormGated.Config(dim=value_dim, eps=hf["rms_norm_eps"], param_init=parts.SKIP),
        out_proj=parts.linear(values, width),
        param_init=dict.fromkeys(("A_log", "dt_bias"), skip_param_init),
    )


def _shared_expert(hf: Mapping[str, Any]) -> FeedForward.Config:
    plain = parts.feed_forward(hf, hf["shared_expert_intermediate_size"])
    gate = parts.linear(hf["hidden_size"], 1)
    return SigmoidGatedFeedForward.Config(w1=plain.w1, w2=plain.w2, w3=plain.w3, gate=gate)


def _kinds(hf: Mapping[str, Any]) -> list[str]:
    """The attention of each layer."""
    interval = hf.get("full_attention_interval") or 4
    count = hf["num_hidden_layers"]
    made = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)]
    return hf.get("layer_types") or made


def _qwen35_block(hf: Mapping[str, Any], kind: str, max_length: int) -> Qwen35TransformerBlock.Config:
    width, moe, dense = hf["hidden_size"], None, None
    if parts.expert_count(hf):
        experts = parts.experts(hf, hf["moe_intermediate_size"])
        moe = parts.moe(parts.router(hf), experts, _shared_expert(hf))
    else:
        dense = parts.feed_forward(hf, hf["intermediate_size"])
    full = kind == "full_attention"
    return Qwen35TransformerBlock.Config(
        attention=_full_attention(hf, max_length) if full else None,
        delta_net=None if full else _delta_net(hf),
        feed_forward=dense,
        moe=moe,
        attention_norm=_offset_norm(hf, width),
        ffn_norm=_offset_norm(hf, width),
    )


def qwen3_5(hf: Mapping[str, Any], max_length: int) -> Qwen35Text.Config:
    """Qwen3.5's text model, dense or MoE."""
    # Never built; torchtitan lays out the sharding of a tower whether there is one or not.
    tower = _qwen35_vision_encoder_config(
        dim=8,
        ffn_dim=8,
        num_layers=1,
        num_heads=1,
        patch_size=1,
        temporal_patch_size=1,
        spatial_merge_size=1,
        out_hidden_size=8,
        num_position_embeddings=1,
    )
    return Qwen35Text.Config(
        norm=_offset_norm(hf, hf["hidden_size"]),  # type: ignore[arg-type]
        layers=[_qwen35_block(hf, kind, max_length) for kind in _kinds(hf)],
        vision_encoder=tower,
        **parts.ends(hf),
    )
