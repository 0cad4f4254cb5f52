"""Tiny random models in HF layout: a Qwen3-MoE with a byte-level tokenizer, and one of each family by transformers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 4096,
    "mlp_only_layers": [],
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "use_sliding_window": False,
    "vocab_size": 512,
    "bos_token_id": None,
    "eos_token_id": 258,
}


def random_weights(config: dict, seed: int) -> dict[str, np.ndarray]:
    """HF-named float32 weights; experts and gates large enough that routing matters."""
    rng = np.random.default_rng(seed)
    d, h, kv, hd = (config[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    f, e = config["moe_intermediate_size"], config["num_experts"]

    def w(rows: int, cols: int, gain: float = 1.0) -> np.ndarray:
        return (rng.standard_normal((rows, cols)) * gain / cols**0.5).astype(np.float32)

    out = {"model.embed_tokens.weight": w(config["vocab_size"], d), "model.norm.weight": np.ones(d, np.float32)}
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        out |= {
            p + "input_layernorm.weight": np.ones(d, np.float32),
            p + "post_attention_layernorm.weight": np.ones(d, np.float32),
            p + "self_attn.q_proj.weight": w(h * hd, d),
            p + "self_attn.k_proj.weight": w(kv * hd, d),
            p + "self_attn.v_proj.weight": w(kv * hd, d),
            p + "self_attn.o_proj.weight": w(d, h * hd),
            p + "self_attn.q_norm.weight": np.ones(hd, np.float32),
            p + "self_attn.k_norm.weight": np.ones(hd, np.float32),
            p + "mlp.gate.weight": w(e, d, 2.0),
        }
        for j in range(e):
            out[p + f"mlp.experts.{j}.gate_proj.weight"] = w(f, d)
            out[p + f"mlp.experts.{j}.up_proj.weight"] = w(f, d)
            out[p + f"mlp.experts.{j}.down_proj.weight"] = w(d, f)
    return out


def byte_tokenizer(
    specials: Sequence[str] = SPECIALS,
    ids: Mapping[str, int] | None = None,
    merges: Sequence[tuple[str, str]] = (),
) -> Tokenizer:
    """One id a byte (0-255), then merged pairs and the control tokens, or those under the given ids."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    tok = Tokenizer(models.BPE({word: i for i, word in enumerate(words)} | dict(ids or {}), list(merges)))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([*specials, *(ids or {})])
    return tok


def write_chat_model(
    folder: Path, model_type: str, tokenizer: Tokenizer, *, eos: str, template: str | None = None, **config: object
) -> Path:
    """A model folder as far as rendering reads it: no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type} | config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id(eos)}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos, "chat_template": template}))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_model(folder: Path, *, seed: int = 0, **changes: object) -> Path:
    """Writes config, weights and tokenizer; `changes` replace config values."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | changes
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"]}))
    save_file(random_weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        )
    )
    return folder


_SMALL = {
    "vocab_size": 67,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    "tie_word_embeddings": False,
    "eos_token_id": 66,
}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 7}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 0],
    },
}
_LATENT = {
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 9,
    "num_key_value_heads": 4,
    "head_dim": 4,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}
FAMILIES = {
    "qwen3": _SMALL | {"intermediate_size": 20},
    "qwen3_moe": _SMALL | _EXPERTS | {"intermediate_size": 20, "mlp_only_layers": [1], "norm_topk_prob": True},
    "qwen3_5_text": _SMALL | _DELTA | {"intermediate_size": 20},
    "qwen3_5_moe_text": _SMALL | _EXPERTS | _DELTA | {"shared_expert_intermediate_size": 11},
    "llama": _SMALL
    | {"intermediate_size": 20}
    | {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "deepseek_v3": _SMALL
    | _LATENT
    | {"n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 7, "intermediate_size": 20}
    | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "n_shared_experts": 2, "routed_scaling_factor": 2.5}
    | {"norm_topk_prob": True, "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "gpt_oss": _SMALL
    | {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 7, "sliding_window": 9}
    | {"rope_parameters": _YARN | {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0}},
}
"""Fields of a tiny model of each family, all sizes different."""


def family_model(model_type: str, *, seed: int = 0, **changes: object) -> Any:
    """transformers' own model of a family in float32 with random weights, all of which matter."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(model_type, **FAMILIES[model_type] | changes)
    torch.manual_seed(seed)  # transformers draws some of them itself
    # Its default experts want rows of whole 16 bytes, which these models do not have.
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager")
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            noise = torch.randn(tensor.shape, generator=rng)
            if name.endswith("inv_freq"):
                continue
            if tensor.ndim > 1:
                gain = 2.0 if ".gate." in name or "router" in name else 0.6
                tensor.copy_(noise * gain / tensor.shape[-1] ** 0.5)
            else:
                tensor.add_(0.2 * noise)
    return model.eval()


def write_vision_family(folder: Path, model_type: str) -> Any:
    """Writes Qwen3.5 as it is published, with a vision tower and a prediction layer; returns its language model."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    text = family_model(f"{model_type}_text")
    vision = {"depth": 1, "hidden_size": 12, "intermediate_size": 14, "num_heads": 2, "out_hidden_size": 24}
    vision |= {"num_position_embeddings": 16}
    config = transformers.AutoConfig.for_model(
        model_type, text_config=text.config.to_dict(), vision_config=vision, tie_word_embeddings=False
    )
    whole = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(folder, save_original_format=False)  # experts fused, as published
    path = folder / "model.safetensors"
    extra = {"mtp.fc.weight": torch.randn(24, 48), "mtp.layers.0.mlp.experts.0.up_proj.weight": torch.randn(7, 24)}
    save_file(load_file(path) | extra, path, metadata={"format": "pt"})
    return text


def write_family(folder: Path, model_type: str, *, fused: bool = False, **changes: Any) -> Any:
    """Writes `family_model` with transformers' own `save_pretrained` and returns it; `fused` keeps experts together."""
    model = family_model(model_type, **changes)
    model.save_pretrained(folder, save_original_format=not fused)
    return model
