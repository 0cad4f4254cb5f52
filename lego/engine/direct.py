"""Weights straight from the trainer's memory to an engine: vLLM's own NCCL and CUDA IPC, at the trainer's end.

Runs in the trainer's ranks. All of them gather each tensor together, so that a server which fails in the middle only
silences the way to it: the gathering goes on to its end, and the failure is told then. The other end is
`lego.engine.weights`, in the server's workers.
"""

import collections
import json
import logging
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPException
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
_SHOWN = 200
"""Bytes of an answer that a message shows."""


class Held(Protocol):
    """A policy's weights as the trainer has them."""

    def held(self, *, everywhere: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and values of each, gathered by all ranks together; on rank 0 alone, or `everywhere`."""
        ...

    def forms(self, dtype: torch.dtype | None) -> Mapping[str, torch.Tensor]:
        """Shape and dtype of each, in the same order, as tensors without memory."""
        ...


class Source(WeightSource):
    """The weights as vLLM's senders ask for them: in the order and the dtypes of the forms."""

    def __init__(self, weights: Held, dtype: torch.dtype, *, device: torch.device, everywhere: bool) -> None:
        self._weights, self._device, self._everywhere = weights, device, everywhere
        self._forms = weights.forms(dtype)

    def metadata(self) -> list[ParamMeta]:
        """What comes, without gathering it."""
        return [ParamMeta(name, form.dtype, tuple(form.shape)) for name, form in self._forms.items()]

    def chunk_bytes(self) -> int:
        """Room for tensors that travel together: the largest alone, where it is larger than what else travels."""
        return max([BUFFER_BYTES, *(form.nbytes for form in self._forms.values())])

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._weights.held(everywhere=self._everywhere):
            yield name, tensor.to(device=self._device, dtype=self._forms[name].dtype)

    def gather(self) -> None:
        """Goes through all for the sake of the other ranks, and keeps nothing."""
        collections.deque(self, maxlen=0)


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
        said = self._ask("get_world_size", None)
        if said is None:
            return 0
        try:
            workers = int(json.loads(said)["world_size"])
        except (ValueError, LookupError, TypeError):
            workers = 0
        if workers < 1:
            self.fail(f"/get_world_size: {said[:_SHOWN]!r}, wanted world_size, 1 or more")
        return max(workers, 0)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Opens the way; our worker is also told which it is."""
        super().init_weight_transfer_engine({"way": self._way, "info": init_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Names the version too, which vLLM's senders do not know."""
        super().finish_weight_update(weight_version or str(self.version))

    def fail(self, why: str) -> None:
        """Keeps a failure and lets go of the other end. From any thread."""
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
            self.fail(f"/{path}: status {error.code}: {_words(error)}")
        except (OSError, HTTPException) as error:
            self.fail(f"/{path}: {error or type(error).__name__}")
        return None


class _Silenced:
    """A communicator whose failures are the client's: it says nothing more, and the sender goes on to its end."""

    def __init__(self, group: Any, client: Client) -> None:
        self._group, self._client = group, client
        self._ending = threading.Lock()
        self._ended = False

    def broadcast(self, tensor: torch.Tensor, **how: Any) -> None:
        """As the group's, until something fails at either end."""
        if not self._client.failures:
            try:
                self._group.broadcast(tensor, **how)
            except RuntimeError as error:
                self._client.fail(f"broadcast: {error}")

    def destroy(self) -> None:
        """Once, whoever asks for it: both threads of a sending may fail, and NCCL frees a communicator each time."""
        with self._ending:
            if not self._ended:
                self._ended = True
                self._group.destroy()


class Line:
    """An open way to one server in one of its lives, at this rank's end."""

    def __init__(self, url: str, life: str, source: Source, device: torch.device, rank: int, direct: Direct) -> None:
        """Opens it; where that fails, the failure is told when something is to be sent."""
        self.life, self._source, self._rank = life, source, rank
        self._client = Client(url, _way(direct, device))
        self._engine = self._broadcaster(direct, device) if isinstance(direct, Broadcast) else self._exporter()

    def send(self, version: int) -> str | None:
        """Start, all weights, finish; why it failed, or None. All ranks gather all weights either way."""
        self._client.version = version
        if self._engine is None:
            self._source.gather()
        else:
            self._engine.send_weights()
        return "; ".join(self._client.failures) or None

    def close(self) -> None:
        """Lets go of this end."""
        self._client.hang_up = lambda: None  # it holds the group, which holds the client: a ring, and its sockets
        if self._engine is not None:
            self._engine.shutdown()

    def _exporter(self) -> TrainerWeightTransferEngine:
        room = self._source.chunk_bytes()  # vLLM refuses a tensor that does not fit, such as a large embedding
        info = IPCTrainerInitInfo(rank=self._rank, packed=True, packed_buffer_size_bytes=room)
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
        group = _Silenced(engine.model_update_group, self._client)
        engine.model_update_group = group  # type: ignore[assignment]
        self._client.hang_up = group.destroy
        return engine


class Sender:
    """Sends a policy's weights to servers, from all ranks together."""

    def __init__(self, direct: Direct, weights: Held, dtype: torch.dtype, device: torch.device, rank: int) -> None:
        everywhere = _way(direct, device) == "ipc"
        self._direct, self._device, self._rank = direct, device, rank
        self._source = Source(weights, dtype, device=device, everywhere=everywhere)
        self._partakes = everywhere or rank == 0
        self._lines: dict[str, Line] = {}

    def send(self, url: str, life: str, version: int) -> str | None:
        """Brings a server these weights; why it failed, or None. A server's way is kept for its `life`."""
        if not self._partakes:
            self._source.gather()
            return None
        failure = self._line(url, life).send(version)
        if failure is not None:
            log.warning("weights version=%d did not reach %s: %s", version, url, failure)
            self._lines.pop(url).close()
        return failure

    def _line(self, url: str, life: str) -> Line:
        """The way to this life of a server; one to an earlier life is closed."""
        line = self._lines.get(url)
        if line is None or line.life != life:
            if line is not None:
                line.close()
            line = self._lines[url] = Line(url, life, self._source, self._device, self._rank, self._direct)
        return line


def _words(error: urllib.error.HTTPError) -> str:
    """What a refusal says, as far as it comes."""
    try:
        return error.read(500).decode(errors="replace")
    except (OSError, HTTPException) as broken:
        return f"({broken})"


def _way(direct: Direct, device: torch.device) -> str:
    if not isinstance(direct, Broadcast):
        return "ipc"
    return "nccl" if device.type == "cuda" else "gloo"


def _free_port(host: str) -> int:
    """A port that nobody had a moment ago: vLLM opens it only later."""
    with socket.socket() as taken:
        taken.bind((host, 0))
        return taken.getsockname()[1]
