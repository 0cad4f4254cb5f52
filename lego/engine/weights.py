"""The weight-transfer backend: vLLM workers read new weights from one safetensors file of HF-named tensors.

Runs inside vLLM. Workers map the file, so that it must stay as it is until the update is finished: one that was written
into meanwhile is an error. So is an update that leaves a layer without its weights: vLLM would only log it and go on
with the old ones.
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
class FileInit(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """One file holds all weights of one version."""

    path: str
    version: int | None = None
    """What the file must hold, if it says what it holds; None takes any."""


class SafetensorsFileEngine(WeightTransferEngine[FileInit, FileUpdate]):
    """Loads a file through vLLM's layerwise reload, which packs each layer again for its kernels."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._file: WeightsFile | None = None

    def init_transfer_engine(self, init_info: FileInit) -> None:
        pass

    def start_weight_update(self) -> None:
        self._close()  # of an update that failed on its way
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdate) -> None:
        self._file = WeightsFile(Path(update_info.path), update_info.version)
        self.model.load_weights(iter(self._file))  # type: ignore[operator]
        missing = list(unloaded(self.model))
        if missing:
            raise ValueError(f"{update_info.path} left {len(missing)} layers without all weights, first {missing[0]}")

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in tied(self.model):
            # The weight itself is up to date; what the layer packed of it for its CPU kernel is not.
            layer.quant_method.process_weights_after_loading(layer)
        if self._file is not None:
            self._file.check()  # only now is the last tensor read: some wait for the rest of their layer
        self._close()

    def shutdown(self) -> None:
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


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
