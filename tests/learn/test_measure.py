"""The numbers that a step reports, against plain numpy on each sample alone; and what a step refuses to lose."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lego.errors import TrainerError
from lego.learn import packing
from lego.learn.algorithms import GRPO, GSPO, Correction
from lego.learn.optimizer import AdamW
from lego.learn.report import LOG_RATIO_EDGES
from lego.learn.step import Actors, Plan, train_step
from tests.learn.policies import policy
from tests.learn.test_step import on_policy_samples

TEMPERATURE = 0.7


@pytest.fixture
def tiny(tiny_model):
    return policy(tiny_model)


def adam(made):
    return AdamW(made, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)


def read(samples, tmp_path):
    packed = packing.pack(samples, ranks=1, token_budget=100, temperature=TEMPERATURE)
    packing.write(packed, tmp_path / "b")
    return packing.read(tmp_path / "b", 0)


def own_numbers(made, samples):
    """Of each sample's trained tokens: (trainer log-probabilities, entropies); and the live router's choices [T, L, K].

    Of all words at once, and each sample alone.
    """
    found, replay, choose = [], made.replay, made.replay.choose
    for segment in (s.segment for s in samples):
        tokens, live = torch.from_numpy(segment.ids_T.astype(np.int64)), {}
        at = torch.from_numpy(np.flatnonzero(segment.mask_T))

        def watch(layer, scores, live=live):
            live[layer] = scores.topk(replay.top_k).indices
            return choose(layer, scores)

        replay.choose, positions = watch, torch.arange(len(tokens))
        rows = np.where(segment.routed_T[:, None, None], segment.routing_TLK.astype(int), packing.UNRECORDED)
        replay.open(positions, torch.from_numpy(rows))
        words, every = torch.arange(512).repeat(len(at)), (at - 1).repeat_interleave(512)
        temperature = torch.full((len(words),), TEMPERATURE)
        with torch.no_grad():
            all_of_them, _ = made.forward(tokens, positions, every, labels_R=words, temperature_R=temperature)
        replay.close(positions)
        scores = all_of_them.view(len(at), 512).double().numpy()
        entropy = -(np.exp(scores) * scores).sum(1)
        chosen = torch.stack([live[i] for i in range(replay.layers)], 1).numpy()
        found.append((scores[np.arange(len(at)), tokens[at].numpy()], entropy, chosen))
    del replay.choose
    return found


def disagreeing(made):
    """Samples whose sampled log-probabilities are the trainer's and noise, some of whose rows are others or missing."""
    rng, out = np.random.default_rng(0), []
    for index, source in enumerate(on_policy_samples(made, (60, 40, 40), (1.0, -0.5, 0.7))):
        segment = source.segment
        routed, rows = segment.routed_T.copy(), segment.routing_TLK.copy()
        routed[3 : 3 + 2 * index] = False
        rows[10:20] = rows[10:20][::-1]
        segment = replace(segment, routed_T=routed, routing_TLK=rows)
        out.append(replace(source, segment=segment))
    for index, (trainer, _, _) in enumerate(own_numbers(made, out)):
        noisy = np.zeros(len(out[index].segment.ids_T), np.float32)
        noisy[out[index].segment.mask_T] = trainer + rng.normal(0.2 * (index - 1), 0.4, len(trainer))
        out[index] = replace(out[index], segment=replace(out[index].segment, logprobs_T=noisy))
    return out


def expected_weights(algorithm, ratios, advantages):
    """(importance weights, tokens that a bound acted on) of each sample's tokens."""
    made = []
    for ratio, advantage in zip(ratios, advantages, strict=True):
        if algorithm.correction.level == "token":
            outside = (ratio < 0.5) | (ratio > 2)
            made.append((np.where(outside, 0, ratio), outside))
            continue
        if isinstance(algorithm, GSPO):
            ratio = np.full_like(ratio, np.exp(np.log(ratio).mean()))
        low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
        made.append((ratio, ratio > high if advantage > 0 else ratio < low))
    return [np.concatenate(part) for part in zip(*made, strict=True)]


@pytest.mark.parametrize(
    "algorithm",
    [GRPO(), GSPO(), GRPO(correction=Correction(level="token", mode="mask", low=0.5, high=2.0))],
    ids=["token", "segment", "correction"],
)
def test_the_reported_numbers_are_those_of_plain_numpy(tiny, tmp_path, algorithm):
    samples, optimizer = disagreeing(tiny), adam(tiny)
    own = own_numbers(tiny, samples)
    plan = Plan(algorithm=algorithm, grad_clip=1e9)
    report = train_step(Actors(policy=tiny, optimizer=optimizer), read(samples, tmp_path), plan)
    trainers, sampled = [o[0] for o in own], [s.segment.logprobs_T[s.segment.mask_T].astype(float) for s in samples]
    trainer, rollout = np.concatenate(trainers), np.concatenate(sampled)
    d = trainer - rollout
    ratios = [np.exp(t - s) for t, s in zip(trainers, sampled, strict=True)]
    weight, clipped = expected_weights(algorithm, ratios, [s.advantage for s in samples])
    fed = [packing.fed_length(s.segment) for s in samples]
    routed = np.concatenate([s.segment.routed_T[:n] for s, n in zip(samples, fed, strict=True)])
    rows = np.concatenate([s.segment.routing_TLK[:n] for s, n in zip(samples, fed, strict=True)])
    live = np.concatenate([o[2][:n] for o, n in zip(own, fed, strict=True)])
    agreed = (rows[..., :, None] == live[..., None, :]).any(-1)[routed]
    gradients = {n: t.full_tensor().double() / 0.1 for n, t in optimizer.state().items() if n.startswith("exp_avg.")}
    squares = {n: float(g.square().sum()) for n, g in gradients.items()}
    want = {
        "tokens": len(d),
        "pearson": np.corrcoef(np.exp(trainer), np.exp(rollout))[0, 1],
        "max_logprob_difference": np.abs(d).max(),
        "mean_logprob_difference": np.abs(d).mean(),
        "max_probability_difference": np.abs(np.exp(trainer) - np.exp(rollout)).max(),
        "k1": -d.mean(),
        "k3": (np.exp(d) - 1 - d).mean(),
        "ess": weight.sum() ** 2 / (len(d) * (weight**2).sum()),
        "clip_fraction": clipped.mean(),
        "entropy": np.concatenate([o[1] for o in own]).mean(),
        "rows_needed": 3 * sum(fed),
        "rows_live": 3 * 6,
        "rows_replayed": 3 * (sum(fed) - 6),
        "routing_agreement": agreed.mean(),
        "grad_norm": sum(squares.values()) ** 0.5,
        "grad_norm_experts": sum(v for n, v in squares.items() if "routed_experts" in n) ** 0.5,
    }
    assert {name: getattr(report, name) for name in want} == pytest.approx(want, rel=1e-4)
    bounds = [-np.inf, *LOG_RATIO_EDGES, np.inf]
    assert report.log_ratio_counts == tuple(np.histogram(d, bounds)[0])
    assert 0 < want["clip_fraction"] < 1 and want["ess"] < 0.999 and 0.5 < want["routing_agreement"] < 1
    assert 0 < want["grad_norm_experts"] < want["grad_norm"]


def test_a_layer_that_routes_by_itself_fails_the_step(tiny, tmp_path):
    part, choose = read(on_policy_samples(tiny, (60, 40, 40)), tmp_path), tiny.replay.choose
    tiny.replay.choose = lambda layer, scores: choose(layer, scores) if layer else scores.topk(2).indices
    optimizer = adam(tiny)
    with pytest.raises(TrainerError, match="274 routing rows consumed, but MoE layers x tokens = 411"):
        train_step(Actors(policy=tiny, optimizer=optimizer), part, Plan(algorithm=GSPO(), grad_clip=1.0))
    assert optimizer.position == 0


def test_tokens_that_went_missing_fail_the_step(tiny, tmp_path):
    part = replace(read(on_policy_samples(tiny, (60, 40, 40)), tmp_path), trained=71)
    with pytest.raises(TrainerError, match="70 tokens trained of 71 in the batch"):
        train_step(Actors(policy=tiny, optimizer=adam(tiny)), part, Plan(algorithm=GSPO(), grad_clip=1.0))
