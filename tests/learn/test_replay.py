import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lego.learn.replay import PADDING, UNRECORDED, Replay, RoutingError


def replay(layers=2, experts=4, top_k=2):
    return Replay(layers=layers, experts=experts, top_k=top_k)


def rows(*tokens):
    """The same row in both layers."""
    return torch.tensor([[t, t] for t in tokens])


@pytest.mark.parametrize(
    ("row", "shown"), [([0, 0], r"\[0, 0\]"), ([1, 4], r"\[1, 4\]"), ([-1, 2], r"\[-1, 2\]"), ([-3, -3], r"\[-3, -3\]")]
)
def test_a_row_that_no_router_could_have_chosen_is_refused_before_dispatch(row, shown):
    with pytest.raises(RoutingError, match=f"token 1 of MoE layer 0: {shown}; want 2 distinct ids below 4"):
        replay().open(torch.arange(2), rows([0, 1], row))


@pytest.mark.parametrize("count", [6, 8])
def test_rows_that_do_not_match_the_tokens_are_refused_with_both_numbers(count):
    with pytest.raises(RoutingError, match=rf"\({count}, 2, 2\); want 7 tokens"):
        replay().open(torch.arange(7), rows(*[[0, 1]] * count))


def test_recorded_rows_are_used_and_missing_ones_come_from_live_scores():
    made, positions = replay(), torch.arange(3)
    made.open(positions, rows([2, 0], [UNRECORDED] * 2, [PADDING] * 2))
    made.enter(positions)
    scores = torch.tensor([[0.1, 0.2, 0.3, 0.4]] * 3)
    chosen = [made.choose(layer, scores) for layer in range(2)]
    for ids in chosen:
        assert ids[0].tolist() == [2, 0]
        assert sorted(ids[1].tolist()) == sorted(ids[2].tolist()) == [2, 3]
    count = made.close(positions)
    assert (count.needed, count.replayed, count.live) == (4, 2, 2)


def test_a_layer_that_never_asked_leaves_its_rows_unconsumed():
    made, positions = replay(), torch.arange(2)
    made.open(positions, rows([0, 1], [1, 2]))
    made.enter(positions)
    made.choose(0, torch.rand(2, 4))
    count = made.close(positions)
    assert (count.needed, count.replayed + count.live) == (4, 2)


class Router(torch.nn.Module):
    """A layer whose router is tied between experts; noise, which no checkpoint restores, decides at each call."""

    def __init__(self, made, layer):
        super().__init__()
        self.replay, self.layer, self.seen = made, layer, []
        self.noise = torch.Generator().manual_seed(layer)
        self.noise = torch.Generator().manual_seed(layer)
        self.gate = torch.nn.Parameter(torch.ones(4, 3) + 1e-3 * torch.arange(12.0).view(4, 3))
        self.experts = torch.nn.Parameter(torch.arange(36.0).view(4, 3, 3) / 10)

    def forward(self, x_TD, positions):
        self.replay.enter(positions)
        scores_TE = torch.softmax(x_TD @ self.gate.t(), -1)
        ids_TK = self.replay.choose(self.layer, scores_TE + torch.rand(scores_TE.shape, generator=self.noise))
        self.seen.append(ids_TK.tolist())
        out_TKD = torch.einsum("td,tkde->tke", x_TD, self.experts[ids_TK])
        return x_TD + (scores_TE.gather(-1, ids_TK)[..., None] * out_TKD).sum(1)


def trained(recorded, *, checkpointing):
    """Two layers, two micro-batches, backward last first: (gradients, choices of each layer, row counts)."""
    torch.manual_seed(0)
    made = replay()
    layers = [Router(made, layer) for layer in range(2)]
    states, positions = torch.rand(2, 2, 3), [torch.arange(2), torch.arange(2)]
    outs = []
    for x, position, rows in zip(states, positions, recorded, strict=True):
        made.open(position, rows)
        for layer in layers:
            x = checkpoint(layer, x, position, use_reentrant=False) if checkpointing else layer(x, position)
        outs.append(x.square().sum())
    for out in reversed(outs):
        out.backward()
    grads = [p.grad for layer in layers for p in layer.parameters()]
    return grads, [layer.seen for layer in layers], [made.close(p) for p in reversed(positions)]


def test_r07_recomputed_layers_use_the_rows_of_their_own_micro_batch_and_layer():
    recorded = torch.tensor([[[[0, 1], [2, 3]], [[2, 0], [1, 3]]], [[[3, 1], [1, 2]], [[0, 3], [2, 1]]]])
    grads, seen, _ = trained(recorded, checkpointing=False)
    again, seen_twice, counts = trained(recorded, checkpointing=True)
    for layer in range(2):
        first, second = (recorded[batch, :, layer].tolist() for batch in range(2))
        assert seen[layer] == [first, second] and seen_twice[layer] == [first, second, second, first]
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))
    assert [(c.needed, c.replayed, c.live) for c in counts] == [(4, 4, 0)] * 2


def test_r07_without_recorded_rows_the_same_recomputation_goes_astray():
    unrecorded = torch.full((2, 2, 2, 2), UNRECORDED)
    grads, _, _ = trained(unrecorded, checkpointing=False)
    again, _, _ = trained(unrecorded, checkpointing=True)
    assert not all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


def test_r05_zeros_in_place_of_rows_and_an_id_beyond_the_experts_are_refused():
    routing = torch.arange(8).repeat(5, 3, 1)
    made = replay(layers=3, experts=64, top_k=8)
    made.open(torch.arange(5), routing)
    zeros, beyond = routing.clone(), routing.clone()
    zeros[:4], beyond[2, 1, 7] = 0, 64
    with pytest.raises(RoutingError, match=r"12 of 15 routing rows are invalid, the first at token 0 of MoE layer 0"):
        made.open(torch.arange(5), zeros)
    with pytest.raises(RoutingError, match=r"1 of 15 .* token 2 of MoE layer 1: .*64\]; want 8 distinct ids below 64"):
        made.open(torch.arange(5), beyond)


def test_rows_of_dense_layers_are_not_taken_for_those_of_moe_layers():
    with pytest.raises(RoutingError, match=r"\(2, 3, 2\); want 2 tokens x 2 MoE layers"):
        replay(layers=2).open(torch.arange(2), torch.tensor([0, 1]).repeat(2, 3, 1))


def test_a_dense_model_needs_no_rows():
    made, positions = replay(layers=0, experts=0, top_k=0), torch.arange(3)
    made.enter(positions)
    made.open(positions, torch.zeros(3, 0, 0, dtype=torch.int64))
    made.enter(positions)
    count = made.close(positions)
    assert (count.needed, count.replayed, count.live) == (0, 0, 0)


@pytest.mark.parametrize("other", [lambda p: p.clone(), lambda p: p[1:], lambda p: p[:2]], ids=["copy", "end", "start"])
def test_a_layer_with_other_positions_raises_and_does_not_route_live(other):
    made, positions = replay(), torch.arange(3)
    made.open(positions, rows(*[[0, 1]] * 3))
    made.enter(positions[None])
    assert made.choose(0, torch.rand(3, 4)).tolist() == [[0, 1]] * 3
    made.enter(other(positions))
    with pytest.raises(RoutingError, match="MoE layer 0 was not given the positions of an open micro-batch"):
        made.choose(0, torch.rand(3, 4))


def test_a_layer_computed_after_its_micro_batch_closed_raises():
    made, positions = replay(), torch.arange(3)
    made.open(positions, rows(*[[0, 1]] * 3))
    made.close(positions)
    made.enter(positions)
    with pytest.raises(RoutingError, match="not given the positions"):
        made.choose(0, torch.rand(3, 4))


def test_the_memory_of_an_open_micro_batch_is_not_given_to_another():
    made, opened = replay(), set()
    for _ in range(20):
        positions = torch.arange(1000)
        made.open(positions, torch.tensor([0, 1]).repeat(1000, 2, 1))
        opened.add(positions.data_ptr())
    assert len(opened) == 20


def test_positions_cannot_be_opened_twice():
    made, positions = replay(), torch.arange(3)
    made.open(positions, rows(*[[0, 1]] * 3))
    with pytest.raises(RoutingError, match="open already"):
        made.open(positions[None], rows(*[[2, 3]] * 3))


def test_a_router_that_sees_a_part_of_the_tokens_is_refused():
    made, positions = replay(), torch.arange(4)
    made.open(positions, rows(*[[0, 1]] * 4))
    made.enter(positions)
    with pytest.raises(RoutingError, match="MoE layer 1 routes 2 tokens, but 4 have rows"):
        made.choose(1, torch.rand(2, 4))


def test_recorded_experts_are_compared_once_with_those_of_the_live_router():
    made, positions = replay(), torch.arange(3)
    made.open(positions, rows([3, 2], [0, 3], [UNRECORDED] * 2))
    made.enter(positions)
    for _ in range(2):  # as in a recomputation
        made.choose(0, torch.tensor([[0.1, 0.2, 0.3, 0.4]] * 3))
    made.choose(1, torch.tensor([[0.4, 0.3, 0.2, 0.1]] * 3))
    count = made.close(positions)
    assert (count.choices, count.agreed) == (8, 3 + 1)
