"""Tiny models that vLLM's CPU kernels can serve: one of `tests.tiny.FAMILIES`, in larger sizes, with a tokenizer."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import torch

from lego.engine.vllm import VllmServer
from lego.engine.vllm_client import VllmEngine
from tests.tiny import byte_tokenizer, write_family

_SIZES = {
    "eos_token_id": 258,
    "head_dim": 32,
    "hidden_size": 128,
    "intermediate_size": 160,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
_EXPERTS = {"mlp_only_layers": [], "moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2}
_DELTA = {
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_key_head_dim": 64,  # 64 or 128: the CPU kernels know no other
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 64,
    "num_hidden_layers": 4,
    "shared_expert_intermediate_size": 96,
}
_OF_FAMILY = {"qwen3": {}, "qwen3_moe": _EXPERTS, "qwen3_5_moe_text": _EXPERTS | _DELTA}


def write_served(folder: Path, family: str, seed: int = 0) -> Path:
    """Writes a random model of the family and its tokenizer."""
    torch.manual_seed(seed)  # for what transformers itself draws
    write_family(folder, family, seed=seed, **_SIZES | _OF_FAMILY[family])
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


@asynccontextmanager
async def one_engine(server: VllmServer, model: Path, logs: Path) -> AsyncIterator[VllmEngine]:
    """The one engine behind a pool of one, for tests of what an engine does and a pool does not show."""
    async with server.open(model, logs) as pool:
        (replica,) = pool._replicas
        assert replica.engine is not None
        yield replica.engine
