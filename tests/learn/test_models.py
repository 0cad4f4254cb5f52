"""Every family against transformers' own model, fp32, and its weights in and out of HF folders."""

import json
import logging
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lego.engine.folder import read_model_folder
from lego.errors import UsageError
from lego.learn import hf_folder, titan, titan_cpu, titan_models
from lego.learn.layout import MODEL_TYPES
from lego.learn.titan_parts import ReplayRouter
from lego.learn.titan_qwen import Qwen35Adapter
from lego.learn.titan_weights import FileNames, places
from tests.learn.policies import joined, logprobs, policy, recorded_routes
from tests.tiny import FAMILIES, write_family, write_model, write_vision_family

MOE = ["qwen3_moe", "qwen3_5_moe_text", "deepseek_v3", "gpt_oss"]


def ids(n, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 67, n))


def reference(model, documents):
    out = []
    for doc in documents:
        scores = torch.log_softmax(model(doc[None]).logits[0].float(), -1)
        out.append(scores[:-1].gather(-1, doc[1:, None])[:, 0])
    return out


DOCUMENTS = [ids(n, seed) for seed, n in enumerate((90, 40, 40, 13))]
ROW = torch.cat(DOCUMENTS)
POSITIONS = torch.cat([torch.arange(len(d)) for d in DOCUMENTS])


def difference(made, model):
    """Largest difference of log-probabilities, documents packed against documents run one by one."""
    got, start, worst = logprobs(made, ROW, POSITIONS.clone()), 0, 0.0
    for want in reference(model, DOCUMENTS):
        worst = max(worst, float((got[start : start + len(want)] - want).abs().max()))
        start += len(want) + 1
    return worst


def stored(folder):
    weights = {}
    for path in folder.glob("*.safetensors"):
        weights |= load_file(path)
    return weights


def same(got, want):
    return got.keys() == want.keys() and all(
        got[n].dtype == want[n].dtype and torch.equal(got[n], want[n]) for n in want
    )


PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e6}
VARIANTS = [
    ("qwen3", {"rope_parameters": PLAIN_ROPE, "rms_norm_eps": 1e-2, "tie_word_embeddings": True}),
    ("qwen3_moe", {"norm_topk_prob": False, "num_experts": 12, "mlp_only_layers": [], "decoder_sparse_step": 2}),
    ("qwen3_5_moe_text", {"hidden_size": 16, "num_experts": 3, "num_experts_per_tok": 1, "rms_norm_eps": 1e-2}),
    ("llama", {"rope_parameters": PLAIN_ROPE, "num_key_value_heads": 4}),
    ("deepseek_v3", {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    ("deepseek_v3", {"rope_parameters": PLAIN_ROPE, "first_k_dense_replace": 0, "rms_norm_eps": 1e-2}),
    ("gpt_oss", {"rope_parameters": PLAIN_ROPE, "layer_types": ["full_attention"] * 2 + ["sliding_attention"]}),
]


@pytest.mark.parametrize(("kind", "changes"), [*((kind, {}) for kind in FAMILIES), *VARIANTS])
def test_a_family_computes_what_transformers_does_and_gives_its_weights_back(tmp_path, kind, changes):
    model = write_family(tmp_path, kind, **changes)
    made = policy(tmp_path)
    with torch.no_grad():
        assert difference(made, model) <= 1e-5
    assert same(dict(made.weights.stream(None)), stored(tmp_path))
    assert len(read_model_folder(tmp_path).moe_layers) == made.arch.moe_layers


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_a_published_qwen35_keeps_what_it_does_not_train(tmp_path, kind, caplog):
    model = write_vision_family(tmp_path, kind)
    with caplog.at_level(logging.INFO):
        made = policy(tmp_path)
    assert "not trained and stay as they are" in caplog.text
    assert not any("vision" in name for name in made.parameters())
    with torch.no_grad():
        assert difference(made, model) <= 1e-5
    want = stored(tmp_path)
    assert {"mtp.fc.weight", "model.visual.blocks.0.attn.qkv.weight"} <= want.keys()
    assert same(dict(made.weights.stream(None)), want)


def test_an_announced_prediction_layer_is_carried_and_another_is_not(tmp_path, caplog):
    model = write_family(tmp_path, "deepseek_v3", num_mtp_layers=1)
    path = tmp_path / "model.safetensors"
    extra = {"model.layers.3.eh_proj.weight": torch.randn(24, 48)}
    save_file(load_file(path) | extra, path)
    with caplog.at_level(logging.INFO):
        made = policy(tmp_path)
    assert "model.layers.3.eh_proj.weight" in caplog.text
    with torch.no_grad():
        assert difference(made, model) <= 1e-5
    assert same(dict(made.weights.stream(None)), stored(tmp_path))
    save_file(load_file(path) | {"model.layers.4.eh_proj.weight": torch.ones(1)}, path)
    with pytest.raises(UsageError, match=r"no place.*layers\.4\.eh_proj"):
        policy(tmp_path)


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_fused_experts_are_read_and_written_fused(tmp_path, kind):
    model = write_family(tmp_path, kind, fused=True)
    assert any(name.endswith("experts.gate_up_proj") for name in stored(tmp_path))
    made = policy(tmp_path)
    with torch.no_grad():
        assert difference(made, model) <= 1e-5
    assert same(dict(made.weights.stream(None)), stored(tmp_path))


def test_qwen35_experts_stored_one_by_one_are_read_and_written_so(tmp_path):
    model = write_family(tmp_path, "qwen3_5_moe_text")
    split = FileNames(fused=False, flat=False, values=False).to_file(stored(tmp_path))
    save_file({name: t.contiguous() for name, t in split.items()}, tmp_path / "model.safetensors")
    assert any(name.endswith("experts.4.down_proj.weight") for name in stored(tmp_path))
    made = policy(tmp_path)
    with torch.no_grad():
        assert difference(made, model) <= 1e-5
    assert same(dict(made.weights.stream(None)), stored(tmp_path))


@pytest.mark.parametrize("stock", [True, False])
def test_torchtitans_own_qwen35_adapter_has_the_experts_exchanged_and_ours_has_not(tmp_path, stock):
    write_vision_family(tmp_path, "qwen3_5_moe")
    arch = titan_models.architecture(tmp_path, 256)
    adapter = Qwen35Adapter.__mro__[1](arch.config, None) if stock else arch.adapter
    with torch.device("meta"):
        shapes = {n: t.shape for n, t in adapter.to_hf(dict(arch.config.build().named_parameters())).items()}
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    assert (shapes[name] == stored(tmp_path)[name].shape) is not stock


@pytest.mark.parametrize("key_stored", [False, True])
@pytest.mark.parametrize("kind", FAMILIES)
def test_c01_a_tied_head_learns_with_its_embedding(tmp_path, kind, key_stored):
    """With and without its key in the file: what transformers computes before a step, and from the export after it."""
    model = write_family(tmp_path / "m", kind, tie_word_embeddings=True)
    path = tmp_path / "m" / "model.safetensors"
    embedding = "model.embed_tokens.weight"
    if key_stored:
        save_file(load_file(path) | {"lm_head.weight": load_file(path)[embedding].clone()}, path)
    made = policy(tmp_path / "m")
    assert made.model.lm_head.weight is made.model.tok_embeddings.weight
    assert same(dict(made.weights.stream(None)), load_file(path))
    with torch.no_grad():
        assert difference(made, model) <= 1e-5
    logprobs(made, ROW, POSITIONS.clone()).mean().backward()
    torch.optim.SGD(made.parameters().values(), lr=0.02).step()
    before = load_file(path)
    shutil.copytree(tmp_path / "m", tmp_path / "new")
    made.export_folder(tmp_path / "new")
    after = stored(tmp_path / "new")
    assert after.keys() == before.keys() and not torch.equal(after[embedding], before[embedding])
    assert not key_stored or torch.equal(after["lm_head.weight"], after[embedding])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "new", dtype=torch.float32, experts_implementation="eager"
    )
    with torch.no_grad():
        assert difference(made, model) <= 1e-5


@pytest.mark.parametrize("kind", FAMILIES)
def test_gradients_are_those_of_transformers(tmp_path, kind):
    """Read off one step of plain descent, in the file's names, fused as transformers has them in memory."""
    model = write_family(tmp_path, kind, fused=True)
    made, lr = policy(tmp_path), 0.01
    before = {name: t.clone() for name, t in made.weights.stream(None)}
    logprobs(made, ROW, POSITIONS.clone())[: len(DOCUMENTS[0]) - 1].sum().backward()
    torch.optim.SGD(made.parameters().values(), lr=lr).step()
    after = dict(made.weights.stream(None))
    torch.cat(reference(model, DOCUMENTS[:1])).sum().backward()
    for name, parameter in model.named_parameters():
        want, got = parameter.grad, (before[name] - after[name]) / lr
        # A difference of stored weights knows a gradient to the rounding of the weights.
        noise = 1e-7 * before[name].abs().max() / lr
        assert (got - want).abs().max() <= 1e-4 * want.abs().max() + noise, name


def gate_weights(kind, config, logits, bias, ids_K):
    """What each family's paper or code has a token's experts weigh."""
    if kind == "gpt_oss":
        return torch.softmax(logits.gather(-1, ids_K), -1)
    if kind == "deepseek_v3":
        chosen = torch.sigmoid(logits).gather(-1, ids_K)
        return chosen / chosen.sum(-1, keepdim=True) * config["routed_scaling_factor"]
    chosen = torch.softmax(logits, -1).gather(-1, ids_K)
    return chosen / chosen.sum(-1, keepdim=True)


@pytest.mark.parametrize("kind", MOE)
def test_recorded_ids_choose_and_live_gates_weigh_as_the_model_does(tmp_path, kind):
    write_family(tmp_path, kind)
    made = policy(tmp_path)
    live, own = recorded_routes(made, ROW, POSITIONS.clone())
    assert torch.equal(logprobs(made, ROW, POSITIONS.clone(), own), live)
    rng = np.random.default_rng(0)
    shape = (len(ROW), made.arch.moe_layers)
    forced = torch.from_numpy(np.argsort(rng.random((*shape, made.arch.experts)), -1)[..., : made.arch.top_k].copy())
    router = next(m for m in made.model.modules() if isinstance(m, ReplayRouter))
    seen = []
    handle = router.register_forward_hook(lambda module, args, out: seen.append((args[0][0].detach(), out)))
    logprobs(made, ROW, POSITIONS.clone(), forced).sum().backward()
    handle.remove()
    x_LD, (weights, chosen, _) = seen[0]
    assert torch.equal(chosen[0], forced[:, 0])
    weight, bias = router.gate.weight.full_tensor(), router.gate.bias
    logits = torch.nn.functional.linear(x_LD, weight, None if bias is None else bias.full_tensor())
    want = gate_weights(kind, FAMILIES[kind], logits, bias, forced[:, 0])
    assert (weights[0] - want).abs().max() < 1e-6
    assert router.gate.weight.grad.full_tensor().abs().max() > 0


def test_deepseeks_selection_bias_selects_does_not_learn_and_keeps_its_dtype(tmp_path):
    model = write_family(tmp_path, "deepseek_v3")
    made = policy(tmp_path)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    _, with_bias = recorded_routes(made, ROW, POSITIONS.clone())
    weights = stored(tmp_path)
    assert weights[name].abs().max() > 0.1
    half = {n: t if n == name else t.bfloat16() for n, t in weights.items()}
    save_file(half | {name: torch.zeros_like(weights[name])}, tmp_path / "model.safetensors")
    other = policy(tmp_path)
    _, without = recorded_routes(other, ROW, POSITIONS.clone())
    assert (with_bias[:, 0].sort(-1).values != without[:, 0].sort(-1).values).any()
    assert dict(other.weights.stream(torch.bfloat16))[name].dtype == torch.float32
    assert same(dict(other.weights.stream(None)), stored(tmp_path))
    assert not any("expert_bias" in n for n in made.parameters())
    assert model.model.layers[1].mlp.gate.e_score_correction_bias.abs().max() > 0.1


@pytest.mark.parametrize("kind", FAMILIES)
def test_any_family_can_carry_a_value_head(tmp_path, kind):
    write_family(tmp_path, kind)
    critic = titan.Critic(tmp_path, titan.Layout(max_length=512), joined())
    rows = torch.arange(len(ROW))
    critic.replay.open(POSITIONS, torch.full((len(ROW), critic.replay.layers, critic.replay.top_k), -1))
    assert torch.equal(critic.forward(ROW, POSITIONS, rows), torch.zeros(len(ROW)))
    assert critic.arch.hf["vocab_size"] == 67 and critic.model.lm_head.weight.shape == (1, 24)
    weights = dict(critic.weights.stream(None))
    assert "lm_head.weight" not in weights and weights["score.weight"].shape == (1, 24)
    save_file(weights | {"score.weight": torch.ones(1, 24)}, tmp_path / "model.safetensors")
    again = titan.Critic(tmp_path, titan.Layout(max_length=512), joined())
    assert torch.equal(dict(again.weights.stream(None))["score.weight"], torch.ones(1, 24))


def test_a_large_model_is_written_as_files_with_an_index(tmp_path):
    model = write_family(tmp_path / "m", "qwen3_moe")
    made = policy(tmp_path / "m")
    target = tmp_path / "new"
    target.mkdir()
    shutil.copy(tmp_path / "m" / "config.json", target)
    made.export_folder(target, shard_bytes=9000)
    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 3 and not list(target.glob("*.part"))
    assert all(len(load_file(f)) == 1 or sum(t.nbytes for t in load_file(f).values()) <= 9000 for f in files)
    index = json.loads((target / hf_folder.INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored(tmp_path / "m").values())
    assert same(stored(target), stored(tmp_path / "m"))
    with torch.no_grad():
        assert difference(policy(target), model) <= 1e-5
    made.export_folder(target)
    assert [p.name for p in target.glob("*.safetensors")] == ["model.safetensors"]
    assert not (target / hf_folder.INDEX).exists()


def test_an_export_that_fails_leaves_no_index(tmp_path):
    sizes = {"a": 8, "b": 8}

    def broken():
        yield "a", torch.zeros(2)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        hf_folder.save_sharded(tmp_path, sizes, broken(), 8)
    assert [p.name for p in tmp_path.iterdir()] == ["model-00001-of-00002.safetensors"]


def shuffled(folder):
    """The folder's tensors in two files in any order."""
    want = load_file(folder / "model.safetensors")
    names = list(want)
    np.random.default_rng(0).shuffle(names)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    (folder / "model.safetensors").unlink()
    for name, part in halves.items():
        save_file({n: want[n] for n in part}, folder / name)
    index = {"metadata": {}, "weight_map": {n: f for f, part in halves.items() for n in part}}
    (folder / hf_folder.INDEX).write_text(json.dumps(index))
    return want


@pytest.mark.parametrize("fused", [False, True])
def test_twelve_experts_keep_their_order_when_their_files_are_shuffled(tmp_path, fused):
    model = write_family(tmp_path, "deepseek_v3", fused=fused)
    want = shuffled(tmp_path)
    made = policy(tmp_path)
    assert same(dict(made.weights.stream(None)), want)
    with torch.no_grad():
        assert difference(made, model) <= 1e-5


EXPERT_FIELDS = {
    "qwen3_moe": ("num_experts", "moe_intermediate_size", {"mlp_only_layers": []}, {}),
    "qwen3_5_moe_text": ("num_experts", "moe_intermediate_size", {}, {"mtp.fc.weight": (8, 16)}),
    "deepseek_v3": (
        "n_routed_experts",
        "moe_intermediate_size",
        {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "num_mtp_layers": 1},
        {"model.layers.3.mlp.experts.0.up_proj.weight": (5, 8)},
    ),
    "gpt_oss": ("num_local_experts", "intermediate_size", {}, {}),
}
"""Names of a family's number of experts and of their width; further fields; a prediction layer where it has one."""


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("count", [3, 11])
@pytest.mark.parametrize("kind", EXPERT_FIELDS)
def test_c03_experts_of_sizes_that_differ_keep_layout_and_order(tmp_path, caplog, kind, count, fused):
    """3 or 11 experts, width 8, expert width 5, in shuffled files, before an extra layer; exact and within 1e-5."""
    experts, width, more, extra = EXPERT_FIELDS[kind]
    model = write_family(tmp_path, kind, fused=fused, **{experts: count, width: 5, "hidden_size": 8} | more)
    path = tmp_path / "model.safetensors"
    names = FileNames(fused=None if kind == "gpt_oss" else fused, flat=False, values=False)
    split = {name: t.contiguous() for name, t in names.to_file(load_file(path)).items()}
    save_file(split | {name: torch.randn(shape) for name, shape in extra.items()}, path)
    assert any("gate_up_proj" in name for name in split) is (fused or kind == "gpt_oss")
    want = shuffled(tmp_path)
    with caplog.at_level(logging.INFO):
        made = policy(tmp_path)
    assert all(name in caplog.text for name in extra)
    assert same(dict(made.weights.stream(None)), want)
    with torch.no_grad():
        assert difference(made, model) <= 1e-5


@pytest.mark.parametrize("kind", FAMILIES)
def test_l06_a_document_in_a_row_does_not_see_its_neighbours(tmp_path, kind):
    """Each token of the first document changed: the second's log-probabilities are the same, and those of it alone."""
    write_family(tmp_path, kind)
    made, second, positions = policy(tmp_path), ids(40, 1), torch.cat([torch.arange(30), torch.arange(40)])
    first = ids(30, 0)
    others = (first + 1 + ids(30, 2) % 66) % 67
    assert (first != others).all()
    with torch.no_grad():
        alone = logprobs(made, second, torch.arange(40))
        for neighbour in (first, others):
            packed = logprobs(made, torch.cat([neighbour, second]), positions.clone())[30:]
            assert (packed - alone).abs().max() <= 1e-6


@pytest.mark.parametrize("kind", FAMILIES)
def test_l06_every_attention_is_of_the_kind_that_is_told_where_documents_end(tmp_path, monkeypatch, kind):
    """On an accelerator, torchtitan's varlen one; no setting chooses another. Nor does anything balance load."""
    write_family(tmp_path, kind)
    monkeypatch.setattr(titan_cpu, "on_cpu", lambda: False)
    monkeypatch.setattr(titan_cpu, "lacks_delta_kernels", lambda config: False)
    layers = titan_models.architecture(tmp_path, 64).config.layers
    full = [layer.attention.inner_attention for layer in layers if layer.attention is not None]
    assert full and {type(inner) for inner in full} == {titan_cpu.VarlenAttention.Config}
    assert all(layer.moe is None or layer.moe.load_balance_coeff is None for layer in layers)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_critic_s_attention_stays_as_it_was_and_all_else_learns(tmp_path, kind):
    write_family(tmp_path, kind)
    critic = titan.Critic(tmp_path, titan.Layout(max_length=512), joined(), titan.ATTENTION)
    frozen = {name for name, p in critic.parameters().items() if not p.requires_grad}
    want = {n for n in critic.parameters() if any(w in n for w in (".attention.", ".attn.", ".attention_norm."))}
    assert frozen == want and len({name.split(".")[1] for name in frozen}) == 3
    assert {"tok_embeddings.weight", "norm.weight", "lm_head.weight"} <= critic.parameters().keys() - frozen


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, r"model\.safetensors cannot be read as safetensors"),
        (lambda path: path.write_bytes(b""), r"model\.safetensors cannot be read as safetensors"),
        (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"), "cannot be read as safetensors"),
        (lambda path: path.unlink(), r"has no \*\.safetensors weights"),
        (lambda path: (path.parent / hf_folder.INDEX).write_text("{}"), "is not an index of weights"),
        (
            lambda path: (path.parent / hf_folder.INDEX).write_text('{"weight_map": {"a": "gone.safetensors"}}'),
            r"gone\.safetensors cannot be read",
        ),
        (lambda path: save_file({"w": torch.zeros(3, dtype=torch.uint8)}, path), "holds tensors of type U8"),
    ],
)
def test_a_damaged_weight_file_is_named(tmp_path, damage, message):
    write_family(tmp_path, "qwen3")
    damage(tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=message) as error:
        policy(tmp_path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w | {"model.layers.3.mlp.gate.weight": torch.zeros(8, 128)}, "no place.*model.layers.3.mlp.gate"),
        (lambda w: {k: v for k, v in w.items() if "layers.1.mlp.experts.7.up" not in k}, "missing.*experts.7.up_proj"),
        (lambda w: w | {"model.norm.weight": torch.ones(4)}, "another shape.*model.norm.weight"),
        (lambda w: w | {"lm_head.weight": torch.zeros(512, 128)}, "lm_head.weight differs"),
    ],
)
def test_a_tensor_without_its_place_is_named(tmp_path, change, message):
    folder = write_model(tmp_path / "m")
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)
    with pytest.raises(UsageError, match=message):
        policy(folder)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("qwen3_moe", {"hidden_act": "gelu"}, r"hidden_act='gelu' \(want 'silu'\)"),
        ("qwen3_moe", {"use_sliding_window": True}, r"use_sliding_window=True \(want False\)"),
        ("qwen3", {"rope_parameters": YARN}, r"rope type 'yarn' \(want default\)"),
        ("qwen3", {"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope type 'linear'"),
        ("llama", {"mlp_bias": True}, r"mlp_bias=True \(want False\)"),
        ("llama", {"hidden_size": None, "rope_parameters": {"rope_type": "dynamic"}}, "rope type 'dynamic'"),
        ("deepseek_v3", {"rope_interleave": False}, r"rope_interleave=False \(want True\)"),
        ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 1.0}}, r"mscale=1\.0 \(want mscale_all_dim, None\)"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config.*'fp8'.*want None"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config.*'mxfp4'.*want None"),
        ("gpt_oss", {"attention_bias": False}, r"attention_bias=False \(want True\)"),
        ("gpt_oss", {"rope_parameters": YARN | {"attention_factor": 1.5}}, r"attention_factor=1\.5 \(want none\)"),
        ("gpt_oss", {"model_type": "gpt2"}, r"model_type 'gpt2', wanted one of qwen3, qwen3_moe"),
    ],
)
def test_a_config_of_another_model_is_refused_by_field(tmp_path, kind, change, message):
    config = FAMILIES[kind] | {"model_type": kind} | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=message):
        titan_models.read_config(tmp_path)


def test_a_missing_field_is_named(tmp_path):
    config = {name: value for name, value in FAMILIES["llama"].items() if name != "hidden_size"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    with pytest.raises(UsageError, match=r"config\.json has no hidden_size, which a llama needs"):
        titan_models.architecture(tmp_path, 64)


def test_a_delta_net_without_its_kernels_is_refused_where_it_needs_them(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(
        json.dumps(FAMILIES["qwen3_5_text"] | {"model_type": "qwen3_5_text", "linear_conv_kernel_dim": 4})
    )
    titan_models.architecture(tmp_path, 64)
    monkeypatch.setattr(titan_cpu, "on_cpu", lambda: False)
    with pytest.raises(UsageError, match="a qwen3_5_text needs flash-linear-attention, which is not installed"):
        titan_models.architecture(tmp_path, 64)


@pytest.mark.parametrize("place", ["rope_theta", "rope_scaling", "rope_parameters"])
def test_rope_theta_is_found_where_a_config_keeps_it(tmp_path, place):
    theta = 123.0 if place == "rope_theta" else {"rope_type": "default", "rope_theta": 123.0}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", place: theta}))
    assert titan_models.read_config(tmp_path)["rope"]["rope_theta"] == 123.0


def published(model_type, *sizes, **more):
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    common = dict(zip(names, sizes, strict=True)) | {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    return {"model_type": model_type} | common | more


YARN_40 = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096}
PUBLISHED = {
    "Qwen3-0.6B": (
        596_049_920,
        published("qwen3", 151936, 1024, 28, 16, 8, head_dim=128, intermediate_size=3072, tie_word_embeddings=True),
    ),
    "Qwen3-30B-A3B": (
        30_532_122_624,
        published("qwen3_moe", 151936, 2048, 48, 32, 4, head_dim=128, intermediate_size=6144, norm_topk_prob=True)
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ),
    "Qwen3.5-35B-A3B": (
        34_660_610_688,
        {"model_type": "qwen3_5_moe", "tie_word_embeddings": False, "vision_config": {"depth": 1}}
        | {
            "text_config": published("qwen3_5_moe_text", 248320, 2048, 40, 16, 2, head_dim=256)
            | {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
            | {"shared_expert_intermediate_size": 512, "full_attention_interval": 4, "linear_conv_kernel_dim": 4}
            | {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
            | {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
        },
    ),
    "Llama-3.1-8B": (8_030_261_248, published("llama", 128256, 4096, 32, 32, 8, intermediate_size=14336)),
    "DeepSeek-V3": (
        671_026_419_200,
        published("deepseek_v3", 129280, 7168, 61, 128, 128, intermediate_size=18432, moe_intermediate_size=2048)
        | {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3}
        | {"n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
        | {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
        | {"v_head_dim": 128, "rope_scaling": YARN_40 | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "gpt-oss-120b": (
        116_829_156_672,
        published("gpt_oss", 201088, 2880, 36, 64, 8, head_dim=64, intermediate_size=2880, sliding_window=128)
        | {"num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_limit": 7.0}
        | {"rope_scaling": YARN_40 | {"factor": 32.0, "rope_theta": 150000.0, "truncate": False}},
    ),
}


def test_the_table_of_published_models_has_each_kind():
    assert {c["model_type"] for _, c in PUBLISHED.values()} == {
        kind for kind in titan_models.FAMILIES if not kind.endswith("_text") and kind != "qwen3_5"
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_number_of_parameters_and_its_tensors(tmp_path, name):
    count, config = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    arch = titan_models.architecture(tmp_path, 4096)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    vision = "vision_config" in config
    auto = transformers.AutoModelForImageTextToText if vision else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        ours, hf = arch.config.build(), auto.from_config(theirs)
    tensors = arch.adapter.to_hf(places(arch, ours))
    fused = not name.startswith(("gpt", "Qwen3.5"))
    got = {n: t.shape for n, t in FileNames(fused=fused or None, flat=False, values=False).to_file(tensors).items()}
    want = {n: t.shape for n, t in hf.state_dict().items() if not n.startswith("model.visual.")}
    if config.get("tie_word_embeddings"):
        del want["lm_head.weight"]
    assert got == want
    assert sum(shape.numel() for shape in got.values()) == count


def test_recipes_are_told_without_torch_which_models_there_are():
    assert set(MODEL_TYPES) == set(titan_models.FAMILIES)
