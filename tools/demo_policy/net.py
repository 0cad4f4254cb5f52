"""The policy's network in plain torch for one CPU core: Qwen3-MoE arithmetic, key-value cache, HF weights."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes under their names in config.json; every layer has experts, heads are as wide as the stream together."""

    vocab_size: int
    hidden_size: int = 128
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    head_dim: int = 32
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 96
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


class Layer(nn.Module):
    """One block; the experts' matrices are stacked along their first axis."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d, f, e, hd = shape.hidden_size, shape.moe_intermediate_size, shape.num_experts, shape.head_dim
        width = shape.num_attention_heads * hd
        self.norm1, self.norm2 = nn.Parameter(torch.ones(d)), nn.Parameter(torch.ones(d))
        self.q_norm, self.k_norm = nn.Parameter(torch.ones(hd)), nn.Parameter(torch.ones(hd))
        self.q, self.k, self.v = (nn.Parameter(torch.empty(width, d)) for _ in range(3))
        self.o = nn.Parameter(torch.empty(d, width))
        self.gate = nn.Parameter(torch.empty(e, d))
        self.w1, self.w3 = nn.Parameter(torch.empty(e, f, d)), nn.Parameter(torch.empty(e, f, d))
        self.w2 = nn.Parameter(torch.empty(e, d, f))


@dataclass
class Cache:
    """Keys and values of B rows, room for T positions; `lengths` says how many each row holds."""

    keys: list[Tensor]
    values: list[Tensor]
    lengths: Tensor


class Net(nn.Module):
    """The whole network; positions, mask and cache are explicit, so trees and batches of ragged rows both fit."""

    frequencies: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Parameter(torch.empty(shape.vocab_size, shape.hidden_size))
        self.layers = tuple(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.blocks = nn.ModuleList(self.layers)
        self.norm = nn.Parameter(torch.ones(shape.hidden_size))
        half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        self.register_buffer("frequencies", shape.rope_theta**-half, persistent=False)
        self.permute_experts = 0
        """How far the chosen experts are moved round; a probe of how much the routing matters."""

    def start(self, seed: int, kinds: Sequence[Sequence[int]]) -> None:
        """Fresh weights; ids of one kind (the first: numbers) share a direction, and all ids share another.

        The first layer starts by looking one and two tokens back and at the number before, the others by
        looking anywhere and copying what they see; the experts start near zero.
        """
        g = torch.Generator().manual_seed(seed)
        d = self.shape.hidden_size
        common, *shared = F.normalize(torch.randn(1 + len(kinds), d, generator=g), dim=-1)
        with torch.no_grad():
            unique = F.normalize(torch.randn(self.embed.shape, generator=g), dim=-1)
            self.embed.copy_(0.5 * common + 0.85 * unique)
            for ids, direction in zip(kinds, shared, strict=True):
                self.embed[list(ids)] = 0.5 * common + 0.5 * direction + 0.7 * unique[list(ids)]
            for layer in self.layers:
                _start_layer(layer, g)
            self._look_back(self.layers[0], common, shared[0], g)

    def _look_back(self, layer: Layer, common: Tensor, number: Tensor, g: torch.Generator) -> None:
        """Heads 0 and 1 look at the token one and two before, the others at the nearest number before."""
        hd, heads = self.shape.head_dim, self.shape.num_attention_heads
        layer.q_norm.fill_(1.5)
        layer.k_norm.fill_(1.5)
        for head in range(heads):
            rows = slice(head * hd, (head + 1) * hd)
            used, back = (range(0, 5), head + 1) if head < 2 else (range(4, 8), 0)
            query, key = torch.zeros(hd), torch.zeros(hd)
            for f in used:
                query[f] = 1.0
                key[f] = torch.cos(self.frequencies[f] * back)
                key[f + hd // 2] = torch.sin(self.frequencies[f] * back)
            sign = common if head < 2 else number - 0.5 * common
            layer.q[rows] = 0.1 * layer.q[rows] + torch.outer(query, common)
            layer.k[rows] = 0.1 * layer.k[rows] + torch.outer(key, sign)
            layer.v[rows] = 0.4 * _orthonormal(hd, layer.v.shape[1], g)
            layer.o[:, rows] = 0.4 * _orthonormal(hd, layer.o.shape[0], g).T

    def forward(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache | None = None
    ) -> tuple[Tensor, Tensor]:
        """Hidden states after the last norm [B,T,d] and the routers' load-balance loss.

        Without a mask attention is causal over the T tokens; with a cache the tokens join it at `positions`.
        """
        eps = self.shape.rms_norm_eps
        x = F.embedding(ids, self.embed)
        angles = positions[..., None].float() * self.frequencies
        turn = angles.cos()[:, None], angles.sin()[:, None]
        balance = x.new_zeros(())
        for i, layer in enumerate(self.layers):
            x = x + self._attend(i, _norm(x, layer.norm1, eps), turn, mask, positions, cache)
            y, loss = self._experts(layer, _norm(x, layer.norm2, eps).flatten(0, 1))
            x = x + y.view_as(x)
            balance = balance + loss
        return _norm(x, self.norm, eps), balance

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.embed.T

    def new_cache(self, rows: int, room: int) -> Cache:
        s = self.shape
        shape = (rows, s.num_attention_heads, room, s.head_dim)
        keys, values = ([torch.zeros(shape) for _ in self.layers] for _ in range(2))
        return Cache(keys, values, torch.zeros(rows, dtype=torch.long))

    def _attend(
        self, i: int, x: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor | None, at: Tensor, cache: Cache | None
    ) -> Tensor:
        layer, (b, t, _) = self.layers[i], x.shape
        heads, hd, eps = self.shape.num_attention_heads, self.shape.head_dim, self.shape.rms_norm_eps
        q, k, v = ((x @ w.T).view(b, t, heads, hd) for w in (layer.q, layer.k, layer.v))
        q = _rotate(_norm(q, layer.q_norm, eps).transpose(1, 2), *turn)
        k = _rotate(_norm(k, layer.k_norm, eps).transpose(1, 2), *turn)
        v = v.transpose(1, 2)
        if cache is not None:
            rows, room = torch.arange(b)[:, None], int(at.max()) + 1
            cache.keys[i][rows, :, at] = k.transpose(1, 2)
            cache.values[i][rows, :, at] = v.transpose(1, 2)
            k, v = cache.keys[i][:, :, :room], cache.values[i][:, :, :room]
            mask = (torch.arange(room) <= at[:, :, None])[:, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return out.transpose(1, 2).reshape(b, t, heads * hd) @ layer.o.T

    def _experts(self, layer: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
        k, experts = self.shape.num_experts_per_tok, self.shape.num_experts
        chances = (x @ layer.gate.T).softmax(-1)
        weights, chosen = chances.topk(k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        if self.permute_experts:
            chosen = (chosen + self.permute_experts) % experts
        order = chosen.flatten().argsort(stable=True)
        tokens = order // k
        counts = torch.bincount(chosen.flatten(), minlength=experts)
        parts = x[tokens].split(counts.tolist())
        out = torch.cat([_expert(part, layer, j) for j, part in enumerate(parts)])
        out = out * weights.flatten()[order][:, None]
        share = counts.float() / counts.sum()
        return torch.zeros_like(x).index_add(0, tokens, out), experts * (share * chances.mean(0)).sum()


def _start_layer(layer: Layer, g: torch.Generator) -> None:
    d = layer.q.shape[1]
    for matrix in (layer.q, layer.k, layer.gate, layer.w1, layer.w3):
        matrix.normal_(0, d**-0.5, generator=g)
    for matrix in (layer.v, layer.o):
        matrix.normal_(0, 0.2 * d**-0.5, generator=g)
        matrix += 0.4 * torch.eye(*matrix.shape)
    layer.w2.normal_(0, 0.1 * layer.w2.shape[-1] ** -0.5, generator=g)


def _orthonormal(rows: int, columns: int, g: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(columns, rows, generator=g))[0].T


def _expert(x: Tensor, layer: Layer, j: int) -> Tensor:
    return (F.silu(x @ layer.w1[j].T) * (x @ layer.w3[j].T)) @ layer.w2[j].T


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def config(shape: Shape, end_id: int, pad_id: int) -> dict:
    """config.json as vLLM, torchtitan and transformers read it."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "decoder_sparse_step": 1,
        "eos_token_id": end_id,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": 4 * shape.moe_intermediate_size,
        "max_position_embeddings": 4096,
        "mlp_only_layers": [],
        "moe_intermediate_size": shape.moe_intermediate_size,
        "norm_topk_prob": True,
        "num_attention_heads": shape.num_attention_heads,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.num_experts_per_tok,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_key_value_heads": shape.num_attention_heads,
        "pad_token_id": pad_id,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "router_aux_loss_coef": 0.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_sliding_window": False,
        "vocab_size": shape.vocab_size,
    }


_NAMES = {
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate",
}
_EXPERT_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def save(net: Net, folder: Path, end_id: int, pad_id: int) -> None:
    """Writes config.json, generation_config.json and model.safetensors (float32 holding bfloat16 values)."""
    tensors = {name: tensor.detach().bfloat16().float().contiguous() for name, tensor in _named(net)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config(net.shape, end_id, pad_id), indent=1) + "\n")
    generation = {"eos_token_id": end_id, "pad_token_id": pad_id, "do_sample": True, "temperature": 1.0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")


def load(folder: Path) -> Net:
    """Reads a folder that `save` wrote."""
    values = json.loads((folder / "config.json").read_text())
    net = Net(Shape(**{name: values[name] for name in Shape.__dataclass_fields__}))
    tensors = load_file(folder / "model.safetensors")
    with torch.no_grad():
        for name, tensor in _named(net):
            tensor.copy_(tensors[name])
    return net


def _named(net: Net) -> list[tuple[str, Tensor]]:
    """HF names and (views of) our parameters."""
    named: list[tuple[str, Tensor]] = [("model.embed_tokens.weight", net.embed), ("model.norm.weight", net.norm)]
    for i, layer in enumerate(net.layers):
        prefix = f"model.layers.{i}."
        named += [(f"{prefix}{name}.weight", getattr(layer, own)) for own, name in _NAMES.items()]
        for own, name in _EXPERT_NAMES.items():
            stacked = getattr(layer, own)
            named += [(f"{prefix}mlp.experts.{j}.{name}.weight", stacked[j]) for j in range(net.shape.num_experts)]
    return named
