"""vLLM as the rollout engine: one server as our child process, GPU or CPU wheel, told everything by flags."""

import asyncio
import importlib.metadata
import logging
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

from lego.child import Child
from lego.engine.folder import ModelFolder, read_model_folder
from lego.engine.plugin import BACKEND
from lego.errors import EngineError, UsageError

if TYPE_CHECKING:
    from lego.engine.vllm_client import VllmEngine

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
# Longer than our client keeps idle connections, so that none closes under a request.
SERVER_KEEP_ALIVE_S = 90
SERVED_NAME = "policy"
CPU_KV_CACHE_MIB = 256
# 32 reuses more of a prompt that grows turn by turn than the CPU default of 128, at the same cost.
CPU_BLOCK_TOKENS = 32
PASSED_ON = ("PATH", "HOME", "USER", "LANG", "TMPDIR", "TZ", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "HF_HOME")
PASSED_ON_PREFIXES = ("LC_", "XDG_", "CUDA_", "NVIDIA_", "NCCL_")


@dataclass(frozen=True, kw_only=True)
class VllmServer:
    """A vLLM server on this machine that holds one policy, a model folder in Hugging Face layout."""

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
    port: int = 0
    """Port on 127.0.0.1; 0 takes a free one."""
    start_timeout_s: float = 300.0
    """Time from start until the server must answer."""
    stop_grace_s: float = 10.0
    """Time to end in order before it is killed."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables set for the server alone."""
    extra: tuple[str, ...] = ()
    """Further arguments of `vllm serve`."""

    @asynccontextmanager
    async def open(
        self, model: Path, logs: Path, *, seed: int = 0, shared: Path | None = None, stop_ids: Sequence[int] = ()
    ) -> "AsyncIterator[VllmEngine]":
        """The started engine, weights labelled version 0; its output goes to `logs`/vllm.log.

        An answer ends at the folder's own stop ids and at `stop_ids`.
        Its sockets lie in a folder of their own in `shared`, by default where temporary files go; keep that path short.

        UsageError for a bad model folder or no vLLM, before anything is started; EngineError if it does not come up.
        """
        folder = read_model_folder(model)
        folder = replace(folder, stop_ids=tuple(dict.fromkeys([*folder.stop_ids, *stop_ids])))
        if self.routing and not folder.moe_layers:
            raise UsageError(f"routing is on but model folder {model} has no routed experts")
        server = replace(self, routing=bool(folder.moe_layers)) if self.routing is None else self
        cpu = is_cpu_wheel()
        with reserve_port(self.port) as taken, TemporaryDirectory(prefix="lego-vllm-", dir=shared) as sockets:
            port = taken.getsockname()[1]
            argv = [sys.executable, "-P", "-m", "lego.engine.vllmcli", *server.arguments(model, port, cpu, seed)]
            env = self.environment(os.environ, cpu) | {"VLLM_RPC_BASE_PATH": sockets}
            child = Child(argv, env=env, log=logs / "vllm.log", grace_s=self.stop_grace_s)
            async with child, server._connected(f"http://{HOST}:{port}", folder, child) as engine:
                yield engine

    @asynccontextmanager
    async def _connected(self, url: str, model: ModelFolder, child: Child) -> "AsyncIterator[VllmEngine]":
        # Here, so that a recipe that names a server loads no HTTP library.
        from lego.engine.vllm_client import VllmEngine, connect

        async with connect(url) as http:
            engine = VllmEngine(
                http, model, routing=bool(self.routing), pause=self.pause, obituary=lambda: obituary(child)
            )
            try:
                await self._wait_until_up(engine, child)
            except BaseException:
                child.hurry()  # while it starts it does not hear SIGTERM
                raise
            await engine.label(0)
            await engine.check_logprobs()
            yield engine

    async def _wait_until_up(self, engine: "VllmEngine", child: Child) -> None:
        began = time.monotonic()
        while not await engine.healthy():
            if (reason := obituary(child)) is not None:
                raise EngineError(reason)
            if time.monotonic() - began > self.start_timeout_s:
                raise EngineError(f"vLLM did not answer within {self.start_timeout_s:g} s; {last_lines(child)}")
            await asyncio.sleep(0.2)
        log.info("vLLM is up pid=%d seconds=%.1f", child.pid, time.monotonic() - began)

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
            *("--disable-log-stats", "--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"),
            "--disable-fastapi-docs",
            *self.extra,
        ]

    def environment(self, ours: Mapping[str, str], cpu: bool) -> dict[str, str]:
        """The server's whole environment: of ours only what places and finds it."""
        passed = {k: v for k, v in ours.items() if k in PASSED_ON or k.startswith(PASSED_ON_PREFIXES)}
        quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1"}
        fast = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(SERVER_KEEP_ALIVE_S)}
        # The engine's core works itself, without a worker process (420 MiB); no core pinned that trainer and boxes
        # need, no threads that fight for two cores.
        small = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        return passed | quiet | fast | (small if cpu else {}) | dict(self.env)


def is_cpu_wheel() -> bool:
    """Whether vLLM is here as its CPU wheel; UsageError without any."""
    names = {d.name.lower() for name in ("vllm", "vllm-cpu") for d in importlib.metadata.distributions(name=name)}
    if not names:
        raise UsageError("vLLM is not installed: install lego-rl[cpu] or lego-rl[gpu]")
    return "vllm" not in names


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
