import pytest
import torch

from lego.learn.heads import chunked_logprobs


def naive(hidden, weight, labels, temperature):
    scores = torch.log_softmax(hidden.float() @ weight.float().t() / temperature[:, None], -1)
    return scores.gather(-1, labels[:, None])[:, 0], -(scores.exp() * scores).sum(-1)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_logprobs_and_gradients_are_those_of_the_whole(chunk):
    torch.manual_seed(0)
    inputs = [torch.randn(50, 16), torch.randn(300, 16)]
    labels, temperature = torch.randint(0, 300, (50,)), torch.rand(50) + 0.3
    scale = torch.randn(50)
    results = []
    for function, extra in ((naive, {}), (chunked_logprobs, {"chunk": chunk})):
        hidden, weight = (x.clone().requires_grad_() for x in inputs)
        logprobs, entropy = function(hidden, weight, labels, temperature, **extra)
        (logprobs * scale).sum().backward()
        results.append((logprobs, entropy, hidden.grad, weight.grad))
    for want, got in zip(*results, strict=True):
        assert torch.allclose(want, got, atol=2e-5)


def test_each_token_has_its_own_temperature():
    logits = torch.tensor([[2.0, 1.0, 0.0]] * 2)
    got, _ = chunked_logprobs(logits, torch.eye(3), torch.tensor([0, 0]), torch.tensor([0.5, 1.0]))
    assert got.tolist() == pytest.approx([-0.1429, -0.4076], abs=1e-4)


def test_logits_of_all_tokens_never_exist_at_once():
    rows, vocab = 512, 4096
    hidden, weight = torch.randn(rows, 8, requires_grad=True), torch.randn(vocab, 8, requires_grad=True)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        logprobs, _ = chunked_logprobs(hidden, weight, torch.zeros(rows, dtype=torch.long), torch.ones(rows), chunk=32)
        logprobs.sum().backward()
    assert 0 < largest <= 32 * vocab


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="no rows"):
        chunked_logprobs(torch.zeros(0, 4), torch.zeros(5, 4), torch.zeros(0, dtype=torch.long), torch.zeros(0))
