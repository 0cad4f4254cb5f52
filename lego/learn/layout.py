"""How a network is spread over ranks, and which models a layout fits; imports no torch.

The ranks are replicate x shard x tensor_parallel, the last fastest. Experts are spread over expert_parallel
neighbours inside one replica, whatever these are in the other layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

MODEL_TYPES = (
    "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text",
    "llama", "deepseek_v3", "gpt_oss",
)  # fmt: skip
"""What `titan_models` knows, told here without torch."""
Checkpointing = Literal["none", "selective", "full"]
DType = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the model is spread and computed."""

    world_size: int = 1
    replicate: int = 1
    """Copies of the sharded weights (HSDP)."""
    expert_parallel: int = 1
    tensor_parallel: int = 1
    """Ranks that share each layer's matrices and each packed row (with sequence parallelism between layers)."""
    dtype: DType = "float32"
    """Of the computation; weights, gradients and moments are float32."""
    max_length: int = 4096
    activation_checkpointing: Checkpointing = "none"
    cpu_offload: bool = False
    """Weights, gradients and optimizer state wait in CPU memory."""
    stall_s: float = 25.0

    @property
    def data_ranks(self) -> int:
        """Parts of a batch: the ranks of one tensor-parallel group are given the same one."""
        return self.world_size // self.tensor_parallel

    @property
    def shards(self) -> int:
        """Ranks over which one copy of the weights is spread, apart from tensor parallelism."""
        return self.data_ranks // self.replicate

    def data_rank(self, rank: int) -> int:
        """The part of the batch that this rank computes."""
        return rank // self.tensor_parallel


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """What of a model a layout has to fit; 0 where the model has no such thing."""

    heads: int
    kv_heads: int
    hidden: int
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    experts: int = 0
    expert_hidden: int = 0
    attention_bias: bool = False


def model_sizes(config: Mapping[str, Any]) -> ModelSizes:
    """The sizes in an HF config.json; 0 for what is not there, or no whole number."""
    nested = config.get("text_config")
    text = nested if isinstance(nested, Mapping) else config

    def size(*names: str) -> int:
        return next((text[name] for name in names if isinstance(text.get(name), int) and text[name]), 0)

    return ModelSizes(
        heads=size("num_attention_heads"),
        kv_heads=size("num_key_value_heads", "num_attention_heads"),
        hidden=size("hidden_size"),
        linear_key_heads=size("linear_num_key_heads"),
        linear_value_heads=size("linear_num_value_heads"),
        experts=size("num_experts", "n_routed_experts", "num_local_experts"),
        expert_hidden=size("moe_intermediate_size", "intermediate_size"),
        attention_bias=bool(text.get("attention_bias")),
    )


def layout_problems(layout: Layout, sizes: ModelSizes) -> list[str]:
    """What is wrong with a layout for a model of these sizes, one `field: value, wanted ...` each; empty if it fits."""
    fields = ("world_size", "replicate", "tensor_parallel", "expert_parallel")
    small = [f"{name}: {getattr(layout, name)}, wanted at least 1" for name in fields if getattr(layout, name) < 1]
    return small or [*_ranks(layout), *_heads(layout, sizes), *_experts(layout, sizes)]


def _ranks(layout: Layout) -> list[str]:
    copies = layout.replicate * layout.tensor_parallel
    if layout.world_size % copies:
        return [f"world_size: {layout.world_size}, wanted a multiple of replicate x tensor_parallel, {copies}"]
    within = layout.world_size // layout.replicate
    if within % layout.expert_parallel:
        return [f"expert_parallel: {layout.expert_parallel}, wanted a divisor of world_size / replicate, {within}"]
    return []


def _heads(layout: Layout, sizes: ModelSizes) -> list[str]:
    if layout.tensor_parallel > 1 and sizes.attention_bias:  # gpt-oss; torchtitan 0.3.0 gives each rank half of it
        return [
            f"tensor_parallel: {layout.tensor_parallel}, wanted 1: attention_bias would learn from a wrong gradient"
        ]
    names = ("heads", "kv_heads", "linear_key_heads", "linear_value_heads")
    return [
        f"tensor_parallel: {layout.tensor_parallel}, wanted a divisor of the model's {getattr(sizes, name)} {name}"
        for name in names
        if getattr(sizes, name) % layout.tensor_parallel
    ]


def _experts(layout: Layout, sizes: ModelSizes) -> list[str]:
    degree, experts = layout.expert_parallel, sizes.experts
    if experts == 0:
        return [f"expert_parallel: {degree}, wanted 1 for a model without experts"] if degree > 1 else []
    if experts % degree:
        return [f"expert_parallel: {degree}, wanted a divisor of the model's {experts} experts"]
    return _few_experts(layout, sizes)


def _few_experts(layout: Layout, sizes: ModelSizes) -> list[str]:
    """Where more ranks than experts share them, each expert is cut into equal parts."""
    replica = layout.world_size // layout.replicate
    parts = replica // layout.expert_parallel if layout.expert_parallel > 1 else layout.shards
    sharing = parts * layout.expert_parallel if layout.expert_parallel > 1 else layout.data_ranks
    if sharing <= sizes.experts:
        return []
    return [
        f"world_size: {layout.world_size}, wanted at most {sizes.experts} ranks to share {sizes.experts} experts, or "
        f"parts of each, {parts}, that divide its {getattr(sizes, name)} {name}"
        for name in ("hidden", "expert_hidden")
        if getattr(sizes, name) % parts
    ]
