"""Log-probabilities and entropies of chosen tokens from hidden states, in chunks of rows.

Logits exist for `chunk` rows at a time, forward and backward; length x vocabulary never does.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable


class _ChunkedLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: torch.Tensor,
        weight_VD: torch.Tensor,
        labels_R: torch.Tensor,
        temperature_R: torch.Tensor,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, weight = hidden_RD.float(), weight_VD.float()
        logprobs, entropies, normalisers = [], [], []
        for rows in torch.arange(len(labels_R), device=labels_R.device).split(chunk):
            logits = (hidden[rows] @ weight.t()).div_(temperature_R[rows, None])
            normaliser = torch.logsumexp(logits, -1)
            logprobs.append(logits.gather(-1, labels_R[rows, None]).squeeze(-1) - normaliser)
            mean_logit = torch.softmax(logits, -1).mul_(logits).sum(-1)
            entropies.append(normaliser - mean_logit)
            normalisers.append(normaliser)
        ctx.save_for_backward(hidden_RD, weight_VD, labels_R, temperature_R, torch.cat(normalisers))
        ctx.chunk = chunk
        entropy_R = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy_R)
        return torch.cat(logprobs), entropy_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_R: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_RD, weight_VD, labels_R, temperature_R, normaliser_R = ctx.saved_tensors
        hidden, weight = hidden_RD.float(), weight_VD.float()
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for rows in torch.arange(len(labels_R), device=labels_R.device).split(ctx.chunk):
            logits = (hidden[rows] @ weight.t()).div_(temperature_R[rows, None])
            scale = (grad_R[rows] / temperature_R[rows])[:, None]
            grad_logits = logits.sub_(normaliser_R[rows, None]).exp_().mul_(-scale)
            grad_logits.scatter_add_(-1, labels_R[rows, None], scale)
            grad_hidden[rows] = grad_logits @ weight
            grad_weight.addmm_(grad_logits.t(), hidden[rows])
        return grad_hidden.to(hidden_RD.dtype), grad_weight.to(weight_VD.dtype), None, None, None


def chunked_logprobs(
    hidden_RD: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_R: torch.Tensor,
    temperature_R: torch.Tensor,
    *,
    chunk: int = 1024,
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 (log softmax(logits / temperature) at the label, entropy of that softmax) of each row.

    Gradients reach hidden states and weight through the log-probabilities only. Raises ValueError on no rows.
    """
    if len(labels_R) == 0:
        raise ValueError("no rows: give a rank without tokens one row of zero loss")
    return _ChunkedLogprob.apply(hidden_RD, weight_VD, labels_R, temperature_R, chunk)  # type: ignore[return-value]
