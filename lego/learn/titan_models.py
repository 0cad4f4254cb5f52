"""HF config.json to torchtitan's model: its config tree, weight names and sharding, one `Family` a kind of model."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from lego.errors import UsageError
from lego.learn import titan_cpu  # before torchtitan, which it makes importable without an accelerator
from lego.learn import titan_others as others
from lego.learn import titan_qwen as qwen
from lego.learn.titan_parts import ValueLinear

# isort: split
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.deepseek_v3.parallelize import parallelize_deepseekv3
from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter
from torchtitan.models.gpt_oss.parallelize import parallelize_gptoss
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3.parallelize import parallelize_qwen3
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.models.qwen3_5 import parallelize_qwen3_5
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
    ropes: tuple[str, ...] = ("default",)
    """Rope types that torchtitan computes as the model does."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the model's forward."""
    carried: Callable[[Mapping[str, Any]], str] | None = None
    """HF tensors that have no place in the model and are written back as they came, as a regular expression."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model folder's network, described."""

    hf: Mapping[str, Any]
    family: Family
    config: Decoder.Config
    adapter: BaseStateDictAdapter
    head: Head

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

    @property
    def carried(self) -> str | None:
        """HF tensors that have no place in the model, as a regular expression."""
        return self.family.carried and self.family.carried(self.hf)


class _Fields(dict[str, Any]):
    """An HF config's fields; one that is missing is the user's error."""

    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.path = path

    def __missing__(self, name: str) -> Any:
        raise UsageError(f"{self.path} has no {name}, which a {self['model_type']} needs")


def architecture(folder: Path, max_length: int, head: Head = "logprobs") -> Architecture:
    """The network of a model folder. Raises UsageError if this trainer would compute another model than it says."""
    hf = read_config(folder)
    family = FAMILIES[hf["model_type"]]
    config = family.config(hf, max_length)
    if titan_cpu.lacks_delta_kernels(config):
        raise UsageError(f"{folder}: a {hf['model_type']} needs flash-linear-attention, which is not installed")
    # Ties are ours to keep: torchtitan's adapters want a tied embedding in every call.
    adapter = family.adapter(replace(config, enable_weight_tying=False), None)  # type: ignore[arg-type]
    if head == "values":
        config.enable_weight_tying = False
        zeros = {"weight": torch.nn.init.zeros_}
        config.lm_head = ValueLinear.Config(in_features=config.dim, out_features=1, param_init=zeros)
    if titan_cpu.on_cpu():
        titan_cpu.swap(config)
    return Architecture(hf=hf, family=family, config=config, adapter=adapter, head=head)


def read_config(folder: Path) -> Mapping[str, Any]:
    """The folder's config.json, its text model's fields on top, checked against what its family can be."""
    path = folder / "config.json"
    top = json.loads(path.read_text())
    kind = top.get("model_type")
    if kind not in FAMILIES:
        raise UsageError(f"{path}: model_type {kind!r}, wanted one of {', '.join(FAMILIES)}")
    kept = {name: top[name] for name in ("model_type", "tie_word_embeddings") if name in top}
    config = _Fields(path, top | top.get("text_config", {}) | kept)
    config["rope"] = _rope(config)
    wrong = [
        f"{name}={config[name]!r} (want {want!r})"
        for name, want in FAMILIES[kind].fixed.items()
        if config.get(name) not in (None, want)
    ] + _wrong_rope(config, FAMILIES[kind].ropes)
    if wrong:
        raise UsageError(f"{path}: cannot train a model with {', '.join(wrong)}")
    return config


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope's fields wherever this config keeps them."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = given.get("rope_type", given.get("type", "default"))
    theta = config.get("rope_theta") or given.get("rope_theta") or 10000.0
    return dict(given) | {"rope_type": kind, "rope_theta": theta}


def _wrong_rope(config: Mapping[str, Any], kinds: tuple[str, ...]) -> list[str]:
    rope = config["rope"]
    if rope["rope_type"] not in kinds:
        return [f"rope type {rope['rope_type']!r} (want {' or '.join(kinds)})"]
    if rope["rope_type"] != "yarn":
        return []
    # torchtitan scales attention by what the model calls mscale_all_dim, and rotates without scaling.
    wrong = [f"rope {n}={rope[n]!r} (want none)" for n in ("attention_factor",) if rope.get(n) is not None]
    if "kv_lora_rank" in config and rope.get("mscale") != rope.get("mscale_all_dim"):
        wrong += [f"rope mscale={rope.get('mscale')!r} (want mscale_all_dim, {rope.get('mscale_all_dim')!r})"]
    return wrong


def matches(pattern: str | None, name: str) -> bool:
    """Whether a pattern, if there is one, is found in a name."""
    return pattern is not None and re.search(pattern, name) is not None


_ALL = {"quantization_config": None, "hidden_act": "silu"}
_PLAIN = _ALL | {"attention_bias": False}

_QWEN3 = Family(
    config=qwen.qwen3,
    adapter=Qwen3StateDictAdapter,
    parallelize=parallelize_qwen3,
    fixed=_PLAIN | {"use_sliding_window": False},
)
_QWEN35 = Family(
    config=qwen.qwen3_5,
    adapter=qwen.Qwen35Adapter,
    parallelize=parallelize_qwen3_5,
    fixed=_PLAIN,
    extra={"special_tokens": {"image_id": -1, "video_id": -2}},
    carried=lambda hf: r"^(mtp\.|model\.visual\.)",
)
FAMILIES: Mapping[str, Family] = {
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "qwen3_5": _QWEN35,
    "qwen3_5_text": _QWEN35,
    "qwen3_5_moe": _QWEN35,
    "qwen3_5_moe_text": _QWEN35,
    "llama": Family(
        config=others.llama,
        adapter=Llama3StateDictAdapter,
        parallelize=parallelize_llama,
        fixed=_PLAIN | {"mlp_bias": False},
        ropes=("default", "llama3"),
    ),
    "deepseek_v3": Family(
        config=others.deepseek_v3,
        adapter=DeepSeekV3StateDictAdapter,
        parallelize=parallelize_deepseekv3,
        fixed=_PLAIN
        | {"rope_interleave": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        | {"moe_layer_freq": 1},
        ropes=("default", "yarn"),
        carried=others.deepseek_extra_layers,
    ),
    "gpt_oss": Family(
        config=others.gpt_oss,
        adapter=others.GptOssAdapter,
        parallelize=parallelize_gptoss,
        fixed=_ALL | {"attention_bias": True, "swiglu_alpha": 1.702},
        ropes=("default", "yarn"),
    ),
}
"""By the config's model_type."""
