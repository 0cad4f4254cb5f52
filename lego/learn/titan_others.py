"""Llama 3, DeepSeek-V3 and gpt-oss as torchtitan configs."""

from collections.abc import Mapping
from typing import Any

from lego.learn import titan_parts as parts

# isort: split
from torchtitan.models.common import ComplexRoPE, CosSinRoPE
from torchtitan.models.common.attention import QKVLinear, VarlenAttention
from torchtitan.models.common.config_utils import make_gqa_config
from torchtitan.models.common.linear import ScaledBiasRowwiseLinear
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.deepseek_v3.model import Attention as LatentAttention
from torchtitan.models.deepseek_v3.model import DeepSeekV3Model, DeepSeekV3TransformerBlock
from torchtitan.models.gpt_oss.model import Attention as SinkAttention
from torchtitan.models.gpt_oss.model import GptOssModel, GptOssTransformerBlock
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
from torchtitan.models.gpt_oss.state_dict_adapter import GptOssStateDictAdapter
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock

_LATENT_EPS = 1e-6
"""DeepSeek's norms of the compressed queries and keys do not follow rms_norm_eps."""


def _llama_block(hf: Mapping[str, Any], max_length: int) -> Llama3TransformerBlock.Config:
    width, heads = hf["hidden_size"], hf["num_attention_heads"]
    head_dim = hf.get("head_dim") or width // heads
    attention = make_gqa_config(
        dim=width,
        n_heads=heads,
        n_kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        wqkv_param_init=parts.SKIP,
        wo_param_init=parts.SKIP,
        inner_attention=VarlenAttention.Config(),
        rope=parts.rope(ComplexRoPE, hf, head_dim, max_length),
    )
    dense = parts.feed_forward(hf, hf["intermediate_size"])
    return Llama3TransformerBlock.Config(attention=attention, feed_forward=dense, **parts.norms(hf))


def llama(hf: Mapping[str, Any], max_length: int) -> Llama3Model.Config:
    """Llama 3."""
    layers = [_llama_block(hf, max_length) for _ in range(hf["num_hidden_layers"])]
    return Llama3Model.Config(norm=parts.norm(hf, hf["hidden_size"]), layers=layers, **parts.ends(hf))


def _latent_attention(hf: Mapping[str, Any], max_length: int) -> LatentAttention.Config:
    width, heads, q_rank, kv_rank = (
        hf[n] for n in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank")
    )
    nope, rotary, value = hf["qk_nope_head_dim"], hf["qk_rope_head_dim"], hf["v_head_dim"]
    queries = heads * (nope + rotary)
    return LatentAttention.Config(
        dim=width,
        n_heads=heads,
        q_lora_rank=q_rank or 0,
        kv_lora_rank=kv_rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rotary,
        v_head_dim=value,
        mscale=hf["rope"].get("mscale_all_dim") or 0.0,
        wq=None if q_rank else parts.linear(width, queries),
        wq_a=parts.linear(width, q_rank) if q_rank else None,
        wq_b=parts.linear(q_rank, queries) if q_rank else None,
        q_norm=parts.norm(hf, q_rank or 1, _LATENT_EPS),
        wkv_a=parts.linear(width, kv_rank + rotary),
        kv_norm=parts.norm(hf, kv_rank, _LATENT_EPS),
        wkv_b=parts.linear(kv_rank, heads * (nope + value)),
        wo=parts.linear(heads * value, width),
        inner_attention=VarlenAttention.Config(),
        rope=parts.rope(ComplexRoPE, hf, rotary, max_length),
    )


def _deepseek_block(hf: Mapping[str, Any], layer: int, max_length: int) -> DeepSeekV3TransformerBlock.Config:
    moe, dense = None, None
    if layer < (hf.get("first_k_dense_replace") or 0):
        dense = parts.feed_forward(hf, hf["intermediate_size"])
    else:
        hidden, groups = hf["moe_intermediate_size"], hf.get("n_group") or 1
        router = parts.router(
            hf,
            score="sigmoid",
            normalised=hf["norm_topk_prob"],
            route_scale=hf["routed_scaling_factor"],
            num_expert_groups=groups if groups > 1 else None,
            num_limited_groups=hf.get("topk_group") if groups > 1 else None,
        )
        shared = parts.feed_forward(hf, hidden * hf["n_shared_experts"])
        moe = parts.moe(router, parts.experts(hf, hidden), shared, biased=True)
    attention = _latent_attention(hf, max_length)
    return DeepSeekV3TransformerBlock.Config(attention=attention, moe=moe, feed_forward=dense, **parts.norms(hf))


def deepseek_v3(hf: Mapping[str, Any], max_length: int) -> DeepSeekV3Model.Config:
    """DeepSeek-V3 without its extra prediction layers."""
    layers = [_deepseek_block(hf, layer, max_length) for layer in range(hf["num_hidden_layers"])]
    return DeepSeekV3Model.Config(norm=parts.norm(hf, hf["hidden_size"]), layers=layers, **parts.ends(hf))


def deepseek_extra_layers(hf: Mapping[str, Any]) -> str:
    """The prediction layers that the config announces beyond the model's own."""
    first, count = hf["num_hidden_layers"], hf.get("num_nextn_predict_layers") or hf.get("num_mtp_layers") or 0
    return rf"^model\.layers\.({'|'.join(str(first + i) for i in range(count)) or 'none'})\."


class GptOssAdapter(GptOssStateDictAdapter):
    """torchtitan's adapter for files of plain weights, [E, D, 2F] and [E, F, D]; its own knows only mxfp4's names."""

    def __init__(self, model_config: GptOssModel.Config, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        moe = "model.layers.{}.mlp.experts."
        inner = "layers.{}.moe.routed_experts.inner_experts."
        names = {hf: ours for hf, ours in self.from_hf_map.items() if not hf.startswith(moe)}
        self.from_hf_map = names | {
            moe + "gate_up_proj": inner + "mlp1_weight_EGD",
            moe + "gate_up_proj_bias": inner + "mlp1_bias_EG",
            moe + "down_proj": inner + "mlp2_weight_EDF",
            moe + "down_proj_bias": inner + "mlp2_bias_ED",
        }

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return parts.exchanged(super().to_hf(state_dict))

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return super().from_hf(parts.exchanged(hf_state_dict))


def _sink_attention(hf: Mapping[str, Any], window: int | None, max_length: int) -> SinkAttention.Config:
    width, heads, kv_heads, head_dim = (
        hf[n] for n in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    out = ScaledBiasRowwiseLinear.Config(
        in_features=heads * head_dim, out_features=width, bias=True, param_init=parts.SKIP
    )
    wq, wkv = parts.linear(width, heads * head_dim, bias=True), parts.linear(width, kv_heads * head_dim, bias=True)
    return SinkAttention.Config(
        dim=width,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        qkv_linear=QKVLinear.Config(head_dim=head_dim, wq=wq, wkv=wkv),
        wo=out,
        sliding_window_size=window,
        inner_attention=VarlenAttention.Config(window_size=(-1, 0) if window is None else (window - 1, 0)),
        rope=parts.rope(CosSinRoPE, hf, head_dim, max_length),
        param_init={"sinks": skip_param_init},
    )


def _gpt_oss_block(hf: Mapping[str, Any], layer: int, max_length: int) -> GptOssTransformerBlock.Config:
    kinds = hf.get("layer_types")
    sliding = kinds[layer] == "sliding_attention" if kinds else layer % 2 == 0
    inner = GptOssGroupedExperts.Config(
        dim=hf["hidden_size"],
        hidden_dim=hf["intermediate_size"],
        num_experts=parts.expert_count(hf),
        swiglu_limit=hf.get("swiglu_limit") or 7.0,
        param_init=dict.fromkeys(
            ("mlp1_weight_EGD", "mlp1_bias_EG", "mlp2_weight_EDF", "mlp2_bias_ED"), skip_param_init
        ),
    )
    # Softmax over the chosen logits is softmax over all of them, normalised over the chosen.
    moe = parts.moe(parts.router(hf, bias=True), parts.experts_of(hf, inner))
    attention = _sink_attention(hf, hf["sliding_window"] if sliding else None, max_length)
    return GptOssTransformerBlock.Config(attention=attention, moe=moe, **parts.norms(hf))


def gpt_oss(hf: Mapping[str, Any], max_length: int) -> GptOssModel.Config:
    """gpt-oss."""
    layers = [_gpt_oss_block(hf, layer, max_length) for layer in range(hf["num_hidden_layers"])]
    return GptOssModel.Config(norm=parts.norm(hf, hf["hidden_size"]), layers=layers, **parts.ends(hf))
