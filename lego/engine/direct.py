"""Weights straight from the trainer's memory to an engine: vLLM's own NCCL and CUDA IPC, at the trainer's end.

Runs in the trainer's ranks. All of them gather each tensor together, so that a server which fails in the middle only
silences the way to it: the gathering goes on to its end, and the failure is told then. The other end is
`lego.engine.weights`, in the server's workers.
"""

import collections
import json
import logging
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerWeightTransferEngine, WeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

from lego.engine.gloo import GlooTrainer
from lego.engine.transfer import Broadcast, Direct

log = logging.getLogger(__name__)

ANSWER_S = 300.0
"""Time for each of a server's answers."""
BUFFER_BYTES = 256 << 20
"""Of tensors that travel together between GPUs; twice this is held at both ends of a broadcast."""


class Held(Protocol):
    """A policy's weights as the trainer has them."""

    def held(self, *, everywhere: bool = False) -> Iterator[tuple[str, torch.Tensor]]: ...

    def forms(self, dtype: torch.dtype | None) -> Mapping[str, torch.Tensor]: ...


class Source(WeightSource):
    """The weights as vLLM's senders ask for them: in the order and the dtypes of the forms."""

    def __init__(self, weights: Held, dtype: torch.dtype, *, device: torch.device, everywhere: bool) -> None:
        self._weights, self._device, self._everywhere = weights, device, everywhere
        self._forms = weights.forms(dtype)

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, form.dtype, tuple(form.shape)) for name, form in self._forms.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._weights.held(everywhere=self._everywhere):
            yield name, tensor.to(device=self._device, dtype=self._forms[name].dtype)


class Client(HTTPVLLMWeightSyncClient):
    """Asks one server. The first failure is told to `hang_up`; after it nothing is asked any more."""

    def __init__(self, url: str, way: str) -> None:
        super().__init__(url, ANSWER_S)
        self.version = 0
        """Of the weights under way."""
        self.failures: list[str] = []
        """What went wrong, at both ends."""
        self.hang_up: Callable[[], None] = lambda: None
        self._way = way
        # No proxy: what an environment says of the world outside is not for our own machines.
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def workers(self) -> int:
        """How many processes of the server take weights; 0 after a failure."""
        return int(json.loads(self._ask("get_world_size", None) or b'{"world_size": 0}')["world_size"])

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        super().init_weight_transfer_engine({"way": self._way, "info": init_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        super().finish_weight_update(weight_version or str(self.version))

    def fail(self, why: str) -> None:
        """Keeps a failure and lets go of the other end."""
        self.failures.append(why)
        self.hang_up()

    def _post(self, path: str, body: dict[str, Any] | None = None) -> None:
        self._ask(path, body or {})

    def _ask(self, path: str, body: Mapping[str, Any] | None) -> bytes | None:
        if self.failures:
            return None
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.base_url}/{path}", data, {"Content-Type": "application/json"})
        try:
            with self._open(request, timeout=self.timeout) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            self.fail(f"/{path}: status {error.code}: {error.read(500).decode(errors='replace')}")
        except OSError as error:
            self.fail(f"/{path}: {error}")
        return None


@dataclass(frozen=True, kw_only=True)
class _Silenced:
    """A communicator whose failures are the client's: it says nothing more, and the sender goes on to its end."""

    group: Any
    client: Client

    def broadcast(self, tensor: torch.Tensor, **how: Any) -> None:
        if not self.client.failures:
            try:
                self.group.broadcast(tensor, **how)
            except RuntimeError as error:
                self.client.fail(f"broadcast: {error}")

    def destroy(self) -> None:
        self.group.destroy()


class Line:
    """An open way to one server, at this rank's end."""

    def __init__(self, url: str, source: Source, device: torch.device, rank: int, direct: Direct) -> None:
        """Opens it; where that fails, the failure is told when something is to be sent."""
        self._source, self._rank = source, rank
        self._client = Client(url, _way(direct, device))
        self._engine = self._broadcaster(direct, device) if isinstance(direct, Broadcast) else self._exporter()

    def send(self, version: int) -> str | None:
        """Start, all weights, finish; why it failed, or None. All ranks gather all weights either way."""
        self._client.version = version
        if self._engine is None:
            collections.deque(self._source, maxlen=0)
        else:
            self._engine.send_weights()
        return "; ".join(self._client.failures) or None

    def close(self) -> None:
        """Lets go of this end."""
        if self._engine is not None:
            self._engine.shutdown()

    def _exporter(self) -> TrainerWeightTransferEngine:
        info = IPCTrainerInitInfo(rank=self._rank, packed=True, packed_buffer_size_bytes=BUFFER_BYTES)
        return IPCTrainerWeightTransferEngine.trainer_init(info, client=self._client, source=self._source)

    def _broadcaster(self, direct: Broadcast, device: torch.device) -> TrainerWeightTransferEngine | None:
        cuda, workers = device.type == "cuda", self._client.workers()
        if not workers:
            return None
        info = NCCLTrainerInitInfo(
            rank=0,
            master_address=direct.host,
            master_port=_free_port(direct.host) if cuda else 0,
            world_size=1 + workers,
            packed=cuda,
            packed_buffer_size_bytes=BUFFER_BYTES,
        )
        kind = NCCLTrainerWeightTransferEngine if cuda else GlooTrainer
        try:
            engine = kind.trainer_init(info, client=self._client, source=self._source)
        except RuntimeError as error:
            self._client.fail(f"opening the way to it: {error}")
            return None
        group = _Silenced(group=engine.model_update_group, client=self._client)
        engine.model_update_group = group  # type: ignore[assignment]
        self._client.hang_up = group.destroy
        return engine


class Sender:
    """Sends a policy's weights to servers, from all ranks together."""

    def __init__(self, direct: Direct, weights: Held, dtype: torch.dtype, device: torch.device, rank: int) -> None:
        everywhere = _way(direct, device) == "ipc"
        self._direct, self._weights, self._device, self._rank = direct, weights, device, rank
        self._source = Source(weights, dtype, device=device, everywhere=everywhere)
        self._partakes = everywhere or rank == 0
        self._lines: dict[str, tuple[str, Line]] = {}

    def send(self, url: str, life: str, version: int) -> str | None:
        """Brings a server these weights; why it failed, or None. A server's way is kept for its `life`."""
        if not self._partakes:
            collections.deque(self._weights.held(), maxlen=0)
            return None
        known, line = self._lines.get(url, ("", None))
        if line is None or known != life:
            line = self._open(url, line)
            self._lines[url] = life, line
        failure = line.send(version)
        if failure is not None:
            log.warning("weights version=%d did not reach %s: %s", version, url, failure)
            self._lines.pop(url)[1].close()
        return failure

    def _open(self, url: str, old: Line | None) -> Line:
        if old is not None:
            old.close()
        return Line(url, self._source, self._device, self._rank, self._direct)


def _way(direct: Direct, device: torch.device) -> str:
    if not isinstance(direct, Broadcast):
        return "ipc"
    return "nccl" if device.type == "cuda" else "gloo"


def _free_port(host: str) -> int:
    """A port that nobody had a moment ago: vLLM opens it only later."""
    with socket.socket() as taken:
        taken.bind((host, 0))
        return taken.getsockname()[1]
