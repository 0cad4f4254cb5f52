"""One optimizer step of one rank: what it answers, what it refuses, and that it is the same however it is packed."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lego.errors import TrainerError
from lego.learn import packing
from lego.learn.algorithms import GSPO, PPO, SAO, Critic
from lego.learn.optimizer import AdamW
from lego.learn.step import Actors, Plan, train_step
from lego.records import Sample, Segment
from tests.learn.policies import critic, policy, recorded_routes
from tests.learn.samples import sample
from tests.tiny import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def tiny(folder):
    return policy(folder)


def ids(n, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 512, n))


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


def read(samples, tmp_path, budget=256):
    packing.write(packing.pack(samples, ranks=1, token_budget=budget), tmp_path / "b")
    return packing.read(tmp_path / "b", 0)


def step(made, optimizer, samples, tmp_path, budget=256, gates=GATES):
    plan = Plan(algorithm=GSPO(), grad_clip=1.0, gates=gates)
    return train_step(Actors(policy=made, optimizer=optimizer), read(samples, tmp_path, budget), plan)


def adam(made):
    return AdamW(made, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)


def weights(made):
    return {n: t.clone() for n, t in made.weights.stream(torch.float32)}


def test_a_step_on_policy_agrees_with_the_sampler_and_replays_every_row(tiny, tmp_path):
    samples = on_policy_samples(tiny, (60, 40, 40))
    before = weights(tiny)
    report = step(tiny, adam(tiny), samples, tmp_path)
    assert report.breach is None
    assert report.tokens == 70 and report.rows_replayed == report.rows_needed == 3 * (59 + 39 + 39)
    assert report.rows_live == 0
    assert report.max_logprob_difference < 1e-4 and report.pearson > 0.9999 and report.k3 < 1e-8
    assert report.ratio_mean == pytest.approx(1, abs=1e-5) and report.ess == pytest.approx(1)
    assert report.grad_norm > 0 and report.entropy > 0
    assert any((weights(tiny)[n] != w).any() for n, w in before.items())


def test_a01_the_step_is_the_same_however_it_is_packed(folder, tmp_path):
    """In micro-batches of 2 and 1, of 1, 1 and 1, and of 3; AdamW's first moment is a tenth of the clipped gradient."""
    results = []
    for budget, parts in ((100, 2), (60, 3), (256, 1)):
        made = policy(folder)
        samples, optimizer = on_policy_samples(made, (60, 40, 40)), adam(made)
        report = step(made, optimizer, samples, tmp_path, budget)
        assert len(report.part_seconds) == parts
        moments = {n: t.full_tensor() for n, t in optimizer.state().items() if n.startswith("exp_avg.")}
        results.append((report.loss, report.grad_norm, moments))
    for loss, norm, moments in results[1:]:
        assert loss == pytest.approx(results[0][0], abs=1e-6)
        assert norm == pytest.approx(results[0][1], rel=1e-5)
        for name, want in results[0][2].items():
            assert (moments[name] - want).abs().max() <= 1e-5 * want.abs().max() + 1e-9, name


def test_a_loss_that_is_no_number_breaches_without_any_gate_and_names_the_token(tiny, tmp_path):
    """Its gradient may well be finite: bounds on the ratio have none where they act."""
    samples = on_policy_samples(tiny, (60, 40, 40))
    beyond = samples[1].segment.ids_T.copy()
    beyond[-1] = 600  # no word of the model; sampled last, so that it is never fed
    odd = replace(samples[1], segment=replace(samples[1].segment, ids_T=beyond))
    before = weights(tiny)
    report = step(tiny, adam(tiny), [samples[0], odd, samples[2]], tmp_path, gates={})
    assert report.breach == "the loss is nan" and report.worst is not None
    assert (report.worst.sample, report.worst.token) == (1, 39)
    assert all((weights(tiny)[n] == w).all() for n, w in before.items())


def test_permuted_rows_breach_the_gate_and_nothing_is_stepped(tiny, tmp_path):
    samples = on_policy_samples(tiny, (60, 40, 40))
    flipped = []
    for s in samples:
        fields = vars(s.segment) | {"routing_TLK": s.segment.routing_TLK[::-1]}
        flipped.append(Sample(segment=Segment(**fields), advantage=s.advantage, weight=s.weight))
    before, optimizer = weights(tiny), adam(tiny)
    report = step(tiny, optimizer, flipped, tmp_path)
    assert "Pearson" in report.breach or "k3" in report.breach
    assert all(torch.equal(weights(tiny)[n], w) for n, w in before.items())
    assert all(p.grad is None for p in tiny.parameters().values())
    assert step(tiny, optimizer, samples, tmp_path).breach is None


def test_unrecorded_rows_are_routed_live_counted_and_held_against_the_gate(tiny, tmp_path):
    samples = on_policy_samples(tiny, (60, 40, 40))
    routed = samples[1].segment.routed_T.copy()
    routed[3:8] = False
    segment = Segment(**(vars(samples[1].segment) | {"routed_T": routed}))
    samples[1] = Sample(segment=segment, advantage=-1.0, weight=1.0)
    report = step(tiny, adam(tiny), samples, tmp_path)
    assert report.rows_live == 3 * 5
    assert "routing coverage" in report.breach
    assert step(tiny, adam(tiny), samples, tmp_path, gates={}).breach is None


def test_a_batch_without_any_routing_trains_on_the_live_router(tiny, tmp_path):
    samples = [
        Sample(segment=Segment(**(vars(s.segment) | {"routing_TLK": None})), advantage=s.advantage, weight=1.0)
        for s in on_policy_samples(tiny, (60, 40, 40))
    ]
    report = step(tiny, adam(tiny), samples, tmp_path, gates={})
    assert report.rows_replayed == 0 and report.rows_live == report.rows_needed > 0


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
        plan = Plan(algorithm=GSPO(), grad_clip=1.0, gates={"min_pearson": 2.0})
        answer = train_step(Actors(policy=tiny, optimizer=adam(tiny)), part, plan)
        reports.append({k: v for k, v in vars(answer).items() if k not in ("seconds", "part_seconds", "peak_rss_gib")})
    assert reports[0] == reports[1]


def test_the_worst_token_is_named_by_sample_and_place(tiny, tmp_path):
    samples = on_policy_samples(tiny, (60, 40, 40))
    logprobs = samples[1].segment.logprobs_T.copy()
    logprobs[25] -= 3
    samples[1] = replace(samples[1], segment=replace(samples[1].segment, logprobs_T=logprobs))
    report = step(tiny, adam(tiny), samples, tmp_path)
    assert "k3" in report.breach or "Pearson" in report.breach
    worst = report.worst
    assert (worst.sample, worst.token) == (1, 25)
    assert worst.trainer - worst.sampled == pytest.approx(3, abs=1e-3)
    assert report.max_logprob_difference == pytest.approx(3, abs=1e-3)


def test_the_histogram_of_log_ratios_counts_every_token_once(tiny, tmp_path):
    samples = on_policy_samples(tiny, (60, 40, 40))
    counts = step(tiny, adam(tiny), samples, tmp_path).log_ratio_counts
    assert sum(counts) == 70 and counts[len(counts) // 2] == 70


def test_replayed_choices_are_compared_with_the_live_routers(tiny, tmp_path):
    samples = on_policy_samples(tiny, (60, 40, 40))
    assert step(tiny, adam(tiny), samples, tmp_path).routing_agreement == 1.0
    others = [replace(s, segment=replace(s.segment, routing_TLK=s.segment.routing_TLK[::-1])) for s in samples]
    assert 0 < step(tiny, adam(tiny), others, tmp_path, gates={}).routing_agreement < 0.9


def actors(folder, algorithm, lr=1e-3):
    made, values = policy(folder), critic(folder)
    own = AdamW(values, lr=algorithm.critic.lr, betas=(0.9, 0.95), weight_decay=0.0)
    return Actors(policy=made, optimizer=adam(made), critic=values, critic_optimizer=own)


def with_rewards(samples):
    return [replace(s, reward=float(i % 2)) for i, s in enumerate(samples)]


def test_a_critic_learns_the_returns_and_explains_them(folder, tmp_path):
    algorithm = PPO(critic=Critic(lr=3e-3, updates_per_step=4, clip=None))
    all_of_it = actors(folder, algorithm)
    part = read(with_rewards(on_policy_samples(all_of_it.policy, (60, 40, 40))), tmp_path)
    answers = [train_step(all_of_it, part, Plan(algorithm=algorithm, grad_clip=1.0, warming=True)) for _ in range(8)]
    assert answers[0].value_explained == pytest.approx(0, abs=1e-6)  # its head begins at zero
    assert answers[-1].value_explained > 0.8
    assert answers[-1].value_loss < 0.2 * answers[0].value_loss
    assert all(a.grad_norm == 0 and a.critic_grad_norm > 0 for a in answers)
    assert all_of_it.optimizer.position == 0 and all_of_it.critic_optimizer.position == 32


def test_a_warm_up_teaches_the_critic_alone_and_ends(folder, tmp_path):
    algorithm = SAO(critic=replace(SAO().critic, warmup_steps=2))
    all_of_it = actors(folder, algorithm)
    before = weights(all_of_it.policy)
    part = read(with_rewards(on_policy_samples(all_of_it.policy, (60, 40, 40))), tmp_path)
    warming = []
    for _ in range(3):
        warming.append(all_of_it.warming(algorithm))
        same = all(torch.equal(w, before[n]) for n, w in weights(all_of_it.policy).items())
        assert same
        train_step(all_of_it, part, Plan(algorithm=algorithm, grad_clip=1.0, warming=warming[-1]))
    assert warming == [True, True, False]
    assert any((weights(all_of_it.policy)[n] != w).any() for n, w in before.items())


def test_a_breached_gate_moves_neither_policy_nor_critic(folder, tmp_path):
    algorithm = PPO()
    all_of_it = actors(folder, algorithm)
    part = read(with_rewards(on_policy_samples(all_of_it.policy, (60, 40, 40))), tmp_path)
    train_step(all_of_it, part, Plan(algorithm=algorithm, grad_clip=1.0, gates={"min_pearson": 2.0}))
    assert all_of_it.optimizer.position == 0 and all_of_it.critic_optimizer.position == 0
    assert all(p.grad is None for n in (all_of_it.policy, all_of_it.critic) for p in n.parameters().values())


def test_the_reference_holds_the_policy_back(folder, tmp_path):
    """The KL to where it began is measured, and a heavy one undoes what the rewards ask for."""
    distances = []
    for coefficient in (0.0, 100.0):
        made, algorithm = policy(folder), GSPO(kl_coef=coefficient, scale="none")
        part = read(on_policy_samples(made, (60, 40, 40)), tmp_path)
        all_of_it = Actors(policy=made, optimizer=adam(made), reference=policy(folder))
        answers = [train_step(all_of_it, part, Plan(algorithm=algorithm, grad_clip=1.0)) for _ in range(6)]
        assert answers[0].kl == pytest.approx(0, abs=1e-6)
        distances.append(answers[-1].kl)
    assert 0 < distances[1] < 0.5 * distances[0]


def test_tokens_whose_context_was_cut_are_trained_and_not_held_against_the_gates(tiny, tmp_path):
    samples = on_policy_samples(tiny, (120, 40, 40))
    batch = packing.pack(samples, ranks=1, token_budget=70, over_budget="split")
    part = packing.RankBatch(parts=batch.ranks[0], trained=batch.trained, weight=batch.weight)
    found = train_step(
        Actors(policy=tiny, optimizer=adam(tiny)), part, Plan(algorithm=GSPO(), grad_clip=1.0, gates=GATES)
    )
    assert batch.split_tokens > 0 and found.tokens == batch.trained and sum(found.log_ratio_counts) == batch.trained
    assert found.breach is None and found.max_logprob_difference < 1e-4 and found.pearson > 0.9999
