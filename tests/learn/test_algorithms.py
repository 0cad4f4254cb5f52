import json
from dataclasses import asdict

import pytest

from lego.learn.algorithms import (
    ALGORITHMS,
    CISPO,
    DAPO,
    GRPO,
    GSPO,
    PPO,
    RLOO,
    SAO,
    Correction,
    Critic,
    DrGRPO,
    ReinforcePlusPlus,
    expected_ess,
    from_fields,
    name_of,
    warnings,
)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_comes_back_from_json(name):
    made = ALGORITHMS[name](kl_coef=0.04, correction=Correction(level="geometric", mode="mask", low=0.9, high=1.1))
    assert from_fields(name_of(made), json.loads(json.dumps(asdict(made)))) == made


def test_a_field_that_no_algorithm_has_is_refused():
    with pytest.raises(TypeError, match="normalise"):
        from_fields("grpo", {"normalise": "token"})


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (GRPO(), ("group", "group", "sequence", 0.2, 0.2)),
        (DrGRPO(), ("group", "none", "constant", 0.2, 0.2)),
        (DAPO(), ("group", "group", "token", 0.2, 0.28)),
        (ReinforcePlusPlus(), ("group", "batch", "token", 0.2, 0.2)),
        (GSPO(), ("group", "group", "sequence", 3e-4, 4e-4)),
        (CISPO(), ("group", "group", "token", 1.0, 4.0)),
        (PPO(), ("none", "none", "token", 0.2, 0.2)),
    ],
)
def test_defaults_are_those_of_the_papers(made, expected):
    assert (made.baseline, made.scale, made.aggregate, made.clip_low, made.clip_high) == expected


def test_sao_has_its_paper_s_band_and_critic():
    assert SAO().correction == Correction(level="token", mode="mask", low=0.2, high=4.0)
    assert SAO().critic == Critic(
        lr=5e-6, updates_per_step=2, warmup_steps=10, frozen_attention=True, clip=None, gae_lambda=1.0
    )


@pytest.mark.parametrize(("length", "expected"), [(1, 0.0), (20, 0.0), (40, 0.5), (200, 0.9), (20000, 0.999)])
def test_the_policy_s_lambda_of_sao_grows_with_the_length(length, expected):
    assert SAO().policy_lambda(length) == pytest.approx(expected)
    assert PPO().policy_lambda(length) == 0.95


def test_a_group_of_one_serves_only_where_nothing_is_compared_with_siblings():
    assert {name for name, kind in ALGORITHMS.items() if kind().least_group == 1} == {"ppo", "sao"}
    assert ReinforcePlusPlus(baseline="batch").least_group == 1
    assert ReinforcePlusPlus(baseline="batch", scale="group").least_group == 2


def test_a_reference_is_held_only_for_a_kl_term():
    assert not any(kind().needs_reference for kind in ALGORITHMS.values())
    assert GRPO(kl_coef=0.04).needs_reference


@pytest.mark.parametrize(("length", "reward"), [(0, 1.0), (16384, 1.0), (18432, 0.5), (20480, 0.0), (90000, 0.0)])
def test_dapo_takes_reward_off_overlong_trials_and_others_do_not(length, reward):
    assert DAPO().shaped(1.0, length) == reward
    assert GRPO().shaped(1.0, length) == 1.0


def test_sequence_weights_over_long_segments_are_warned_of():
    made = GRPO(correction=Correction(level="sequence"))
    assert expected_ess(2800, 5e-4) == pytest.approx(0.06, abs=0.001)
    (sentence,) = warnings(made, mean_length=2800, k3=5e-4)
    assert "0.06" in sentence and "2800 tokens" in sentence
    assert warnings(made, mean_length=500, k3=5e-4) == []
    assert warnings(made, mean_length=2800, k3=1e-5) == []
    for level in ("none", "token", "geometric"):
        assert warnings(GRPO(correction=Correction(level=level)), mean_length=90000, k3=5e-4) == []


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        *[(k, f) for k in (GRPO, GSPO, PPO) for f in ({"clip_low": 1.1}, {"clip_low": -0.1}, {"clip_high": -1})],
        (GRPO, {"clip_high": float("inf")}),
        (GRPO, {"aggregate": "mean"}),
        (RLOO, {"baseline": "mean"}),
        (RLOO, {"scale": "std"}),
        (RLOO, {"kl": "k4"}),
        (RLOO, {"kl_coef": -1}),
        (RLOO, {"entropy_coef": float("nan")}),
        (DrGRPO, {"constant_length": 0}),
        (DAPO, {"overlong_buffer": 20481}),
        (DAPO, {"overlong_penalty": -1}),
        (PPO, {"baseline": "group"}),
        (SAO, {"scale": "batch"}),
        (PPO, {"gae_lambda": 1.1}),
        (SAO, {"length_alpha": 0.0}),
        (Correction, {"level": "trial"}),
        (Correction, {"mode": "clip"}),
        (Correction, {"low": 1.2}),
        (Correction, {"high": 0.8}),
        (Critic, {"lr": -1.0}),
        (Critic, {"updates_per_step": 0}),
        (Critic, {"clip": -0.1}),
        (Critic, {"gae_lambda": -0.1}),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(kind, field):
    ((name, value),) = field.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}".replace("'", ".")):
        kind(**field)


@pytest.mark.parametrize(("kind", "field"), [(PPO, {"critic": None}), (GRPO, {"correction": "token"})])
def test_a_record_of_another_kind_is_refused_by_name(kind, field):
    with pytest.raises(ValueError, match=f"{next(iter(field))}=.*: want a C"):
        kind(**field)
