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


def test_recomputation_in_another_order_finds_the_rows_of_its_own_micro_batch():
    """Near-tied scores differ at the second call; two micro-batches go backward last first."""
    made = replay(layers=1)
    seen: dict[int, list[list[int]]] = {0: [], 1: []}
    scores = [torch.rand(2, 4, requires_grad=True) for _ in range(2)]
    positions = [torch.arange(2), torch.arange(2)]
    recorded = [torch.tensor([[[0, 1]], [[2, 3]]]), torch.tensor([[[3, 1]], [[1, 0]]])]

    def layer(score, position, batch):
        made.enter(position)
        ids = made.choose(0, score + 1e-3 * torch.rand(2, 4))
        seen[batch].append(ids.flatten().tolist())
        return score.gather(-1, ids).square().sum()

    outs = []
    for batch in range(2):
        made.open(positions[batch], recorded[batch])
        outs.append(checkpoint(layer, scores[batch], positions[batch], batch, use_reentrant=False))
    for out in reversed(outs):
        out.backward()
    assert seen == {b: [recorded[b].flatten().tolist()] * 2 for b in range(2)}
    for batch in range(2):
        want = torch.zeros(2, 4).scatter(-1, recorded[batch][:, 0], 1) * 2 * scores[batch].detach()
        assert torch.allclose(scores[batch].grad, want)
        assert made.close(positions[batch]).replayed == 2
