import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lego.learn.titan_cpu import equal_runs
from tests.learn.policies import logprobs, policy, recorded_routes
from tests.learn.samples import routes
from tests.tiny import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def tiny(folder):
    return policy(folder)


def ids(n, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 512, n))


def test_a_document_does_not_see_its_neighbour(tiny):
    b, positions = ids(40, 2), torch.cat([torch.arange(30), torch.arange(40)])
    first = logprobs(tiny, torch.cat([ids(30, 0), b]), positions.clone())[30:]
    other = logprobs(tiny, torch.cat([ids(30, 9), b]), positions)[30:]
    alone = logprobs(tiny, b, torch.arange(40))
    assert (first - other).abs().max() < 1e-6
    assert (first - alone).abs().max() < 1e-5


def test_neighbours_of_one_length_share_an_attention_call():
    assert equal_runs([0, 4, 8, 11, 15]) == [(0, 2, 4), (8, 1, 3), (11, 1, 4)]


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
    for made in (policy(folder), policy(folder, activation_checkpointing=checkpointing)):
        positions = [torch.arange(40), torch.arange(40)]
        counts = []
        for i in range(2):
            logprobs(made, ids(40, i), positions[i], rows[i]).sum().backward()
            counts.append(made.replay.close(positions[i]))
        assert all(c.replayed == c.needed == 3 * 40 and c.live == 0 for c in counts)
        results.append({n: p.grad.full_tensor() for n, p in made.parameters().items()})
    for name, want in results[0].items():
        assert (results[1][name] - want).abs().max() <= 1e-5 * want.abs().max() + 1e-7, name


def test_weights_can_be_exported_as_bfloat16(tiny, tmp_path):
    tiny.export_folder(tmp_path, torch.bfloat16)
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert not list(tmp_path.glob("*.part"))
