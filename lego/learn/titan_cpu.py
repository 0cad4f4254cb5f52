"""What torchtitan needs to run where there is no accelerator; imported before it, and idle where there is one.

torchtitan 0.3.0 assumes CUDA in several places. The model's are answered by swapping nodes of its config tree
(its own extension point); those that act during import are answered here, while it is imported.
"""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import pairwise
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

_KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"


def on_cpu() -> bool:
    """Whether this machine has no accelerator that torch can use."""
    return not torch.accelerator.is_available()


def _unusable(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def call(*args: object, **kwargs: object) -> None:
        raise RuntimeError(f"{name} of the minimal-async expert dispatch needs triton, which is not installed")

    return call


@contextlib.contextmanager
def _importable() -> Iterator[None]:
    """Lets torchtitan import without triton and name the CPU as its device."""
    with contextlib.ExitStack() as stack:
        if importlib.util.find_spec("triton") is None:
            kernels = ModuleType(_KERNELS)
            kernels.__getattr__ = _unusable  # type: ignore[method-assign]
            stack.callback(sys.modules.pop, _KERNELS, None)
            sys.modules[_KERNELS] = kernels
        if on_cpu():
            stack.enter_context(mock.patch("torch._utils._get_available_device_type", lambda: "cpu"))
            # Flex attention is compiled when imported, never called here, and costs each rank two CPU seconds.
            stack.enter_context(mock.patch("torch.compile", lambda function, **_: function))
        yield


with _importable():
    import torchtitan.tools.utils  # noqa: F401
    from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata
    from torchtitan.models.common.moe import GroupedExperts


def equal_runs(starts: list[int]) -> list[tuple[int, int, int]]:
    """(start, documents, length) of each run of neighbours of one length; `starts` ends with the total.

    Documents packed longest first make long runs, and each run is one attention call.
    """
    runs: list[tuple[int, int, int]] = []
    for start, stop in pairwise(starts):
        if runs and runs[-1][2] == stop - start:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1, runs[-1][2])
        else:
            runs.append((start, 1, stop - start))
    return runs


class DocumentAttention(VarlenAttention):
    """Causal attention inside each document, one call of torch's own CPU kernel a run of equal lengths."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
        enable_gqa: bool = False,
        **kwargs: object,
    ) -> torch.Tensor:
        if self.window_size != (-1, 0):
            raise ValueError(f"attention window {self.window_size}: only full causal attention runs on CPU")
        batch, length = q_BLNH.shape[:2]
        q, k, v = (x.reshape(batch * length, *x.shape[2:]) for x in (q_BLNH, k_BLNH, v_BLNH))
        outs = []
        for start, count, size in equal_runs(attention_masks.cu_seq_q.tolist()):
            rows = slice(start, start + count * size)
            q_, k_, v_ = (x[rows].view(count, size, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(q_, k_, v_, is_causal=True, scale=scale, enable_gqa=enable_gqa)
            outs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outs).view(batch, length, *q.shape[1:-1], v.shape[-1])


def _local(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


class PlainGroupedExperts(GroupedExperts):
    """The experts in the dtype of their weights; torchtitan's own cast everything to bfloat16."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        w1, w2, w3 = (_local(w).transpose(-2, -1) for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        ends = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        x = x_RD.to(w1.dtype)
        hidden = F.silu(self._grouped_mm(A=x, B_t=w1, offs=ends)) * self._grouped_mm(A=x, B_t=w3, offs=ends)
        return self._grouped_mm(A=hidden, B_t=w2, offs=ends).type_as(x_RD)


def derive(config: Any, to: type) -> Any:
    """A config of class `to` with the fields of `config`."""
    return to(**{f.name: getattr(config, f.name) for f in fields(config)})


def swap(model_config: Any) -> None:
    """Replaces, in torchtitan's config tree, the nodes that cannot run on CPU."""
    for old, new in ((VarlenAttention, DocumentAttention), (GroupedExperts, PlainGroupedExperts)):
        for _, config, parent, name in list(model_config.traverse(old.Config)):
            setattr(parent, name, derive(config, new.Config))


def use_sum_reduction(model: torch.nn.Module) -> None:
    """gloo has no pre-multiplied sum, which FSDP would use for its gradient factor of 1."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
