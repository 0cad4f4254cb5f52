import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lego.errors import TrainerError, UsageError
from lego.learn import packing, titan, titan_models
from lego.learn.algorithms import GSPO
from lego.learn.step import train_step
from lego.learn.titan_cpu import equal_runs
from lego.records import Sample, Segment
from tests.learn.policies import logprobs, policy, recorded_routes
from tests.learn.samples import routes, sample
from tests.tiny import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def tiny(folder):
    return policy(folder)


def ids(n, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 512, n))


def reference(folder, documents):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        scores = [torch.log_softmax(model(doc[None]).logits[0].float(), -1) for doc in documents]
    return [s[:-1].gather(-1, d[1:, None])[:, 0] for s, d in zip(scores, documents, strict=True)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": False},
        {"tie_word_embeddings": False, "hidden_size": 96, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
    ],
)
def test_packed_documents_have_the_logprobs_of_transformers_run_separately(tmp_path, changes):
    folder = write_model(tmp_path / "m", **changes)
    if changes.get("tie_word_embeddings") is False:
        path = folder / "model.safetensors"
        save_file(load_file(path) | {"lm_head.weight": torch.randn(512, 96) / 10}, path, metadata={"format": "pt"})
    documents = [ids(90, 1), ids(40, 2), ids(40, 3)]
    positions = torch.cat([torch.arange(len(d)) for d in documents])
    got = logprobs(policy(folder), torch.cat(documents), positions)
    for want, start in zip(reference(folder, documents), (0, 90, 130), strict=True):
        assert (got[start : start + len(want)] - want).abs().max() < 1e-4


def test_a_document_does_not_see_its_neighbour(tiny):
    b, positions = ids(40, 2), torch.cat([torch.arange(30), torch.arange(40)])
    first = logprobs(tiny, torch.cat([ids(30, 0), b]), positions)[30:]
    other = logprobs(tiny, torch.cat([ids(30, 9), b]), positions)[30:]
    alone = logprobs(tiny, b, torch.arange(40))
    assert (first - other).abs().max() < 1e-6
    assert (first - alone).abs().max() < 1e-5


def test_neighbours_of_one_length_share_an_attention_call():
    assert equal_runs([0, 4, 8, 11, 15]) == [(0, 2, 4), (8, 1, 3), (11, 1, 4)]


@pytest.mark.parametrize("head_stored", [False, True])
@pytest.mark.parametrize("experts", [8, 12])
def test_what_was_read_is_written_bit_for_bit(tmp_path, experts, head_stored):
    folder = write_model(tmp_path / "m", num_experts=experts, moe_intermediate_size=40)
    path = folder / "model.safetensors"
    if head_stored:
        weights = load_file(path)
        save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, path)
    policy(folder).export(tmp_path / "out.safetensors", torch.float32)
    want, got = load_file(path), load_file(tmp_path / "out.safetensors")
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)


def test_a_tied_head_learns_with_its_embedding(folder, tmp_path):
    made = policy(folder)
    model = made.model
    assert model.lm_head.weight is model.tok_embeddings.weight
    optimizer = titan.AdamW(made, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    logprobs(made, ids(20), torch.arange(20)).sum().backward()
    optimizer.step()
    shutil.copytree(folder, tmp_path / "trained")
    made.export(tmp_path / "trained" / "model.safetensors", torch.float32)
    want = reference(tmp_path / "trained", [ids(30, 5)])[0]
    assert (logprobs(made, ids(30, 5), torch.arange(30)) - want).abs().max() < 1e-4
    before = reference(folder, [ids(30, 5)])[0]
    assert (before - want).abs().max() > 1e-2


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


@pytest.mark.parametrize(
    "change", [{"hidden_act": "gelu"}, {"mlp_only_layers": [0]}, {"rope_scaling": {"rope_type": "yarn"}}]
)
def test_a_config_of_another_model_is_refused_by_field(tmp_path, change):
    folder = write_model(tmp_path / "m", **change)
    with pytest.raises(UsageError, match=next(iter(change)) if "rope_scaling" not in change else "rope type"):
        titan_models.read_config(folder)


def test_rope_theta_is_found_where_new_configs_keep_it(tmp_path):
    folder = write_model(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    del config["rope_theta"]
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 123.0}
    (folder / "config.json").write_text(json.dumps(config))
    assert titan_models.read_config(folder)["rope_theta"] == 123.0


def test_replaying_its_own_routes_changes_nothing(tiny):
    tokens, positions = ids(60), torch.arange(60)
    live, chosen = recorded_routes(tiny, tokens, positions)
    assert torch.equal(logprobs(tiny, tokens, positions, chosen), live)


def test_replayed_gate_weights_are_live_and_learn(tiny):
    tokens, positions = ids(60), torch.arange(60)
    made = logprobs(tiny, tokens, positions, routes(np.random.default_rng(0), 60).astype(int))
    made.sum().backward()
    gate = tiny.model.layers["0"].moe.router.gate.weight.grad
    assert gate.full_tensor().abs().max() > 0


def test_rows_of_other_tokens_change_the_logprobs(tiny):
    tokens, positions = ids(60), torch.arange(60)
    live, chosen = recorded_routes(tiny, tokens, positions)
    assert (logprobs(tiny, tokens, positions, chosen.flip(0)) - live).abs().max() > 1e-2


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_recomputed_layers_replay_the_rows_of_their_own_micro_batch(folder, checkpointing):
    """Gradients are those without recomputation, and each row counts once."""
    rng = np.random.default_rng(0)
    rows = [torch.from_numpy(routes(rng, 40).astype(int)) for _ in range(2)]
    results = []
    for made in (policy(folder), policy(folder, checkpointing=checkpointing)):
        positions = [torch.arange(40), torch.arange(40)]
        counts = []
        for i in range(2):
            logprobs(made, ids(40, i), positions[i], rows[i]).sum().backward()
            counts.append(made.replay.close(positions[i]))
        assert all(c.replayed == c.needed == 3 * 40 and c.live == 0 for c in counts)
        results.append({n: p.grad.full_tensor() for n, p in made.parameters().items()})
    for name, want in results[0].items():
        assert (results[1][name] - want).abs().max() <= 1e-5 * want.abs().max() + 1e-7, name


def on_policy_samples(made, lengths, advantages=(1.0, -1.0, 0.5)):
    """Samples as an exact engine would give them: sampled log-probabilities and routes of the policy itself."""
    out = []
    for seed, (n, advantage) in enumerate(zip(lengths, advantages, strict=True)):
        tokens = ids(n, seed)
        with torch.no_grad():
            lps, chosen = recorded_routes(made, tokens, torch.arange(n))
        mask = np.arange(n) >= n // 2
        routed = np.arange(n) < n - 1
        segment = Segment(
            ids_T=tokens.numpy().astype(np.int32),
            mask_T=mask,
            logprobs_T=np.where(mask, np.append(0.0, lps.numpy()), 0).astype(np.float32),
            versions_T=np.where(mask, 0, -1).astype(np.int32),
            routing_TLK=chosen.numpy().astype(np.uint8),
            routed_T=routed,
        )
        out.append(Sample(segment=segment, advantage=advantage, weight=1.0))
    return out


GATES = {"min_pearson": 0.999, "max_k3": 5e-4, "min_routing_coverage": 1.0}


def step(made, optimizer, samples, tmp_path, budget=256, gates=GATES):
    packing.write(packing.pack(samples, ranks=1, token_budget=budget), tmp_path / "b")
    return train_step(made, optimizer, packing.read(tmp_path / "b", 0), algorithm=GSPO(), grad_clip=1.0, gates=gates)


def adam(made):
    return titan.AdamW(made, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)


def weights(made):
    return {n: t.clone() for n, t in made.hf_weights(torch.float32).items()}


def test_a_step_on_policy_agrees_with_the_sampler_and_replays_every_row(tiny, tmp_path):
    samples = on_policy_samples(tiny, (60, 40, 40))
    before = weights(tiny)
    report = step(tiny, adam(tiny), samples, tmp_path)
    assert report["breach"] is None
    assert report["tokens"] == 70 and report["rows_replayed"] == report["rows_needed"] == 3 * (59 + 39 + 39)
    assert report["rows_live"] == 0
    assert report["max_logprob_difference"] < 1e-4 and report["pearson"] > 0.9999 and report["k3"] < 1e-8
    assert report["ratio_mean"] == pytest.approx(1, abs=1e-5) and report["ess"] == pytest.approx(1)
    assert report["grad_norm"] > 0 and report["entropy"] > 0
    assert any((weights(tiny)[n] != w).any() for n, w in before.items())


def test_the_step_is_the_same_however_it_is_packed(folder, tmp_path):
    results = []
    for budget in (60, 256):
        made = policy(folder)
        report = step(made, adam(made), on_policy_samples(made, (60, 40, 40)), tmp_path, budget)
        results.append((report["loss"], report["grad_norm"], weights(made)))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-6)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-5)


def test_permuted_rows_breach_the_gate_and_nothing_is_stepped(tiny, tmp_path):
    samples = on_policy_samples(tiny, (60, 40, 40))
    flipped = []
    for s in samples:
        fields = vars(s.segment) | {"routing_TLK": s.segment.routing_TLK[::-1]}
        flipped.append(Sample(segment=Segment(**fields), advantage=s.advantage, weight=s.weight))
    before, optimizer = weights(tiny), adam(tiny)
    report = step(tiny, optimizer, flipped, tmp_path)
    assert "Pearson" in report["breach"] or "k3" in report["breach"]
    assert all(torch.equal(weights(tiny)[n], w) for n, w in before.items())
    assert all(p.grad is None for p in tiny.parameters().values())
    assert step(tiny, optimizer, samples, tmp_path)["breach"] is None


def test_unrecorded_rows_are_routed_live_counted_and_held_against_the_gate(tiny, tmp_path):
    samples = on_policy_samples(tiny, (60, 40, 40))
    routed = samples[1].segment.routed_T.copy()
    routed[3:8] = False
    segment = Segment(**(vars(samples[1].segment) | {"routed_T": routed}))
    samples[1] = Sample(segment=segment, advantage=-1.0, weight=1.0)
    report = step(tiny, adam(tiny), samples, tmp_path)
    assert report["rows_live"] == 3 * 5
    assert "routing coverage" in report["breach"]
    assert step(tiny, adam(tiny), samples, tmp_path, gates={})["breach"] is None


def test_a_batch_without_any_routing_trains_on_the_live_router(tiny, tmp_path):
    samples = [
        Sample(segment=Segment(**(vars(s.segment) | {"routing_TLK": None})), advantage=s.advantage, weight=1.0)
        for s in on_policy_samples(tiny, (60, 40, 40))
    ]
    report = step(tiny, adam(tiny), samples, tmp_path, gates={})
    assert report["rows_replayed"] == 0 and report["rows_live"] == report["rows_needed"] > 0


def test_a_gradient_that_is_not_finite_stops_the_step(tiny, tmp_path):
    samples = on_policy_samples(tiny, (60, 40, 40), (1.0, float("inf"), 0.5))
    before = weights(tiny)
    with pytest.raises(TrainerError, match="no rank stepped"):
        step(tiny, adam(tiny), samples, tmp_path)
    assert all(torch.equal(weights(tiny)[n], w) for n, w in before.items())


def test_an_empty_micro_batch_has_no_loss_no_rows_and_zero_gradients(tiny, tmp_path):
    batch = packing.pack([sample(np.random.default_rng(0), 20)], ranks=2, token_budget=64)
    packing.write(batch, tmp_path / "b")
    whole = packing.read(tmp_path / "b", 0)
    both = packing.RankBatch(
        parts=(*whole.parts, *packing.read(tmp_path / "b", 1).parts), trained=batch.trained, weight=1.0
    )
    reports = []
    for part in (whole, both):
        made_reports = train_step(tiny, adam(tiny), part, algorithm=GSPO(), grad_clip=1.0, gates={"min_pearson": 2.0})
        reports.append({k: v for k, v in made_reports.items() if k not in ("seconds", "peak_rss_gib")})
    assert reports[0] == reports[1]


def test_a_checkpoint_brings_back_weights_and_moments(folder, tmp_path):
    made = policy(folder)
    samples, optimizer = on_policy_samples(made, (60, 40, 40)), adam(made)
    step(made, optimizer, samples, tmp_path)
    optimizer.save(tmp_path / "ck")
    want = step(made, optimizer, samples, tmp_path, gates={})
    other = policy(folder)
    resumed = adam(other)
    resumed.load(tmp_path / "ck")
    got = step(other, resumed, samples, tmp_path, gates={})
    assert (got["loss"], got["grad_norm"]) == (want["loss"], want["grad_norm"])
    assert all(torch.equal(a, weights(other)[n]) for n, a in weights(made).items())


def test_weights_can_be_exported_as_bfloat16(tiny, tmp_path):
    tiny.export(tmp_path / "w", torch.bfloat16)
    assert {t.dtype for t in load_file(tmp_path / "w").values()} == {torch.bfloat16}
    assert not list(tmp_path.glob("*.part"))


def test_experts_keep_their_order_when_their_files_are_shuffled(tmp_path):
    folder = write_model(tmp_path / "m", num_experts=12)
    want = load_file(folder / "model.safetensors")
    names = list(want)
    np.random.default_rng(0).shuffle(names)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    (folder / "model.safetensors").unlink()
    for name, part in halves.items():
        save_file({n: want[n] for n in part}, folder / name)
    index = {"metadata": {}, "weight_map": {n: f for f, part in halves.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    got = policy(folder).hf_weights(torch.float32)
    assert all(torch.equal(want[n], got[n]) for n in want)
