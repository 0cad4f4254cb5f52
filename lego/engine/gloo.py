"""What stands in for NCCL where there are no GPUs: vLLM's broadcast of weights over gloo, both ends of it.

All else of the way is the same: what is asked of the server and when, the checks, what a failure does.
"""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import BroadcastOptions, ProcessGroupGloo, TCPStore
from vllm.distributed.weight_transfer.base import ParamMeta, VLLMWeightSyncClient, WeightSource
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_payload
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
    NCCLWeightTransferUpdateInfo,
)

PATIENCE = timedelta(seconds=60)
"""How long one end waits for the other."""


class Gloo:
    """A communicator as vLLM's of NCCL, as far as a broadcast needs it. RuntimeError if the other end is gone."""

    def __init__(self, store: TCPStore, address: str, rank: int, world_size: int) -> None:
        """`address` is this end's own, which the others reach."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = PATIENCE
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        self._group: ProcessGroupGloo | None = ProcessGroupGloo(store, rank, world_size, options)
        self._store = store  # the master's lives as long as the group

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Sends a contiguous tensor, or fills one; nothing once destroyed."""
        if self._group is not None:
            options = BroadcastOptions()
            options.rootRank, options.rootTensor = src, 0
            self._group.broadcast([tensor], options).wait()  # type: ignore[attr-defined]

    def destroy(self) -> None:
        """Closes this end, even while another thread waits in it."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()


class GlooEngine(NCCLWeightTransferEngine):
    """The worker's end."""

    model_update_group: Any

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Joins the trainer's group; RuntimeError if that is not there in time."""
        host, port, parallel = init_info.master_address, init_info.master_port, self.parallel_config
        assert host is not None and port is not None
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        store = TCPStore(host, port, init_info.world_size, False, PATIENCE, wait_for_workers=False)
        self.model_update_group = Gloo(store, _own_address(host, port), rank, init_info.world_size)

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Loads each tensor as it comes; RuntimeError if the trainer is gone."""
        self.model.load_weights(self._received(update_info))  # type: ignore[operator]

    def _received(self, info: NCCLWeightTransferUpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            self.model_update_group.broadcast(tensor, src=0)
            yield name, tensor


class GlooTrainer(NCCLTrainerWeightTransferEngine):
    """The trainer's end."""

    model_update_group: Any

    @classmethod
    def trainer_init(
        cls, init_info: NCCLTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> "GlooTrainer":
        """Opens a group with one server's workers; RuntimeError if they do not join in time."""
        assert source is not None
        host, world = init_info.master_address, init_info.world_size
        engine = cls(client=client, source=source, packed=False)
        store = TCPStore(host, 0, world, True, PATIENCE, wait_for_workers=False)
        theirs = NCCLWeightTransferInitInfo(
            master_address=host, master_port=store.port, rank_offset=1, world_size=world
        )
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(client.init_weight_transfer_engine, worker_init_payload(theirs))
            engine.model_update_group = Gloo(store, host, 0, world)
            joined.result()
        return engine

    def _broadcast(self, source: WeightSource, meta: list[ParamMeta]) -> None:
        for _, tensor in self._checked_iter(source, meta):
            self.model_update_group.broadcast(tensor.contiguous(), src=0)


def _own_address(host: str, port: int) -> str:
    """This machine's address on its way to another."""
    with socket.create_connection((host, port)) as line:
        return line.getsockname()[0]
