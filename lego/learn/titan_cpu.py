"""What torchtitan needs to run where there is no accelerator; imported before it, and idle where there is one.

torchtitan 0.3.0 assumes CUDA in several places. The model's are answered by swapping nodes of its config tree
(its own extension point); those that act during import are answered here, while it is imported.
"""

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import pairwise
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lego.learn.delta_rule import gated_delta_rule

_STAND_INS = {
    "triton": ("torchtitan.distributed.minimal_async_ep.kernels",),
    "fla": (
        "fla.modules.conv.triton.ops",
        "fla.ops.gated_delta_rule",
        "fla.ops.gated_delta_rule.chunk",
        "fla.ops.gated_delta_rule.fused_recurrent",
    ),
}
"""Modules that torchtitan imports, by the package that they need."""


def on_cpu() -> bool:
    """Whether this machine has no accelerator that torch can use."""
    return not torch.accelerator.is_available()


def _stand_in(package: str, module: str) -> ModuleType:
    """A module all of whose names can be imported, and fail when called."""

    def unusable(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: object, **kwargs: object) -> None:
            raise RuntimeError(f"{name} of {module} needs {package}, which is not installed")

        # torchtitan tells its type checker of autograd functions while it is imported.
        return type(name, (torch.autograd.Function,), {"forward": call}) if name.endswith("Function") else call

    made = ModuleType(module)
    made.__getattr__ = unusable  # type: ignore[method-assign]
    return made


@contextlib.contextmanager
def _importable() -> Iterator[None]:
    """Lets torchtitan import without triton and flash-linear-attention and name the CPU as its device."""
    with contextlib.ExitStack() as stack:
        for package, modules in _STAND_INS.items():
            if importlib.util.find_spec(package) is None:
                for module in modules:
                    stack.callback(sys.modules.pop, module, None)
                    sys.modules[module] = _stand_in(package, module)
        if on_cpu():
            stack.enter_context(mock.patch("torch._utils._get_available_device_type", lambda: "cpu"))
            # Flex attention is compiled when imported, never called here, and costs each rank two CPU seconds.
            stack.enter_context(mock.patch("torch.compile", lambda function, **_: function))
        yield


with _importable():
    import torchtitan.tools.utils  # noqa: F401
    from torchtitan.models.common import Conv1d
    from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata
    from torchtitan.models.common.moe import GroupedExperts
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, ScaleBiasForward, swiglu
    from torchtitan.models.qwen3_5.model import GatedDeltaKernel, GatedDeltaNet


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
    """Causal attention inside each document, one call a run of equal lengths."""

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
        out_transform: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        batch, length = q_BLNH.shape[:2]
        q, k, v = (x.reshape(batch * length, *x.shape[2:]) for x in (q_BLNH, k_BLNH, v_BLNH))
        outs, lses = [], []
        for start, count, size in equal_runs(attention_masks.cu_seq_q.tolist()):
            rows = slice(start, start + count * size)
            q_, k_, v_ = (x[rows].view(count, size, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
            grouped = q_.shape[1] != k_.shape[1]
            if out_transform is None and self.window_size == (-1, 0):
                out = F.scaled_dot_product_attention(q_, k_, v_, is_causal=True, scale=scale, enable_gqa=grouped)
            else:
                out, lse = windowed_attention(q_, k_, v_, scale or q_.shape[-1] ** -0.5, self.window_size[0])
                lses.append(lse.transpose(1, 2).flatten(0, 1))
            outs.append(out.transpose(1, 2).flatten(0, 1))
        out_BLNH = torch.cat(outs).view(batch, length, *q.shape[1:-1], v.shape[-1])
        if out_transform is None:
            return out_BLNH
        return out_transform(out_BLNH, torch.cat(lses).view(batch, length, -1))


def windowed_attention(
    q_BNLH: torch.Tensor, k_BNLH: torch.Tensor, v_BNLH: torch.Tensor, scale: float, left: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(attention [B, N, L, H], log of its sum of exponentials [B, N, L]) over itself and `left` tokens before, -1 all.

    Takes length x length memory.
    """
    groups = q_BNLH.shape[1] // k_BNLH.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k_BNLH, v_BNLH))
    length = q_BNLH.shape[2]
    inside = torch.ones(length, length, dtype=torch.bool, device=q_BNLH.device).tril()
    if left >= 0:
        inside = inside.triu(-left)
    scores = (q_BNLH.float() @ k.float().transpose(-1, -2) * scale).masked_fill(~inside, -torch.inf)
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ v.float()).type_as(v), lse


def _local(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def expert_product(x_RD: torch.Tensor, w_EFD: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """Each row times its expert's weight [R, F]; the rows lie expert by expert. torch's own wants whole 16 bytes."""
    if all(size * x_RD.element_size() % 16 == 0 for size in w_EFD.shape[1:]):
        return F.grouped_mm(x_RD, w_EFD.transpose(-2, -1), offs=torch.cumsum(counts_E, 0, dtype=torch.int32))
    return torch.cat([F.linear(x, w) for x, w in zip(x_RD.split(counts_E.tolist()), w_EFD, strict=True)])


class PlainGroupedExperts(GroupedExperts):
    """The experts in the dtype of their weights, of any size; torchtitan's own cast everything to bfloat16."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        w1, w2, w3 = (_local(w) for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        x, counts = x_RD.to(w1.dtype), num_tokens_per_expert_E
        hidden = F.silu(expert_product(x, w1, counts)) * expert_product(x, w3, counts)
        return expert_product(hidden, w2, counts).type_as(x_RD)


class PlainGptOssExperts(GptOssGroupedExperts):
    """gpt-oss' experts in the dtype of their weights."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        weight, counts = self.mlp1_weight_EGD, num_tokens_per_expert_E.long()
        names = weight.device_mesh.mesh_dim_names or () if isinstance(weight, DTensor) else ()
        shared_by = weight.device_mesh["tp"].size() if "tp" in names else 1  # type: ignore[union-attr]
        w1, b1, w2, b2 = (_local(w) for w in (weight, self.mlp1_bias_EG, self.mlp2_weight_EDF, self.mlp2_bias_ED))
        b2 = ScaleBiasForward.apply(b2, shared_by, b2.dtype)
        up = expert_product(x_RD.to(w1.dtype), w1, counts) + b1.repeat_interleave(counts, dim=0)
        hidden = swiglu(up, limit=self.swiglu_limit)
        return (expert_product(hidden, w2, counts) + b2.repeat_interleave(counts, dim=0)).type_as(x_RD)


class PlainDeltaKernel(GatedDeltaKernel):
    """The gated delta rule by torch's own operators, afresh in each document."""

    @dataclass(kw_only=True, slots=True)
    class Config(GatedDeltaKernel.Config):
        pass

    def forward(
        self,
        xq_BLNK: torch.Tensor,
        xk_BLNK: torch.Tensor,
        xv_BLNV: torch.Tensor,
        g_BLN: torch.Tensor,
        beta_BLN: torch.Tensor,
        *,
        cu_seqlens: torch.Tensor | None = None,
        cu_seqlens_cpu: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert cu_seqlens_cpu is not None and len(xq_BLNK) == 1
        outs = []
        for start, count, size in equal_runs(cu_seqlens_cpu.tolist()):
            rows = slice(start, start + count * size)
            run = (x[0, rows].view(count, size, *x.shape[2:]) for x in (xq_BLNK, xk_BLNK, xv_BLNV, g_BLN, beta_BLN))
            outs.append(gated_delta_rule(*run).flatten(0, 1))
        return torch.cat(outs)[None]


class PlainDeltaNet(GatedDeltaNet):
    """A gated delta net whose convolution stays inside each document."""

    @dataclass(kw_only=True, slots=True)
    class Config(GatedDeltaNet.Config):
        pass

    def _causal_conv(
        self,
        x_BLD: torch.Tensor,
        conv: Conv1d,
        cu_seqlens: torch.Tensor | None = None,
        cu_seqlens_cpu: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert cu_seqlens_cpu is not None
        runs = equal_runs(cu_seqlens_cpu.tolist())

        def convolve(x_BLD: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return causal_convolution(x_BLD, weight, runs)

        if isinstance(x_BLD, DTensor):
            return self._local_map_conv(x_BLD, conv, convolve)
        return convolve(x_BLD, conv.weight)


def causal_convolution(x_BLD: torch.Tensor, weight_D1K: torch.Tensor, runs: list[tuple[int, int, int]]) -> torch.Tensor:
    """Each channel convolved with the tokens before it in its document, then SiLU; B is 1.

    In float32 until the end, as in the engine: rounded in between, k3 of trainer and engine on five random bfloat16
    models was 1.9e-4 to 2.6e-4 instead of 1.3e-4 to 1.6e-4.
    """
    outs = []
    for start, count, size in runs:
        x_CDL = x_BLD[0, start : start + count * size].view(count, size, -1).transpose(1, 2).float()
        x_CDL = F.pad(x_CDL, (weight_D1K.shape[-1] - 1, 0))
        outs.append(F.conv1d(x_CDL, weight_D1K.float(), groups=len(weight_D1K)).transpose(1, 2).flatten(0, 1))
    return F.silu(torch.cat(outs))[None].type_as(x_BLD)


def derive(config: Any, to: type) -> Any:
    """A config of class `to` with the fields of `config`."""
    return to(**{f.name: getattr(config, f.name) for f in fields(config)})


_PLAIN = (
    (VarlenAttention, DocumentAttention),
    (GroupedExperts, PlainGroupedExperts),
    (GptOssGroupedExperts, PlainGptOssExperts),
    (GatedDeltaKernel, PlainDeltaKernel),
    (GatedDeltaNet, PlainDeltaNet),
)
"""What cannot run on CPU, and what does."""


def swap(model_config: Any) -> None:
    """Replaces, in torchtitan's config tree, the nodes that cannot run on CPU."""
    for old, new in _PLAIN:
        for _, config, parent, name in list(model_config.traverse(old.Config)):
            if type(config) is old.Config:
                setattr(parent, name, derive(config, new.Config))


def lacks_delta_kernels(model_config: Any) -> bool:
    """Whether a model needs flash-linear-attention, which an accelerator's delta net is made of, in vain."""
    wanted = any(True for _ in model_config.traverse(GatedDeltaKernel.Config))
    return wanted and not on_cpu() and importlib.util.find_spec("fla") is None


def use_sum_reduction(model: torch.nn.Module) -> None:
    """gloo has no pre-multiplied sum, which FSDP would use for its gradient factor of 1."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
