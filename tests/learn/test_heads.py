import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from lego.learn.heads import VocabularyShard, chunked_logprobs, values

WORDS, ROWS, WIDTH = 300, 50, 16


def naive(hidden, weight, labels, temperature):
    scores = torch.log_softmax(hidden.float() @ weight.float().t() / temperature[:, None], -1)
    return scores.gather(-1, labels[:, None])[:, 0], -(scores.exp() * scores).sum(-1)


def made_up(spread=1.0):
    """Hidden states, weight, labels, temperatures, and the loss's gradients at log-probabilities and entropies."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(ROWS, WIDTH) * spread, torch.randn(WORDS, WIDTH)
    return hidden, weight, torch.randint(0, WORDS, (ROWS,)), torch.rand(ROWS) + 0.3, torch.randn(2, ROWS)


def results(function, hidden, weight, labels, temperature, at, **how):
    """(log-probabilities, entropies, gradient of the hidden states, gradient of the weight)."""
    hidden, weight = (x.clone().requires_grad_() for x in (hidden, weight))
    found = function(hidden, weight, labels, temperature, **how)
    sum((x * g).sum() for x, g in zip(found, at, strict=True) if g.any()).backward()
    return *(x.detach() for x in found), hidden.grad, weight.grad


@pytest.mark.parametrize("tile", [(1, 300), (7, 37), (64, 1), (64, 1000)])
@pytest.mark.parametrize("used", [(1, 0), (0, 1), (1, 1)], ids=["logprob", "entropy", "both"])
def test_tiled_logprobs_entropies_and_gradients_are_those_of_the_whole(tile, used):
    *inputs, at = made_up()
    at = at * torch.tensor(used)[:, None]
    want = results(naive, *inputs, at)
    got = results(chunked_logprobs, *inputs, at, chunk=tile[0], block=tile[1])
    for a, b in zip(want, got, strict=True):
        assert torch.allclose(a, b, atol=2e-5)


def test_each_token_has_its_own_temperature():
    logits = torch.tensor([[2.0, 1.0, 0.0]] * 2)
    got, _ = chunked_logprobs(logits, torch.eye(3), torch.tensor([0, 0]), torch.tensor([0.5, 1.0]))
    assert got.tolist() == pytest.approx([-0.1429, -0.4076], abs=1e-4)


def test_huge_logits_stay_finite_and_right():
    *inputs, at = made_up(spread=1e4)
    want, got = results(naive, *inputs, at), results(chunked_logprobs, *inputs, at, chunk=7, block=37)
    assert want[0].abs().max() > 1e4
    for a, b in zip(want, got, strict=True):
        assert b.isfinite().all() and torch.allclose(a, b, rtol=1e-5, atol=1e-4)


def test_bfloat16_inputs_are_multiplied_exactly():
    hidden, weight, labels, temperature, at = made_up()
    low = hidden.bfloat16(), weight.bfloat16()
    want = results(naive, *(x.float() for x in low), labels, temperature, at)
    got = results(chunked_logprobs, *low, labels, temperature, at, chunk=7, block=37)
    for a, b in zip(want[:2], got[:2], strict=True):
        assert b.dtype == torch.float32 and torch.allclose(a, b, atol=2e-5)
    for a, b in zip(want[2:], got[2:], strict=True):
        assert b.dtype == torch.bfloat16 and (a - b).norm() < 1e-2 * a.norm()


@pytest.mark.gpu
def test_bfloat16_on_an_accelerator_gives_the_numbers_of_float32():
    hidden, weight, labels, temperature, at = (x.cuda() for x in made_up())
    low = hidden.bfloat16(), weight.bfloat16()
    want = results(naive, *(x.double() for x in low), labels, temperature, at)
    got = results(chunked_logprobs, *low, labels, temperature, at, chunk=16, block=64)
    for a, b in zip(want[:2], got[:2], strict=True):
        assert torch.allclose(a.float(), b, atol=2e-5)
    for a, b in zip(want[2:], got[2:], strict=True):
        assert (a - b).norm() < 1e-2 * a.norm()


@pytest.mark.parametrize("label", [-1, WORDS])
def test_a_label_that_is_no_word_cannot_pass_for_a_number(label):
    hidden, weight, labels, temperature, _ = made_up()
    labels[3] = label
    logprobs, _ = chunked_logprobs(hidden, weight, labels, temperature, block=37)
    assert logprobs.isnan().nonzero().tolist() == [[3]]


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize(("rows", "words"), [(64, 256), (512, 256), (64, 2048), (512, 2048)])
def test_nothing_is_made_that_is_larger_than_a_tile_or_an_input(rows, words):
    hidden, weight = torch.randn(rows, 2, requires_grad=True), torch.randn(words, 2, requires_grad=True)
    labels = torch.zeros(rows, dtype=torch.long)
    with Largest() as largest:
        logprobs, entropies = chunked_logprobs(hidden, weight, labels, torch.ones(rows), chunk=32, block=128)
        (logprobs + entropies).sum().backward()
    assert 32 * 128 <= largest.elements <= max(32 * 128, hidden.numel(), weight.numel(), 4 * rows * words // 128)


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="no rows"):
        chunked_logprobs(torch.zeros(0, 4), torch.zeros(5, 4), torch.zeros(0, dtype=torch.long), torch.zeros(0))


def one_rank(rank, folder):
    """The head with an uneven half of the vocabulary; writes what it found."""
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    hidden, weight, labels, temperature, at = made_up()
    offset, stop = ((0, 170), (170, WORDS))[rank]
    shard = VocabularyShard(offset=offset, group=dist.group.WORLD)
    mine = hidden, weight[offset:stop], labels, temperature, at
    torch.save(results(chunked_logprobs, *mine, chunk=7, block=37, shard=shard), f"{folder}/{rank}")
    dist.destroy_process_group()


def test_a_vocabulary_spread_over_ranks_gives_the_numbers_of_one(tmp_path):
    torch.multiprocessing.spawn(one_rank, (str(tmp_path),), nprocs=2)
    *want, want_weight = results(naive, *made_up())
    ranks = [torch.load(tmp_path / str(rank)) for rank in range(2)]
    for *got, _ in ranks:
        for a, b in zip(want, got, strict=True):
            assert torch.allclose(a, b, atol=2e-5)
    assert torch.allclose(want_weight, torch.cat([weight for *_, weight in ranks]), atol=2e-5)


def test_values_are_float32_and_learn_from_bfloat16_states():
    hidden, weight = torch.randn(5, 8).bfloat16(), torch.randn(1, 8, requires_grad=True)
    found = values(hidden, weight)
    assert found.dtype == torch.float32 and found.shape == (5,)
    assert torch.allclose(found, hidden.float() @ weight[0])
    found.sum().backward()
    assert torch.allclose(weight.grad[0], hidden.float().sum(0))
