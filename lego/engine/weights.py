"""The weight-transfer backend: vLLM workers take new HF-named weights from one safetensors file, or from the trainer.

Runs inside vLLM. Workers map the file, so that it must stay as it is until the update is finished: one that was written
into meanwhile is an error. So is an update, by any way, that leaves a layer without its weights: vLLM would only log it
and go on with the old ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

from lego.engine.transfer import WeightsFile


@dataclass
class Way(WeightTransferInitInfo):
    """A way straight from the trainer: `nccl`, `ipc` or `gloo`, and what vLLM's engine of it wants to know."""

    way: str
    info: dict[str, Any]


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """One file holds all weights of one version."""

    path: str
    version: int | None = None
    """What the file must hold, if it says what it holds; None takes any."""


class CheckedEngine(WeightTransferEngine[Way, FileUpdate]):
    """Loads weights through vLLM's layerwise reload, which packs each layer again for its kernels: from a file, or from
    the trainer itself once a way to it is open."""

    init_info_cls = Way
    update_info_cls = FileUpdate

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._file: WeightsFile | None = None
        self._line: WeightTransferEngine | None = None

    def init_transfer_engine(self, init_info: Way) -> None:
        self._hang_up()
        line = _kind(init_info.way)(self.config, self.vllm_config, self.device, self.model)
        line.init_transfer_engine(line.parse_init_info(init_info.info))
        self._line = line

    def start_weight_update(self) -> None:
        self._close()  # of an update that failed on its way
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """All of a file, or some of what the trainer sends."""
        if "path" in update_info:
            super().update_weights(update_info)
        elif self._line is None:
            raise RuntimeError("no way to the trainer is open")
        else:
            self._receive(self._line, update_info)

    def receive_weights(self, update_info: FileUpdate) -> None:
        self._file = WeightsFile(Path(update_info.path), update_info.version)
        self.model.load_weights(iter(self._file))  # type: ignore[operator]

    def finish_weight_update(self) -> None:
        missing = list(unloaded(self.model))
        if missing:
            raise ValueError(f"the update left {len(missing)} layers without all weights, first {missing[0]}")
        if self._file is None and self._line is not None:
            self._line.finish_weight_update()
        else:
            finalize_layerwise_reload(self.model, self.model_config)
        for layer in tied(self.model):
            # The weight itself is up to date; what the layer packed of it for its CPU kernel is not.
            layer.quant_method.process_weights_after_loading(layer)
        if self._file is not None:
            self._file.check()  # only now is the last tensor read: some wait for the rest of their layer
        self._close()

    def shutdown(self) -> None:
        self._close()
        self._hang_up()

    def _receive(self, line: WeightTransferEngine, update_info: dict[str, Any]) -> None:
        try:
            line.update_weights(update_info)
        except BaseException:
            self._hang_up()  # or the trainer would go on waiting for this end
            raise

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.shutdown()
        self._line = None


def _kind(way: str) -> type[WeightTransferEngine]:
    """The worker's end of a way; imported only here, where one is opened."""
    if way == "nccl":
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        return NCCLWeightTransferEngine
    if way == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

        return IPCWeightTransferEngine
    if way == "gloo":
        from lego.engine.gloo import GlooEngine

        return GlooEngine
    raise ValueError(f"way: {way!r}, wanted nccl, ipc or gloo")


def tied(model: torch.nn.Module) -> Iterator[Any]:
    """Layers whose weights are all another layer's, such as an output head that is the embedding."""
    seen: set[int] = set()
    for layer in model.modules():
        own = {id(p) for p in layer._parameters.values() if p is not None}
        if own and own <= seen and hasattr(layer, "quant_method"):
            yield layer
        seen |= own


def unloaded(model: torch.nn.Module) -> Iterator[str]:
    """Names of layers that got no or too few weights since the update began.

    Of embeddings only the complete absence is seen: vLLM pads them by rows no file holds.
    """
    ready = {id(p) for p in model.parameters() if p.device.type != "meta"}
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or is_deferred_attention_layer(layer):
            continue
        old = info.kernel_tensors[0].values() if info.kernel_tensors else ()
        if old and all(id(p) in ready for p in old):
            continue  # tied to a layer that has them
        wanted = sum(get_tensor_load_numel(p) for p in layer._parameters.values() if p is not None)
        if isinstance(layer, VocabParallelEmbedding):
            wanted = min(wanted, 1)
        if info.load_numel < wanted:
            yield f"{name} ({info.load_numel} of {wanted} elements)"
