"""A tiny random Qwen3-MoE in HF layout with a byte-level tokenizer, for tests that need real engines."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

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
