import pytest
import torch

from lego.learn.optimizer import AdamW
from lego.learn.schedule import Schedule
from tests.learn.policies import policy

SETTINGS = {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.0}


def values(network):
    return {name: p.detach().full_tensor().clone() for name, p in network.parameters().items()}


def pull(network, gradient=1.0):
    """The same gradient on every number."""
    for parameter in network.parameters().values():
        parameter.grad = torch.full_like(parameter.detach(), gradient)


def test_two_steps_are_those_of_the_paper(tiny_model):
    """Adam's algorithm 1 (arXiv 1412.6980) by hand, for gradients 1 and then 3."""
    network = policy(tiny_model)
    optimizer, before = AdamW(network, **SETTINGS), values(network)
    for gradient in (1.0, 3.0):
        pull(network, gradient)
        optimizer.step()
    mean, square = (0.9 * 0.1 + 0.3) / (1 - 0.9**2), (0.99 * 0.01 + 0.09) / (1 - 0.99**2)
    want = -0.1 - 0.1 * mean / square**0.5
    for name, value in values(network).items():
        assert torch.allclose(value - before[name], torch.tensor(want), atol=2e-6), name


def test_only_matrices_decay(tiny_model):
    network = policy(tiny_model)
    optimizer, before = AdamW(network, **SETTINGS | {"weight_decay": 0.5}), values(network)
    pull(network, 0.0)
    optimizer.step()
    for name, value in values(network).items():
        want = before[name] if "norm" in name else before[name] * 0.95
        assert torch.allclose(value, want, atol=1e-6), name


def test_what_is_frozen_stays_and_has_no_moments(tiny_model):
    network = policy(tiny_model)
    frozen = {name for name in network.parameters() if "attention" in name}
    for name in frozen:
        network.parameters()[name].requires_grad_(False)
    optimizer, before = AdamW(network, **SETTINGS), values(network)
    pull(network)
    optimizer.step()
    assert frozen and frozen == {n for n, v in values(network).items() if torch.equal(v, before[n])}
    state = optimizer.state()
    assert {n for n in network.parameters() if f"exp_avg.{n}" not in state} == frozen
    assert {n for n in network.parameters() if f"weights.{n}" in state} == set(network.parameters())


def test_the_rate_follows_the_schedule_and_its_position_is_state(tiny_model):
    network = policy(tiny_model)
    schedule = Schedule(warmup_steps=2, decay="linear", steps=4)
    optimizer, rates = AdamW(network, **SETTINGS, schedule=schedule), []
    for _ in range(5):
        rates.append(optimizer.lr)
        pull(network)
        optimizer.step()
        assert optimizer.inner.param_groups[0]["lr"] == rates[-1]
    assert rates == pytest.approx([0.05, 0.1, 0.05, 0.0, 0.0]) and optimizer.position == 5
    resumed = AdamW(network, **SETTINGS, schedule=schedule)
    resumed.state()["position"].copy_(torch.tensor(2))
    assert resumed.position == 2 and resumed.lr == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        (Schedule(), [1, 1, 1, 1, 1, 1]),
        (Schedule(warmup_steps=4), [0.25, 0.5, 0.75, 1, 1, 1]),
        (Schedule(decay="linear", steps=5), [0.8, 0.6, 0.4, 0.2, 0, 0]),
        (Schedule(decay="linear", steps=6, warmup_steps=2, min_share=0.2), [0.5, 1, 0.8, 0.6, 0.4, 0.2]),
        (Schedule(decay="cosine", steps=4, min_share=0.5), [0.926777, 0.75, 0.573223, 0.5, 0.5, 0.5]),
    ],
)
def test_a_schedule_warms_up_and_decays_to_its_share(schedule, shares):
    assert [schedule.share(i) for i in range(6)] == pytest.approx(shares, abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"warmup_steps": -1}, "lr_warmup_steps: -1"),
        ({"min_share": 1.5}, "lr_min_share: 1.5"),
        ({"decay": "cosine"}, "steps: None"),
        ({"decay": "linear", "warmup_steps": 5, "steps": 5}, "steps: 5, wanted more than lr_warmup_steps 5"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_by_field(fields, named):
    with pytest.raises(ValueError, match=named):
        Schedule(**fields)
