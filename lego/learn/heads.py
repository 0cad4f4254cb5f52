"""Log-probabilities, entropies and values of tokens from hidden states, in float32.

Logits exist for a tile of `chunk` rows and `block` words at a time, forward and backward; length x vocabulary never
does, nor does a float32 copy of the weight. The softmax over all words is put together from those of the blocks
(Milakov and Gimelshein, arXiv 1805.02867), and so it is over ranks that each hold a part of the vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

CHUNK = 1024
BLOCK = 32768
# Smaller tiles are faster on a CPU; below 32 MiB the C library would keep their memory, more of it with each row.
CPU_BLOCK = 8192


@dataclass(frozen=True, kw_only=True)
class VocabularyShard:
    """A rank holds the words from `offset` on; together the ranks of `group` hold each word once."""

    offset: int
    group: dist.ProcessGroup


@dataclass(frozen=True)
class _Tiles:
    """Hidden states and a weight, multiplied a tile at a time. Labels count from the first word of the weight."""

    hidden_RD: torch.Tensor
    weight_VD: torch.Tensor
    labels_R: torch.Tensor
    temperature_R: torch.Tensor
    chunk: int
    block: int

    def words(self) -> Iterator[slice]:
        return _slices(len(self.weight_VD), self.block)

    def rows(self) -> Iterator[slice]:
        return _slices(len(self.labels_R), self.chunk)

    def logits(self, rows: slice, words: slice) -> torch.Tensor:
        """Logits over temperature."""
        return _product(self.hidden_RD[rows], self.weight_VD[words].t()).div_(self.temperature_R[rows, None])

    def labels(self, rows: slice, words: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """(the label's column in the tile, any where it is not in it; whether it is), both [rows, 1]."""
        column = self.labels_R[rows, None] - words.start
        return column.clamp(0, words.stop - words.start - 1), (column >= 0) & (column < words.stop - words.start)


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # GPUs multiply bfloat16 much faster than float32, and products of bfloat16 numbers are exact in float32.
    if a.is_cuda and a.dtype == b.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _statistics(tiles: _Tiles, rows: slice, words: slice) -> torch.Tensor:
    """[4, rows]: the largest logit, the label's (-inf outside), sum e^d and sum d e^d of d = logit - largest."""
    logits = tiles.logits(rows, words)
    column, inside = tiles.labels(rows, words)
    label = logits.gather(-1, column).masked_fill(~inside, -torch.inf)
    largest = logits.amax(-1, keepdim=True)
    mass = logits.sub_(largest).exp()
    return torch.stack([largest[:, 0], label[:, 0], mass.sum(-1), mass.mul_(logits).sum(-1)])


def _whole(parts_S4R: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, ...]:
    """(normaliser, entropy, label's logit) from the statistics of all parts of the vocabulary, here and in `group`."""
    largest_SR, _, mass_SR, weighted_SR = parts_S4R.unbind(1)
    maxima_2R = parts_S4R[:, :2].amax(0)
    if group is not None:
        dist.all_reduce(maxima_2R, op=dist.ReduceOp.MAX, group=group)
    shift_SR = largest_SR - maxima_2R[0]
    sums_2R = torch.stack([mass_SR, weighted_SR + shift_SR * mass_SR], 1).mul_(shift_SR.exp()[:, None]).sum(0)
    if group is not None:
        dist.all_reduce(sums_2R, group=group)
    mass_R, weighted_R = sums_2R
    return maxima_2R[0] + mass_R.log(), mass_R.log() - weighted_R / mass_R, maxima_2R[1]


class _TiledLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: torch.Tensor,
        weight_VD: torch.Tensor,
        labels_R: torch.Tensor,
        temperature_R: torch.Tensor,
        sizes: tuple[int, int],
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tiles = _Tiles(hidden_RD, weight_VD, labels_R, temperature_R, *sizes)
        parts = [torch.cat([_statistics(tiles, rows, words) for rows in tiles.rows()], -1) for words in tiles.words()]
        normaliser_R, entropy_R, label_R = _whole(torch.stack(parts), group)
        ctx.save_for_backward(hidden_RD, weight_VD, labels_R, temperature_R, normaliser_R, entropy_R)
        ctx.sizes, ctx.group = sizes, group
        ctx.set_materialize_grads(False)
        return (label_R - normaliser_R).masked_fill_(label_R == -torch.inf, torch.nan), entropy_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads_R: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden_RD, weight_VD, labels_R, temperature_R, normaliser_R, entropy_R = ctx.saved_tensors
        tiles = _Tiles(hidden_RD, weight_VD, labels_R, temperature_R, *ctx.sizes)
        dtype = torch.promote_types(hidden_RD.dtype, weight_VD.dtype)
        grad_hidden_RD = torch.zeros_like(hidden_RD, dtype=torch.float32)
        grad_weight_VD = torch.empty_like(weight_VD)
        for words in tiles.words():
            grad_words = torch.zeros_like(weight_VD[words], dtype=torch.float32)
            for rows in tiles.rows():
                grad_tile = _grad_logits(tiles, rows, words, normaliser_R, entropy_R, grads_R).to(dtype)
                grad_hidden_RD[rows] += _product(grad_tile, weight_VD[words])
                grad_words += _product(grad_tile.t(), hidden_RD[rows])
            grad_weight_VD[words] = grad_words
        if ctx.group is not None:
            dist.all_reduce(grad_hidden_RD, group=ctx.group)
        return grad_hidden_RD.to(hidden_RD.dtype), grad_weight_VD, None, None, None, None


def _grad_logits(
    tiles: _Tiles,
    rows: slice,
    words: slice,
    normaliser_R: torch.Tensor,
    entropy_R: torch.Tensor,
    grads_R: tuple[torch.Tensor | None, ...],
) -> torch.Tensor:
    """d logprob / d logit = [word = label] - p, d entropy / d logit = -p (log p + entropy), both over temperature."""
    logprobs = tiles.logits(rows, words).sub_(normaliser_R[rows, None])
    of_logprob, of_entropy = (None if g is None else (g[rows] / tiles.temperature_R[rows])[:, None] for g in grads_R)
    grad = logprobs.exp() if of_entropy is not None else logprobs.exp_()
    factor = 0 if of_logprob is None else -of_logprob
    if of_entropy is not None:
        factor = factor - logprobs.add_(entropy_R[rows, None]).mul_(of_entropy)
    grad.mul_(factor)
    if of_logprob is not None:
        column, inside = tiles.labels(rows, words)
        grad.scatter_add_(-1, column, of_logprob * inside)
    return grad


def chunked_logprobs(
    hidden_RD: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_R: torch.Tensor,
    temperature_R: torch.Tensor,
    *,
    chunk: int = CHUNK,
    block: int | None = None,
    shard: VocabularyShard | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 (log softmax(logits / temperature) at the label, entropy in nats of that softmax) of each row.

    Both are differentiable; a loss without the entropy does not pay for its gradient. With a `shard` the weight is
    this rank's part of the vocabulary, everything else is whole and the same on all ranks of its group, and so are
    the results and the gradient of the hidden states; the call is collective, and so is its backward.

    Gradients pass through the dtype of their inputs, as in any linear layer. A label that is no word gives nan.
    Raises ValueError on no rows.
    """
    if len(labels_R) == 0:
        raise ValueError("no rows: give a rank without tokens one row of zero loss")
    block = block or (CPU_BLOCK if hidden_RD.device.type == "cpu" else BLOCK)
    sizes, group = (chunk, block), shard and shard.group
    labels_R = labels_R - shard.offset if shard else labels_R
    return _TiledLogprob.apply(hidden_RD, weight_VD, labels_R, temperature_R, sizes, group)  # type: ignore[return-value]


def values(hidden_RD: torch.Tensor, weight_1D: torch.Tensor) -> torch.Tensor:
    """float32 value of each row: a linear layer of one output, computed in float32 whatever its inputs are."""
    return F.linear(hidden_RD.float(), weight_1D.float()).squeeze(-1)
